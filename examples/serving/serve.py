# SPDX-License-Identifier: Apache-2.0
"""Serve a tiny model with vLLM on the emulated machine, and check what its KV offload does.

    kvcore emulate --soc A2 -- python examples/serving/serve.py --model qwen3 --connector simple

Three rounds of the same prompts: cold; again, with the prefixes that the device still has; again,
after the engine has forgotten them and the device's cache was overwritten, so that what a
connector brings back came from the host.  With --preempt there is one round of requests for which
the device has too few blocks.  docs/serving.md says what is compared, and has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from connectors import CONNECTORS, RELOADS, transfer
from models import MODELS, VOCABULARY, build

BLOCK = 128
NEW = 12
#: Of a round with preemption: blocks, requests, new tokens of each, and steps that are enough.
FEW_BLOCKS, REQUESTS, MORE, STEPS = 10, 6, 140, 4000
#: Whole decode steps are captured.
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
#: vllm-ascend's passes over traced graphs, which its own library's operators are for.
NO_FUSION = {"enable_npugraph_ex": False, "fuse_norm_quant": False, "fuse_qknorm_rope": False}
#: Where the two best logits of the reference are nearer than this, either may be chosen.
TIE = 0.1


def prompts(number: int = 0) -> list[list[int]]:
    """Some shorter than a block, one of several blocks, two with a prefix in common.

    number: of a set of them; two sets have no prefix in common.
    """
    draw = [3 + (i * i * 7 + i * 31 + number) % (VOCABULARY - 3) for i in range(900)]
    return [draw[:5], draw[40:160], draw[200:630], draw[:300], draw[:280] + draw[700:720]]


class Engine:
    """vLLM in this process, with its parts at hand."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, blocks: int) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if arguments.graphs:
            # It asks for vllm-ascend's compiled library, once; torch's tracer could not follow it.
            from vllm_ascend.utils import enable_custom_op

            enable_custom_op()
        given = transfer(arguments.connector)
        self.llm: Any = LLM(
            model=str(folder),
            dtype=arguments.dtype,
            enforce_eager=not arguments.graphs,
            compilation_config=GRAPHS if arguments.graphs else None,
            additional_config={"ascend_compilation_config": NO_FUSION},
            max_model_len=1024,
            max_num_seqs=8,
            block_size=BLOCK,
            num_gpu_blocks_override=blocks,
            gpu_memory_utilization=0.2,
            kv_transfer_config=None if given is None else KVTransferConfig(**given),
            disable_log_stats=False,
            seed=0,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler: Any = core.scheduler
        self.runner: Any = core.model_executor.driver_worker.worker.model_runner

    def tokens(self, given: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Greedy tokens of each prompt, and how many of its tokens came out of a cache."""
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        found = self.llm.generate(
            [{"prompt_token_ids": one} for one in given], wanted, use_tqdm=False
        )
        return [list(one.outputs[0].token_ids) for one in found], [
            one.num_cached_tokens for one in found
        ]

    def stepped(self, given: list[list[int]], new: int) -> tuple[list[list[int]], int]:
        """Greedy tokens of requests that start together, and steps; stops after STEPS of them."""
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        engine = self.llm.llm_engine
        for number, one in enumerate(given):
            engine.add_request(str(number), {"prompt_token_ids": one}, wanted)
        found: dict[str, list[int]] = {}
        steps = 0
        while engine.has_unfinished_requests() and steps < STEPS:
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
        return [found.get(str(number), []) for number in range(len(given))], steps

    def spoil(self) -> None:
        """Overwrite the device's whole cache, before and after which nothing is under way."""
        import torch

        torch.npu.synchronize()
        for entry in self.runner.kv_caches:
            for cache in entry if isinstance(entry, list | tuple) else [entry]:
                cache.fill_(77)
        torch.npu.synchronize()

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def preempted(self) -> int:
        return sum(
            int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )


def differences(
    folder: Path, given: list[list[int]], found: list[list[int]]
) -> tuple[list[str], int]:
    """Where tokens are not the reference's: transformers, on the CPU, over the same tokens.

    A prompt is compared up to the first token where the two best logits are nearer than TIE and the
    engine took the second.  Also how many tokens were compared.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    said, compared = [], 0
    with torch.inference_mode():
        for number, (prompt, tokens) in enumerate(zip(given, found, strict=True)):
            logits = model(torch.tensor([prompt + tokens])).logits[0].float()
            for step, token in enumerate(tokens):
                best = logits[len(prompt) - 1 + step].topk(2)
                compared += 1
                if int(best.indices[0]) == token:
                    continue
                gap = float(best.values[0] - best.values[1])
                if gap >= TIE or token != int(best.indices[1]):
                    said.append(f"prompt {number}, token {step}: a gap of {gap:.3f}")
                break
    return said, compared


Checks = dict[str, list[str]]


def reloaded(engine: Engine, folder: Path, connector: str) -> tuple[Checks, int]:
    """The three rounds: what is wrong by check, and how many cold tokens were compared."""
    given = prompts()
    cold, _ = engine.tokens(given)
    hit, hits = engine.tokens(given)
    forgotten = engine.llm.reset_prefix_cache()
    engine.spoil()
    again, counts = engine.tokens(given)
    whole = [(len(one) - 1) // BLOCK * BLOCK for one in given]
    faults, compared = differences(folder, given, cold)
    pairs = zip(again, hit, strict=True)
    checks = {
        "cold tokens are the reference's": faults,
        "a prefix hit has all whole blocks": [] if hits == whole else [f"{hits} of {whole}"],
        "the engine forgot its prefixes": [] if forgotten else ["reset_prefix_cache failed"],
        "reloaded tokens are those of a prefix hit": [
            f"prompt {number}" for number, (one, other) in enumerate(pairs) if one != other
        ],
    }
    if connector not in RELOADS:  # they are computed again, as cold ones are
        del checks["reloaded tokens are those of a prefix hit"]
        checks["tokens computed again are the cold ones"] = [
            f"prompt {number}" for number, one in enumerate(again) if one != cold[number]
        ]
    else:
        checks["a reload has all whole blocks"] = (
            [] if counts == whole else [f"{counts} of {whole}"]
        )
    return checks, compared


def preempted(engine: Engine, folder: Path) -> tuple[Checks, int]:
    """Requests that do not fit: they are preempted, and their tokens are the reference's."""
    given = [
        [3 + (i * i * 5 + i * 17 * n) % (VOCABULARY - 3) for i in range(100)]
        for n in range(REQUESTS)
    ]
    found, steps = engine.stepped(given, MORE)
    faults, compared = differences(folder, given, found)
    number = engine.preempted()
    print(f"{steps} steps, {number} preemptions, tokens {[len(one) for one in found]}")
    return {
        "requests are preempted": [] if number else ["none was"],
        "every request ends": [] if all(len(one) == MORE for one in found) else [f"{steps} steps"],
        "their tokens are the reference's": faults,
    }, compared


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve a tiny model on the emulated machine.")
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--connector", choices=CONNECTORS, default="none")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--graphs", action="store_true", help="capture graphs (not enforce_eager)")
    parser.add_argument("--blocks", type=int, default=48, help="blocks of the device's cache")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tiny-models")
    parser.add_argument("--result", type=Path, help="a JSON file for what was found")
    parser.add_argument("--preempt", action="store_true", help="requests that do not all fit")
    arguments = parser.parse_args()
    # vllm-ascend computes latent attention in bfloat16 whatever the model's type is.
    arguments.dtype = arguments.dtype or (
        "bfloat16" if arguments.model.startswith("deepseek") else "float16"
    )
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # What vllm-ascend's compiler returns, written for an older torch, cannot be stored.
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    os.environ.setdefault("VLLM_DISABLE_COMPILE_CACHE", "1")
    began = time.monotonic()
    import vllm  # noqa: F401

    imported = time.monotonic()
    folder = build(arguments.model, arguments.folder, arguments.dtype)
    engine = Engine(folder, arguments, FEW_BLOCKS if arguments.preempt else arguments.blocks)
    ready = time.monotonic()
    free = engine.free_blocks()
    if arguments.preempt:
        checks, compared = preempted(engine, folder)
    else:
        checks, compared = reloaded(engine, folder, arguments.connector)
    checks |= {
        "all blocks are free at the end": (
            [] if engine.free_blocks() == free else [f"{engine.free_blocks()} of {free}"]
        ),
        "no request is left": [str(one) for one in engine.scheduler.requests],
    }
    ended = time.monotonic()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    for name, faults in checks.items():
        print(f"{'no ' if faults else 'yes'} {name}{': ' if faults else ''}{'; '.join(faults)}")
    times = {
        "import": imported - began, "engine": ready - imported, "rounds": ended - ready,
    }  # fmt: skip
    print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items()), end=", ")
    print(f"peak memory {memory:.1f} GiB")
    print(f"{compared} tokens compared with the reference")
    if arguments.result is not None:
        arguments.result.write_text(
            json.dumps(
                {"checks": checks, "compared": compared, "seconds": times, "peak_gib": memory},
                indent=1,
            )
        )
    return 1 if any(checks.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
