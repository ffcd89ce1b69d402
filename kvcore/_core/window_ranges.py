# SPDX-License-Identifier: Apache-2.0
"""Exact byte ranges of what a compressing run touched."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore._core.overlap import merge

__all__ = ["Runs", "Side", "count_pieces", "rows", "tokens"]

Indices = NDArray[np.int64]


class Runs(NamedTuple):
    """One number a (batch, head) run each; see the kernel's windows_job."""

    slots: Indices
    heads: Indices
    tails: Indices
    lengths: Indices
    starts: Indices
    columns: Indices  # which head of the token
    means: bool


class Side(NamedTuple):
    """One lane in bytes; see the kernel's window_lane."""

    tok_stride: int
    start_stride: int
    head_stride: int
    tok_step: int
    block_size: int
    block_stride: int
    row_stride: int
    page_step: int
    flat: bool  # slots lie row_stride apart, across blocks too
    items: int
    item_bytes: int


def _count_up(first: Indices, count: Indices) -> tuple[Indices, Indices]:
    """(which run, first, first + 1, ... first + count - 1) of all runs, one after the other."""
    run = np.repeat(np.arange(len(first)), count)
    before = np.cumsum(count) - count
    return run, np.arange(len(run)) - before[run] + first[run]


def _items(side: Side, starts: Indices, step: int) -> Indices:
    if step == side.item_bytes:
        return merge(starts, side.items * side.item_bytes)
    starts = starts[:, None] + np.arange(side.items, dtype=np.int64) * step
    return merge(starts.reshape(-1), side.item_bytes)


def tokens(side: Side, base: int, runs: Runs) -> Indices:
    """Ranges of the tokens' rows that were read."""
    used = np.flatnonzero(runs.slots >= 0)
    front = runs.tails[used] if runs.means else runs.heads[used]
    both = [
        _count_up(np.zeros_like(front), front),
        _count_up(runs.tails[used], runs.lengths[used] - runs.tails[used]),
    ]
    origin = base + runs.starts[used] * side.start_stride + runs.columns[used] * side.head_stride
    starts = [origin[run] + token * side.tok_stride for run, token in both]
    return _items(side, np.concatenate(starts), side.tok_step)


def rows(side: Side, base: int, runs: Runs) -> Indices:
    """Ranges of the cache rows that were written."""
    used = np.flatnonzero(runs.slots >= 0)
    window = runs.tails[used] - runs.heads[used]
    count = runs.lengths[used] - window
    if runs.means:
        count = count + (window > 0)
    _, slots = _count_up(runs.slots[used], count)
    starts = base + slots // side.block_size * side.block_stride
    starts += slots % side.block_size * side.row_stride
    return _items(side, starts, side.page_step)


def count_pieces(side: Side, runs: Runs) -> int:
    """Contiguous pieces that were written, neighbours joined as the kernel does."""
    used = runs.slots >= 0
    heads, tails = runs.heads[used], runs.tails[used]
    rest = runs.lengths[used] - tails
    row_bytes = side.items * side.item_bytes
    means = int(np.count_nonzero(tails > heads)) if runs.means else 0
    if side.tok_step != side.item_bytes or side.page_step != side.item_bytes:
        return (int(heads.sum() + rest.sum()) + means) * side.items
    if side.flat and side.tok_stride == row_bytes and side.row_stride == row_bytes:
        return int(np.count_nonzero(heads) + np.count_nonzero(rest)) + means
    return int(heads.sum() + rest.sum()) + means
