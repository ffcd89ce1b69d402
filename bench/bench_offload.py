# SPDX-License-Identifier: Apache-2.0
"""Times the device pool's parts and a step of the decode engine.

    python -m pytest bench/bench_offload.py --benchmark-only

plan:   2,048 ids of 65,536 tokens against 16,384 places, block table and all checks included, the
        ids of the fitted score trace; one core.
serve:  the rows of such a plan from pool and host, 1,152 bytes a row, against numpy's take of the
        same rows from the same two arrays.
step:   the host's part of one step of the engine: bookkeeping and launches of 4 requests in 8
        layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.offload import DecodeEngine, DevicePool
from kvcore.offload.rows.policy import POLICIES
from kvcore.replay import TurnoverIds, score_trace

TOKENS, TOPK, PLACES, BLOCK, ROW = 65_536, 2048, 16_384, 128, 1152
STEPS = 120


@pytest.fixture(scope="module")
def trace() -> Any:
    return score_trace(STEPS, seed=1)[:, 0]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = kvcore.get_num_threads()
    kvcore.set_num_threads(1)
    yield
    kvcore.set_num_threads(before)


class Steps:
    """Plans the steps of a trace, over and over, after a warm-up."""

    def __init__(self, policy: str, trace: Any, row: int = 8) -> None:
        self.full = np.zeros((TOKENS // BLOCK, BLOCK, row), np.uint8)
        self.full[...] = 1
        self.pool = DevicePool(
            {0: [self.full]}, capacity=TOPK if policy == "previous" else PLACES, topk=TOPK,
            max_tokens=TOKENS, policy=policy,
        )  # fmt: skip
        self.pool.admit("r")
        self.table = np.random.default_rng(0).permutation(TOKENS // BLOCK)
        self.trace, self.step = trace, 0
        self.out = np.ones((TOPK, row), np.uint8)
        for _ in range(60):
            self.install(self.plan())

    def plan(self) -> Any:
        self.step = (self.step + 1) % len(self.trace)
        return self.pool.plan("r", self.trace[self.step], self.table)

    def install(self, selection: Any) -> None:
        self.pool.serve(selection, 0, [self.out])
        self.pool.install(selection, 0, [self.out])


@pytest.mark.benchmark(group="plan 2,048 ids, 16,384 places")
@pytest.mark.parametrize("policy", POLICIES)
def test_plan(benchmark: Any, trace: Any, policy: str) -> None:
    steps = Steps(policy, trace)
    benchmark.pedantic(steps.plan, rounds=400, iterations=1, warmup_rounds=5)


@pytest.mark.benchmark(group="serve 2,048 rows of 1,152 bytes")
@pytest.mark.parametrize("how", ["kvcore", "numpy"])
def test_serve(benchmark: Any, trace: Any, how: str) -> None:
    steps = Steps("lru", trace, ROW)
    flat = steps.full.reshape(-1, ROW)
    held = np.ones((PLACES, ROW), np.uint8)
    state: dict[str, Any] = {}

    def prepare() -> None:
        if "selection" in state:
            steps.install(state["selection"])
        selection = state["selection"] = steps.plan()
        hits = selection.source >= 0
        state["hits"], state["misses"] = np.flatnonzero(hits), np.flatnonzero(~hits)
        state["places"] = selection.source[hits]
        state["rows"] = selection.host_rows[~hits]

    def kvcore_serve() -> None:
        steps.pool.serve(state["selection"], 0, [steps.out])

    def numpy_serve() -> None:
        steps.out[state["hits"]] = held[state["places"]]
        steps.out[state["misses"]] = flat[state["rows"]]

    run = kvcore_serve if how == "kvcore" else numpy_serve
    benchmark.pedantic(run, setup=prepare, rounds=200, iterations=1)


@pytest.mark.benchmark(group="engine, host part of a step")
@pytest.mark.parametrize("real", [4, 0])
def test_step(benchmark: Any, real: int) -> None:
    with kvcore.Device("A3", clock="model") as dev:
        groups = ((0,), (1, 2, 3), (4, 5, 6, 7))
        full = {
            layer: [dev.empty_swapped((256, BLOCK, 64), "uint8")]
            for group in groups
            for layer in group
        }
        ids = {(r, g): TurnoverIds(256, seed=r + 9 * g) for r in range(4) for g in range(3)}
        made = np.zeros((1, 64), np.uint8)
        engine = DecodeEngine(
            dev, full, groups=groups, max_batch=4, max_tokens=8192, topk=256,
            select=lambda request, group, tokens: ids[request, group].next(tokens),
            rows=lambda request, layer, first, count: [made], layer_us=50.0,
        )  # fmt: skip
        for request in range(4):
            engine.admit(request, np.arange(64) + 64 * request, 8000, real=request < real)

        def step() -> None:
            engine.step_blocking(range(4))

        benchmark.pedantic(step, rounds=40, iterations=1, warmup_rounds=5)
        engine.close()
