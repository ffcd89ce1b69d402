# SPDX-License-Identifier: Apache-2.0
"""Gathers, compared with np.take and torch's index_select of the same rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import kvcore
from kvcore.benchmarks.arrays import Functions, copies, rows, torch_if_installed, warm

__all__ = ["gather", "select"]

REQUESTS, TOKENS, BLOCK, NUM_SLOTS = 64, 256, 128, 65536
ROWS, TOPK, CONTEXT, PAGE, FULL_PAGE = 16, 2048, 65536, 64, 128
SIZES = (64, 512)

Rows = NDArray[np.uint16]
Slots = NDArray[np.int64]
Call = Callable[[], None]


def _turns(steps: list[Slots], quarter: int) -> Callable[[], Slots]:
    """The next of the steps at each call, from that quarter of them on."""
    start = len(steps) * quarter // 4
    return itertools.cycle(steps[start:] + steps[:start]).__next__


def _take(sources: list[Rows], following: Callable[[], Slots], outs: list[Rows]) -> Call:
    def take() -> None:
        slots = following()
        for source, out in zip(sources, outs, strict=True):
            np.take(source, slots, axis=0, out=out, mode="clip")

    return take


def _peers(sources: list[Rows], steps: list[Slots], outs: list[Rows]) -> Functions:
    """The rows of flat sources, by what a user would otherwise call; the steps' in turn."""
    functions: Functions = {
        "copyto": copies(*outs),
        "numpy": _take(sources, _turns(steps, 1), outs),
    }
    torch = torch_if_installed()
    if torch is not None:
        following = _turns([torch.from_numpy(slots) for slots in steps], 2)
        tensors = [torch.from_numpy(source.view(np.int16)) for source in sources]
        targets = [torch.from_numpy(out.view(np.int16)) for out in outs]

        def index_select() -> None:
            index = following()
            for tensor, target in zip(tensors, targets, strict=True):
                torch.index_select(tensor, 0, index, out=target)

        functions["torch index_select"] = index_select
    return functions


def gather() -> Functions:
    """Whole requests from a paged cache."""
    caches = [rows(NUM_SLOTS, 8, 128, seed) for seed in (0, 1)]
    outs = [warm(np.empty((REQUESTS * TOKENS, 8, 128), np.uint16)) for _ in range(2)]
    blocks = np.random.default_rng(7).permutation(NUM_SLOTS // BLOCK)
    table = blocks[: REQUESTS * TOKENS // BLOCK].reshape(REQUESTS, -1).astype(np.int32)
    lengths = np.full(REQUESTS, TOKENS, np.int32)
    slots = (table[:, :, None].astype(np.int64) * BLOCK + np.arange(BLOCK)).reshape(-1)
    paged = [cache.reshape(-1, BLOCK, 8, 128).view(ml_dtypes.bfloat16) for cache in caches]
    typed = [out.view(ml_dtypes.bfloat16) for out in outs]

    def run() -> None:
        kvcore.gather_pa_kv_cache(
            paged[0], paged[1], table, lengths, typed[0], typed[1], num_threads=1
        )

    return {"kvcore": run} | _peers(caches, [slots], outs)


def select(held: float) -> Functions:
    """A sparse-attention selection, step after step; its peers are given what is missing.

    The ids of a step are a window of a row's ids in random order, which moves on by what is
    missing; the peers fetch the missing rows of other steps.  So no peer reads what another has
    just brought into a cache, and nothing is read again before the whole full cache was.  The last
    peer does not know what is held, and fetches the whole selection.
    """
    rng = np.random.default_rng(0)
    pages = CONTEXT // FULL_PAGE
    full = [warm(np.empty((ROWS * pages, FULL_PAGE, size), np.uint16)) for size in SIZES]
    here = [warm(np.empty((ROWS * TOPK // PAGE, PAGE, size), np.uint16)) for size in SIZES]
    full_table = rng.permutation(ROWS * pages).astype(np.int32).reshape(ROWS, pages)
    table = rng.permutation(ROWS * TOPK // PAGE).astype(np.int32).reshape(ROWS, -1)
    status = np.full((ROWS, 1, 1, TOPK + 1), -1, np.int32)
    status[..., -1] = 0
    missing = TOPK - round(TOPK * held)
    steps = (CONTEXT - 1) // missing if missing else 2
    order = rng.permuted(np.tile(np.arange(CONTEXT - 1, dtype=np.int32), (ROWS, 1)), axis=1)

    def window(step: int, first: int, size: int) -> NDArray[np.int32]:
        """[ROWS, size] ids from that place on, in an order of their own."""
        places = step * missing + first + np.arange(size)
        return rng.permuted(order[:, places % (steps * missing or TOPK)], axis=1)

    wanted = [window(step, 0, TOPK) for step in range(steps)]
    ids = np.zeros((ROWS, 1, 1, TOPK), np.int32)
    turns = itertools.cycle(wanted)
    plan = kvcore.plan_gather_selection_kv_cache(
        here[0], here[1], table, status, ids, full[0], full[1], full_table,
        np.full(ROWS, CONTEXT, np.int32), np.ones(ROWS, np.int32),
        selection_topk_block_size=1, num_threads=1,
    )  # fmt: skip
    ids[:, 0, 0] = wanted[-1]
    plan.run()

    def run() -> None:
        ids[:, 0, 0] = next(turns)
        plan.run()

    functions: Functions = {"kvcore": run}
    if missing == 0:
        return functions

    def slots_of(own: NDArray[np.int32]) -> Slots:
        blocks = np.take_along_axis(full_table, own // FULL_PAGE, axis=1).astype(np.int64)
        return (blocks * FULL_PAGE + own % FULL_PAGE).reshape(-1)

    new = [slots_of(window(step, TOPK - missing, missing)) for step in range(steps)]
    flat = [array.reshape(-1, array.shape[2]) for array in full]
    outs = [warm(np.empty((ROWS * missing, array.shape[1]), np.uint16)) for array in flat]
    everything = [warm(np.empty((ROWS * TOPK, array.shape[1]), np.uint16)) for array in flat]
    whole = _take(flat, _turns([slots_of(each) for each in wanted], 3), everything)
    return functions | _peers(flat, new, outs) | {"numpy, every row": whole}
