# SPDX-License-Identifier: Apache-2.0
"""A replay with prefixes in tiers, held against a model of tiered caches in plain Python.

The model serves one request at a time and knows nothing of pools, schedulers and keys: it has a
list of what each tier holds, in the order in which it goes, and works out times with a pencil's
arithmetic from the moments at which requests were admitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.replay import (
    ModelProfile,
    OffloadOptions,
    OffloadReplay,
    OffloadReport,
    TraceRequest,
)
from kvcore.replay.answer.run import serve
from kvcore.replay.report.identity import settled
from kvcore.replay.serving.replay import Replay
from kvcore.replay.serving.runs import Run
from kvcore.replay.serving.scheduler import Running, Step
from kvcore.replay.serving.tiered import Tiered

SIZE = 128
MODEL = ModelProfile.named("tiny").replace(
    step_fixed=500.0, step_request=10.0, step_attended=0.01, prefill_token=7.0,
    prefill_attended=0.002,
)  # fmt: skip
TOKEN = 2 * 2 * 64 * 2 * 2
BLOCK = SIZE * TOKEN
Prompt = tuple[Any, ...]


def requests_of(prompts: list[tuple[int, int, int]]) -> list[TraceRequest]:
    """Prompts of a family, so that short ones are prefixes of long ones, but for their tails."""
    made = []
    for index, (family, tokens, output) in enumerate(prompts):
        ids = tuple(family * 100 + n for n in range(-(-tokens // 512)))
        made.append(TraceRequest(index, float(index), tokens, output, ids))
    return made


def blocks_of(request: TraceRequest) -> list[tuple[Prompt, int]]:
    """What each block of the prompt is, and its tokens: all 512-token blocks up to its end."""
    found = []
    for start in range(0, request.input_length, SIZE):
        end = min(start + SIZE, request.input_length)
        upto = [
            (request.hash_ids[n], min(512, request.input_length - 512 * n))
            for n in range(-(-end // 512))
        ]
        found.append(((end, tuple(upto)), end - start))
    return found


class Recorded(Tiered):
    """Notes when requests are admitted, and when their prompts are there."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.admitted_at: dict[int, float] = {}
        self.there_at: dict[int, float] = {}

    def admitted(self, running: Running) -> None:
        super().admitted(running)
        self.admitted_at[running.request.index] = self.now_us

    def _served(self, step: Step, count: int, until: float = -math.inf) -> None:
        for running, start, tokens in step.prefill:
            if start + count * tokens >= running.known:
                self.there_at[running.request.index] = self.now_us
        super()._served(step, count, until)


@dataclass
class PlainTier:
    """capacity in blocks; rates in bytes a microsecond; order: what goes first stands first."""

    capacity: int
    read: float
    write: float
    latency: float = 0.0
    order: list[Prompt] = field(default_factory=list)
    ready: dict[Prompt, float] = field(default_factory=dict)
    size: dict[Prompt, int] = field(default_factory=dict)
    free: float = 0.0
    hits: int = 0
    tokens: int = 0
    loaded: int = 0
    passed: int = 0
    written: int = 0
    evictions: int = 0


class Plain:
    """LRU in every tier, one request at a time."""

    def __init__(self, hbm: int, tiers: list[PlainTier], *, back: bool, keeps: bool = True) -> None:
        self.clean = hbm
        self.cached: list[tuple[Prompt, int]] = []
        self.tiers, self.back, self.keeps = tiers, back, keeps
        self.hbm_hits = self.hbm_tokens = 0

    def put(self, number: int, block: Prompt, tokens: int, ready: float) -> None:
        tier = self.tiers[number]
        gone = None
        if len(tier.order) == tier.capacity:
            gone = tier.order.pop(0)
            tier.evictions += 1
            when = ready
        tier.order.append(block)
        tier.ready[block], tier.size[block] = ready, tokens
        if gone is not None and self.back:
            self.down(number + 1, gone, tier.size[gone], when)

    def down(self, number: int, block: Prompt, tokens: int, now: float) -> None:
        if number < len(self.tiers) and block not in self.tiers[number].order:
            self.put(number, block, tokens, self.write(number, tokens, now))

    def write(self, number: int, tokens: int, now: float) -> float:
        tier = self.tiers[number]
        tier.written += tokens * TOKEN
        tier.free = max(tier.free, now) + tokens * TOKEN / tier.write
        return tier.free

    def take(self, count: int, now: float) -> None:
        """Blocks for a request: clean ones, then what is cached longest."""
        for _ in range(count):
            if self.clean:
                self.clean -= 1
            else:
                block, tokens = self.cached.pop(0)
                if self.back:
                    self.down(0, block, tokens, now)

    def begin(self, request: TraceRequest, now: float) -> tuple[float, float]:
        """Admit a request; returns when its load is done, and its prompt's compute time."""
        blocks = blocks_of(request)
        held = 0
        while held < len(blocks) and blocks[held] in self.cached:
            held += 1
        self.hbm_hits += held
        for block in blocks[:held]:
            self.cached.remove(block)
            self.hbm_tokens += block[1]
        self.take(len(blocks) - held, now)
        end, sources = held, []
        while end < len(blocks):
            block = blocks[end][0]
            having = [
                n for n, t in enumerate(self.tiers) if block in t.order and t.ready[block] <= now
            ]
            if not having:
                break
            sources.append(having[0])
            end += 1
        for tier in self.tiers:
            for block, _ in reversed(blocks[:end]):
                if block in tier.order:
                    tier.order.remove(block)
                    tier.order.append(block)
        done = now
        for number, tier in enumerate(self.tiers):
            mine = [b[1] for n, b in zip(sources, blocks[held:end], strict=True) if n == number]
            others = [b[1] for n, b in zip(sources, blocks[held:end], strict=True) if n > number]
            tier.hits += len(mine)
            tier.tokens += sum(mine)
            tier.loaded += sum(mine) * TOKEN
            tier.passed += sum(others) * TOKEN
            if mine or others:
                moved = (sum(mine) + sum(others)) * TOKEN
                done = max(done, now + tier.latency + moved / tier.read)
        for number, (block, tokens) in reversed(list(zip(sources, blocks[held:end], strict=True))):
            for above in reversed(range(number)):
                if block not in self.tiers[above].order:
                    self.put(above, block, tokens, done)
        known = min(end * SIZE, request.input_length)
        us = sum(7.0 + 0.002 * before for before in range(known, request.input_length))
        return done, us

    def there(self, request: TraceRequest, now: float) -> None:
        """The prompt is computed: it is written to the tiers."""
        if self.back:
            return
        for block, tokens in reversed(blocks_of(request)):
            at = now
            for number, tier in enumerate(self.tiers):
                if block not in tier.order:
                    at = self.write(number, tokens, at)
                    self.put(number, block, tokens, at)

    def end(self, request: TraceRequest, now: float) -> None:
        """It generates, and leaves."""
        blocks = blocks_of(request)
        more = -(-request.total_tokens // SIZE) - len(blocks)
        self.take(more, now)
        self.clean += more
        if not self.keeps:
            self.clean += len(blocks)
            return
        self.cached += blocks[::-1]


TIERS = st.lists(
    st.builds(
        PlainTier,
        st.integers(1, 30),
        st.sampled_from([200.0, 3000.0]),
        st.sampled_from([1.0, 500.0, 1e9]),
        st.sampled_from([0.0, 40.0]),
    ),
    max_size=3,
)
PROMPTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.one_of(st.integers(1, 2400), st.sampled_from([128, 512, 1024, 2048])),
        st.sampled_from([1, 2, 5, 129]),
    ),
    min_size=1,
    max_size=9,
)


def written(hbm: int, tiers: list[PlainTier], keeps: bool) -> str:
    parts = [f"hbm={hbm * BLOCK}B" + ("" if keeps else ":prefix=off")]
    for name, tier in zip(("dram", "ssd", "remote"), tiers, strict=False):
        parts.append(
            f"{name}={tier.capacity * BLOCK}B@{tier.read * 1e6:.0f}B/s"
            f":write={tier.write * 1e6:.0f}B/s:latency={tier.latency:.0f}us"
        )
    return ",".join(parts)


@settings(max_examples=25)
@given(PROMPTS, st.integers(22, 60), TIERS, st.booleans(), st.booleans())
def test_hits_evictions_and_times_are_those_of_plain_tiers(
    prompts: list[tuple[int, int, int]],
    hbm: int,
    tiers: list[PlainTier],
    back: bool,
    keeps: bool,
) -> None:
    keeps = keeps or back  # what is not kept on the device is not given away there
    if back:  # blocks are given away in decode too, at times that the model does not know
        for tier in tiers:
            tier.write = 1e9
    requests = requests_of(prompts)
    options = OffloadOptions(
        policy="none", tiers=written(hbm, tiers, keeps), batch=1, chunk=2**20,
        write_policy="write_back" if back else "write_through",
    )  # fmt: skip
    strategy = Recorded(MODEL, options)
    report = Replay(requests, strategy).run()
    plain = Plain(hbm, tiers, back=back, keeps=keeps)
    for request in requests:
        now = strategy.admitted_at[request.index]
        done, us = plain.begin(request, now)
        if us:
            assert strategy.there_at[request.index] == pytest.approx(done + us)
            plain.there(request, strategy.there_at[request.index])
        plain.end(request, now)
    figures = strategy.figures
    assert (figures.hbm_blocks, figures.hbm_tokens) == (plain.hbm_hits, plain.hbm_tokens)
    for found, one in zip(strategy.lower.tiers, tiers, strict=True):
        assert (found.hit_blocks, found.hit_tokens) == (one.hits, one.tokens)
        assert (found.read_bytes, found.passed_bytes) == (one.loaded, one.passed)
        assert (found.evictions, len(found)) == (one.evictions, len(one.order))
        assert found.written_bytes == one.written
    assert report.counters.seen_tokens == sum(r.total_tokens for r in requests)
    hits = plain.hbm_tokens + sum(tier.tokens for tier in tiers)
    assert report.counters.prefix_hit_tokens == hits


def run(requests: list[TraceRequest], tiers: str, **more: Any) -> OffloadReport:
    options = OffloadOptions(policy="none", tiers=tiers, **more)
    return OffloadReplay(requests, MODEL, options).run()


def test_many_at_a_time_and_everything_adds_up() -> None:
    """With preemptions, copies and loads at once: hits and computed tokens are the trace's."""
    requests = requests_of([(n % 5, 300 + 97 * (n * 7 % 23), 260) for n in range(16)])
    total = sum(request.total_tokens for request in requests)
    for policy, write in (
        ("lru", "write_through"),
        ("arc", "write_back"),
        ("length", "write_back"),
    ):
        report = run(
            requests, f"hbm={48 * BLOCK}B,dram={40 * BLOCK}B@1GB/s,ssd=1GB@200MB/s", batch=8,
            tier_policy=policy, write_policy=write, chunk=512, arrivals="time",
        )  # fmt: skip
        figures = report.to_dict()["tiers"]
        assert report.finished_requests == len(requests)
        assert report.counters.seen_tokens == total
        assert report.counters.preemptions > 0
        hits = [tier["hit_tokens"] for tier in figures["tiers"]]
        assert hits[0] > 0 < hits[2]
        assert sum(hits) <= figures["prompt"]["tokens"]
        assert figures["exposed_us"] <= report.totals.end_us


def test_hits_shorten_prefill_and_slow_tiers_cost() -> None:
    """Twice the same prompts; the second time they come from a tier, or are computed again."""
    requests = requests_of([(n % 6, 2048, 4) for n in range(12)])
    hbm = f"hbm={20 * BLOCK}B"
    nothing = run(requests, hbm, batch=1)
    fast = run(requests, f"{hbm},dram=1GB@1TB/s", batch=1)
    slow = run(requests, f"{hbm},ssd=1GB@1MB/s:write=1TB/s", batch=1)
    computed = sum(7.0 + 0.002 * before for before in range(2048))
    assert nothing.totals.prefill_us == pytest.approx(12 * computed)
    assert fast.totals.prefill_us == slow.totals.prefill_us == pytest.approx(6 * computed)
    assert fast.totals.end_us < nothing.totals.end_us < slow.totals.end_us
    figures = slow.to_dict()["tiers"]
    assert figures["exposed_us"] == pytest.approx(6 * 2048 * TOKEN)  # at a byte a microsecond
    assert figures["waited_ms"] == pytest.approx(2048 * TOKEN / 1e3)
    assert figures["tiers"][1]["read_busy_us"] == pytest.approx(6 * 2048 * TOKEN)


def test_the_answer_is_beside_device_memory_alone() -> None:
    requests = requests_of([(n % 6, 2048, 4) for n in range(12)])
    hbm = f"hbm={20 * BLOCK}B"
    alone = run(requests, hbm, batch=2)
    options = OffloadOptions(policy="none", tiers=f"dram=1GB@1TB/s, {hbm}", batch=2)
    served = serve(requests, MODEL, options)
    figures = served.figures()
    assert figures["baseline"]["latency_ms"] == settled(alone.to_dict()["latency_ms"])
    assert figures["decision"] == "yes"
    ratio = served.report.tokens_per_s / alone.tokens_per_s  # type: ignore[operator]
    assert figures["answer"]["speed_up"] == pytest.approx(ratio, rel=1e-6)
    assert "with the lower tiers" in figures["answer"]["sentence"]
    assert any("with device memory alone" in text for text in figures["answer"]["because"])
    assert serve(requests, MODEL, replace(options, tiers=hbm)).answer.decision is None
    assert serve(requests, MODEL, replace(options, baseline="off")).answer.decision is None


def test_the_dies_of_a_node_have_equal_parts() -> None:
    requests = requests_of([(n % 6, 2048, 4) for n in range(12)])
    hbm = f"hbm={20 * BLOCK}B"
    shared = run(requests, f"{hbm},dram=8GB@8GB/s", batch=1, node_dies=8)
    own = run(requests, f"{hbm},dram=1GB@1GB/s", batch=1)
    assert shared.to_dict()["tiers"] == own.to_dict()["tiers"]
    # The profile's own figure is of one die already.
    default = run(requests, f"{hbm},dram=8GB", batch=1, node_dies=8).to_dict()["tiers"]
    busy = default["tiers"][1]["read_busy_us"]
    assert busy == pytest.approx(6 * 2048 * TOKEN / 40e3)


def test_the_same_run_gives_the_same_report() -> None:
    requests = requests_of([(n % 5, 300 + 97 * n, 20) for n in range(20)])
    tiers = f"hbm={40 * BLOCK}B,dram={30 * BLOCK}B@1GB/s"
    first, second = (
        {**run(requests, tiers, batch=4, tier_policy="arc").to_dict(), "seconds": 0}
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("model", [MODEL, ModelProfile.named("tiny-sparse")], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "more",
    [
        {"arrivals": "time"},
        {"abort_share": 0.4, "arrivals": "order"},
        {"write_policy": "write_back", "arrivals": "time"},
    ],
    ids=["time", "aborts", "write_back"],
)
def test_steps_between_two_events_are_served_as_if_one_by_one(
    model: ModelProfile, more: dict[str, Any]
) -> None:
    """A request comes and goes, loads and runs out of room: every figure is the same."""
    requests = [
        TraceRequest(n, 90.0 * n, 200 + 397 * (n % 5), 30 + 61 * (n % 4), (n % 5, 9, n % 5 + 20, 7))
        for n in range(14)
    ]
    requests = [replace(r, hash_ids=r.hash_ids[: -(-r.input_length // 512)]) for r in requests]
    block = 128 * (model.token_bytes + model.token_index_bytes)
    options = OffloadOptions(
        policy="none", tiers=f"hbm={70 * block}B,dram={40 * block}B@1GB/s", batch=5, **more
    )
    steps: list[int] = []

    class Counted(Tiered):
        def serve_run(self, run: Run) -> int:
            steps.append(super().serve_run(run))
            return steps[-1]

    many = Replay(requests, Counted(model, options)).run()
    assert max(steps) > 20, "there are runs of many steps"
    walked = Tiered(model, options)
    walked.sums_steps = False
    single = Replay(requests, walked).run()
    assert many.counters == single.counters
    assert_alike({**many.to_dict(), "seconds": 0}, {**single.to_dict(), "seconds": 0})


def assert_alike(first: Any, second: Any) -> None:
    """Equal, but for the order of additions."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_alike(first[key], second[key])
    elif isinstance(first, list | tuple):
        for one, other in zip(first, second, strict=True):
            assert_alike(one, other)
    elif isinstance(first, float):
        assert first == pytest.approx(second, rel=1e-9, abs=1e-9)
    else:
        assert first == second


def test_requests_of_a_sparse_model_are_on_the_device_too() -> None:
    model = ModelProfile.named("tiny-sparse")
    requests = requests_of([(n % 3, 2048, 4) for n in range(9)])
    block = 128 * (6 * 160 + 3 * 32)
    tiers = f"hbm={20 * block}B,dram=1GB@1GB/s"
    options = OffloadOptions(policy="none", tiers=tiers, batch=1)
    report = OffloadReplay(requests, model, options).run()
    figures = report.to_dict()["tiers"]["tiers"]
    assert figures[1]["hit_tokens"] == 6 * 2048
    assert figures[1]["read_bytes"] == 6 * 16 * block
    assert report.totals.prefill_us == pytest.approx(3 * 2048 / 3344 * 1e6)
