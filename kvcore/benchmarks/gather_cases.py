# SPDX-License-Identifier: Apache-2.0
"""Gathers beside np.take and torch's index_select of the same rows."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import kvcore
from kvcore.benchmarks.arrays import Functions, copies, rows, torch_if_installed, warm

__all__ = ["gather", "select"]

REQUESTS, TOKENS, BLOCK, NUM_SLOTS = 64, 256, 128, 65536
ROWS, TOPK, CONTEXT, PAGE, FULL_PAGE = 16, 2048, 65536, 64, 128
SIZES = (64, 512)


def _peers(
    sources: list[NDArray[np.uint16]], slots: NDArray[np.int64], outs: list[NDArray[np.uint16]]
) -> Functions:
    """The same rows of flat sources by what a user would otherwise call."""

    def take() -> None:
        for source, out in zip(sources, outs, strict=True):
            np.take(source, slots, axis=0, out=out, mode="clip")

    functions: Functions = {"copyto": copies(*outs), "numpy": take}
    torch = torch_if_installed()
    if torch is not None:
        index = torch.from_numpy(slots)
        tensors = [torch.from_numpy(source.view(np.int16)) for source in sources]
        targets = [torch.from_numpy(out.view(np.int16)) for out in outs]

        def index_select() -> None:
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

    return {"kvcore": run} | _peers(caches, slots, outs)


def select(held: float) -> Functions:
    """A sparse-attention selection, step after step; the peers fetch the missing rows only."""
    rng = np.random.default_rng(0)
    pages = CONTEXT // FULL_PAGE
    full = [warm(np.empty((ROWS * pages, FULL_PAGE, size), np.uint16)) for size in SIZES]
    here = [warm(np.empty((ROWS * TOPK // PAGE, PAGE, size), np.uint16)) for size in SIZES]
    full_table = rng.permutation(ROWS * pages).astype(np.int32).reshape(ROWS, pages)
    table = rng.permutation(ROWS * TOPK // PAGE).astype(np.int32).reshape(ROWS, -1)
    status = np.full((ROWS, 1, 1, TOPK + 1), -1, np.int32)
    status[..., -1] = 0
    # Two sets of ids, told in turn: each has that part of the other's.
    missing = TOPK - round(TOPK * held)
    drawn = [rng.permutation(CONTEXT - 1)[: TOPK + missing] for _ in range(ROWS)]
    sets = [
        np.array([rng.permutation(ids[:TOPK]) for ids in drawn], np.int32),
        np.array([rng.permutation(ids[missing:]) for ids in drawn], np.int32),
    ]
    ids = np.zeros((ROWS, 1, 1, TOPK), np.int32)
    turns = itertools.cycle(sets)
    plan = kvcore.plan_gather_selection_kv_cache(
        here[0], here[1], table, status, ids, full[0], full[1], full_table,
        np.full(ROWS, CONTEXT, np.int32), np.ones(ROWS, np.int32),
        selection_topk_block_size=1, num_threads=1,
    )  # fmt: skip
    for _ in range(2):
        ids[:, 0, 0] = next(turns)
        plan.run()

    def run() -> None:
        ids[:, 0, 0] = next(turns)
        plan.run()

    functions: Functions = {"kvcore": run}
    if missing == 0:
        return functions
    new = np.array([each[TOPK:] for each in drawn])
    slots = np.take_along_axis(full_table.astype(np.int64), new // FULL_PAGE, axis=1) * FULL_PAGE
    slots = (slots + new % FULL_PAGE).reshape(-1)
    flat = [array.reshape(-1, array.shape[2]) for array in full]
    outs = [warm(np.empty((len(slots), array.shape[1]), np.uint16)) for array in flat]

    return functions | _peers(flat, slots, outs)
