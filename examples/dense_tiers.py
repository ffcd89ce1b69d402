# SPDX-License-Identifier: Apache-2.0
"""Published rows of dense models with their prefixes in tiers, expressed as replays.

vllm-ascend pull 10575: Qwen3-14B, TP1, ``--gpu-memory-utilization 0.6 --no-enable-prefix-caching``,
10 GiB of host memory, then a disk beside it, mean TTFT and TPOT at 8 clients and 24 conversations.
vllm-ascend pull 3433: Qwen3-14B, TP1, ``--gpu-memory-utilization 0.7``, host memory.

The threads say the model, the memory and the number of clients.  What they do not say is assumed
below, in `ASSUMED`; two figures are free, the time of a prompt's token and that of a step, and are
fitted to each row without tiers.  Pull 10575 has rows of 16 clients and 48 conversations too: there
clients wait for device memory, and a replay whose requests come when others are answered
(``--arrivals order``) cannot tell that wait from the one for a client's turn.

    python examples/dense_tiers.py
    python examples/dense_tiers.py --case 1 --factors 5.02 1.06     # without the fit: faster
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass

from kvcore.replay import ModelProfile, OffloadOptions, OffloadReplay, TraceRequest

ASSUMED = {
    "device": "64 GB, of which the weights take 27.5 GiB and activations 1.5",
    "workload": "vLLM's benchmarks/multi_turn with generate_multi_turn.json as it ships: 6 to 9"
    " requests a conversation, prompts of 500 + 1,000 + 120 to 160 tokens a turn, outputs of 80 to"
    " 120",
    "host link": "20 GB/s",
    "disk": "3 GB/s, larger than the content",
    "order": "conversations take turns; a client that is done sends its next request at once",
}
HBM_GIB, WEIGHTS_GIB, ACTIVATIONS_GIB = 64, 27.5, 1.5
IDS = 512  # tokens that an id of a trace stands for


def conversations(number: int, seed: int = 0) -> list[TraceRequest]:
    """Multi-turn conversations that take turns, each prompt with all that went before it."""
    draw = random.Random(seed)
    held: list[tuple[int, int]] = []  # tokens of the conversation so far, requests left
    for _ in range(number):
        prefix = min(5000, round(math.exp(draw.gauss(math.log(1000) - 0.5, 1.0))))
        held.append((500 + prefix, draw.randint(6, 9)))
    found: list[TraceRequest] = []
    while any(left for _, left in held):
        for place, (tokens, left) in enumerate(held):
            if not left:
                continue
            prompt, output = tokens + draw.randint(120, 160), draw.randint(80, 120)
            ids = [place * 1000 + n for n in range(-(-prompt // IDS))]
            if prompt % IDS:
                ids[-1] = 10**9 + len(found)  # (the tail is of this prompt alone)
            found.append(TraceRequest(len(found), 0.0, prompt, output, tuple(ids)))
            held[place] = prompt + output, left - 1
    return found


@dataclass
class Row:
    """One measured row: milliseconds, and how it is expressed."""

    name: str
    ttft: float
    tpot: float
    tiers: str


@dataclass
class Case:
    """Rows of one set-up; the first calibrates."""

    title: str
    clients: int
    conversations: int
    rows: list[Row]


def device(utilisation: float, extra: str = "") -> str:
    """Device memory that is left for caches."""
    gib = HBM_GIB * utilisation - WEIGHTS_GIB - ACTIVATIONS_GIB
    return f"hbm={gib:.2f}GiB{extra}"


OFF = device(0.6, ":prefix=off")
DRAM = "dram=10GiB@20GB/s"
CASES = [
    Case("pull 10575, 8 clients, 24 conversations", 8, 24, [
        Row("none", 1151.21, 87.28, OFF),
        Row("DRAM", 863.02, 67.62, f"{OFF},{DRAM}"),
        Row("DRAM + SSD", 605.81, 49.87, f"{OFF},{DRAM},ssd=1TB@3GB/s"),
    ]),
    Case("pull 3433, with 8 clients and 24 conversations (not said)", 8, 24, [
        Row("none", 595.7, 85.0, device(0.7)),
        Row("DRAM", 352.61, 56.06, f"{device(0.7)},dram=60GiB@20GB/s"),
    ]),
    Case("pull 3433, with 8 clients and 48 conversations (not said)", 8, 48, [
        Row("none", 595.7, 85.0, device(0.7)),
        Row("DRAM", 352.61, 56.06, f"{device(0.7)},dram=60GiB@20GB/s"),
    ]),
]  # fmt: skip


def served(case: Case, row: Row, prompt: float, step: float) -> tuple[float, float, float]:
    """Mean TTFT and TPOT in ms, and the share of the prompts that was found.

    A client waits for its answer before it sends again, so TTFT counts from the admission.
    """
    base = ModelProfile.named("qwen3-14b")
    model = base.replace(
        basis="fitted", source="to the row without tiers",
        prefill_token=base["prefill_token"].value * prompt,  # type: ignore[operator]
        prefill_attended=base["prefill_attended"].value * prompt,  # type: ignore[operator]
        step_fixed=base["step_fixed"].value * step,  # type: ignore[operator]
    )  # fmt: skip
    options = OffloadOptions(
        policy="none", tiers=row.tiers, batch=case.clients, weights_gib=None, baseline="off"
    )
    report = OffloadReplay(conversations(case.conversations), model, options).run()
    felt = report.latencies.summaries()
    ttft, queue, tpot = felt["ttft"], felt["queue"], felt["tpot"]
    assert ttft is not None
    assert queue is not None
    assert tpot is not None
    found = report.to_dict()["tiers"]
    hits = sum(tier["hit_tokens"] for tier in found["tiers"]) / found["prompt"]["tokens"]
    return (ttft.mean - queue.mean) / 1e3, tpot.mean / 1e3, hits


def fitted(case: Case) -> tuple[float, float]:
    """The factors of a prompt's and a step's time with which the first row comes out."""
    prompt = step = 3.0
    row = case.rows[0]
    for _ in range(12):
        ttft, tpot, _ = served(case, row, prompt, step)
        if abs(ttft / row.ttft - 1) < 0.003 and abs(tpot / row.tpot - 1) < 0.003:
            break
        prompt *= (row.ttft / ttft) ** 0.8
        step = max(0.01, step * (row.tpot / tpot) ** 1.2)
    return prompt, step


def main() -> None:
    """Print every row, what was fitted and what is assumed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int, choices=range(1, len(CASES) + 1))
    parser.add_argument("--factors", type=float, nargs=2, metavar=("PROMPT", "STEP"))
    chosen = parser.parse_args()
    for case in CASES if chosen.case is None else [CASES[chosen.case - 1]]:
        prompt, step = chosen.factors or fitted(case)
        print(f"{case.title}: a prompt's time x {prompt:.2f}, a step's x {step:.2f} of an A3 die")
        for place, row in enumerate(case.rows):
            ttft, tpot, hits = served(case, row, prompt, step)
            errors = f"{ttft / row.ttft - 1:+.1%}, {tpot / row.tpot - 1:+.1%}"
            what = "calibrates" if place == 0 else f"predicted: {errors}"
            print(
                f"  {row.name:11} TTFT {row.ttft:8.1f} ms -> {ttft:8.1f}, TPOT {row.tpot:6.1f} ms"
                f" -> {tpot:6.1f}; found {hits:5.1%}; {what}"
            )
        print(f"  free figures: 2; numbers in the rows: {2 * len(case.rows)}")
    print("assumed: " + "; ".join(f"{name}: {said}" for name, said in ASSUMED.items()))


if __name__ == "__main__":
    main()
