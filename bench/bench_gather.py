# SPDX-License-Identifier: Apache-2.0
"""Times gather_selection_kv_cache against np.take of exactly the rows that were missing.

    python bench/bench_gather.py
    python bench/bench_gather.py --steps 60 --json

16 rows, top-k 2,048, one-token blocks, K 512 + R 64 bfloat16, one thread.  Two cases:

repeat   60% of the ids repeat from step to step, 65,536 tokens a request.  Each step is timed as a
         pair: the call, and two np.take(..., mode="clip", out=) of the rows it had to read.
held     every id is held, at 16,384 and 1,048,576 tokens (one full cache shared by the rows).

Medians are printed; ratios are medians of the pairs' ratios, so that a busy machine disturbs both.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import kvcore

ROWS, TOPK, KV_SIZE, ROPE_SIZE = 16, 2048, 512, 64
PAGE, FULL_PAGE = 64, 128
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Array = NDArray[Any]


@dataclass
class Setting:
    """The arrays of one case; ids are written into topk_ids before each step."""

    selection: list[Array]
    full: list[Array]
    table: Array
    status: Array
    topk_ids: Array
    full_table: Array
    kv: Array

    @classmethod
    def make(cls, tokens: int, shared: bool, index: str) -> Setting:
        pages = tokens // FULL_PAGE
        rng = np.random.default_rng(0)
        blocks = pages if shared else pages * ROWS
        full_table = rng.permutation(blocks).astype(index).reshape(-1, pages)
        if shared:
            full_table = np.repeat(full_table, ROWS, axis=0)
        pages_of_row = TOPK // PAGE
        table = rng.permutation(ROWS * pages_of_row).astype(index).reshape(ROWS, pages_of_row)
        sizes = (ROPE_SIZE, KV_SIZE)
        full = [np.empty((blocks, FULL_PAGE, n), np.uint16) for n in sizes]
        for array in full:
            array[...] = np.arange(array.shape[2], dtype=np.uint16)
        return cls(
            [np.zeros((ROWS * pages_of_row, PAGE, n), np.uint16) for n in sizes],
            full,
            table,
            np.full((ROWS, 1, 1, TOPK + 1), -1, index),
            np.zeros((ROWS, 1, 1, TOPK), index),
            np.ascontiguousarray(full_table),
            np.full(ROWS, tokens, index),
        )

    def plan(self, stats: dict[str, Any] | None = None, threads: int = 1) -> Any:
        rope, kv = (a.view(BFLOAT16) for a in self.selection)
        full_rope, full_kv = (a.view(BFLOAT16) for a in self.full)
        self.status[..., -1] = 0
        return kvcore.plan_gather_selection_kv_cache(
            rope, kv, self.table, self.status, self.topk_ids, full_rope, full_kv,
            self.full_table, self.kv, np.ones(ROWS, self.kv.dtype),
            selection_topk_block_size=1, stats=stats, num_threads=threads,
        )  # fmt: skip

    def slots(self, row: int, ids: Array) -> Array:
        return self.full_table[row, ids // FULL_PAGE].astype(np.int64) * FULL_PAGE + ids % FULL_PAGE


def next_ids(rng: np.random.Generator, before: Array, tokens: int, repeated: float) -> Array:
    """Rows of distinct ids, that part of them from before, in random order."""
    keep = round(TOPK * repeated)
    rows = []
    for ids in before:
        old = rng.permutation(ids)[:keep]
        new = np.setdiff1d(rng.choice(tokens - 1, 2 * TOPK, replace=False), ids)
        rows.append(rng.permutation(np.concatenate([old, rng.permutation(new)[: TOPK - keep]])))
    return np.array(rows)


def timed(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def repeat_case(steps: int, threads: int, index: str) -> dict[str, float]:
    tokens = 65536
    setting = Setting.make(tokens, False, index)
    rng = np.random.default_rng(1)
    ids = np.array([rng.choice(tokens - 1, TOPK, replace=False) for _ in range(ROWS)])
    setting.topk_ids[:, 0, 0] = ids
    plan = setting.plan(threads=threads)
    plan.run()
    flat = [a.reshape(-1, a.shape[2]) for a in setting.full]
    missing = ROWS * (TOPK - round(TOPK * 0.6))
    out = [np.zeros((missing, a.shape[1]), np.uint16) for a in flat]
    ours, takes = [], []
    for step in range(steps):
        before, ids = ids, next_ids(rng, ids, tokens, 0.6)
        setting.topk_ids[:, 0, 0] = ids
        missed = [i[~np.isin(i, b)] for b, i in zip(before, ids, strict=True)]
        slots = np.concatenate([setting.slots(r, m) for r, m in enumerate(missed)])

        def take(slots: Array = slots) -> None:
            for source, target in zip(flat, out, strict=True):
                np.take(source, slots, axis=0, mode="clip", out=target)

        if step % 2:
            takes.append(timed(take))
            ours.append(timed(plan.run))
        else:
            ours.append(timed(plan.run))
            takes.append(timed(take))
        assert plan.bytes_moved == missing * (KV_SIZE + ROPE_SIZE) * 2
    return {
        "call_us": float(np.median(ours)) * 1e6,
        "take_us": float(np.median(takes)) * 1e6,
        "call_over_take": float(np.median(np.array(ours) / np.array(takes))),
    }


def held_case(steps: int, threads: int, index: str) -> dict[str, float]:
    lengths = (16384, 1048576)
    plans, settings = [], []
    rng = np.random.default_rng(2)
    for tokens in lengths:
        setting = Setting.make(tokens, True, index)
        ids = [rng.choice(tokens - 1, TOPK, replace=False) for _ in range(ROWS)]
        setting.topk_ids[:, 0, 0] = ids
        plans.append(setting.plan(threads=threads))
        plans[-1].run()
        settings.append(setting)
    times: list[list[float]] = [[], []]
    for step in range(steps):
        for setting in settings:
            setting.topk_ids[:, 0, 0] = rng.permuted(setting.topk_ids[:, 0, 0], axis=1)
        for i in (0, 1) if step % 2 else (1, 0):
            times[i].append(timed(plans[i].run))
            assert plans[i].bytes_moved == 0
    short, long = (np.array(t) for t in times)
    return {
        "row_us_16k": float(np.median(short)) * 1e6 / ROWS,
        "row_us_1m": float(np.median(long)) * 1e6 / ROWS,
        "long_over_short": float(np.median(long / short)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each case (40)")
    parser.add_argument("--threads", type=int, default=1, help="num_threads of the call (1)")
    parser.add_argument("--index", choices=["int32", "int64"], default="int32")
    parser.add_argument("--case", choices=["repeat", "held", "both"], default="both")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    if options.case != "repeat":
        results["held"] = held_case(options.steps, options.threads, options.index)
    if options.case != "held":
        results["repeat"] = repeat_case(options.steps, options.threads, options.index)
    if options.json:
        print(json.dumps(results))
        return
    for case, numbers in results.items():
        for name, value in numbers.items():
            print(f"{case:7} {name:16} {value:10.2f}")


if __name__ == "__main__":
    main()
