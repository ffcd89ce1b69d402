# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a token lie: pure integers, from shapes and byte strides to piece loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcore.strides import Axis, coalesce

__all__ = ["NZ_BYTES", "Lane", "Level", "WindowLane", "make_lane"]

#: Bytes of one FRACTAL_NZ column, for every dtype (32 // itemsize elements).
NZ_BYTES = 32

Level = Axis  # count, byte step on the linear side, byte step on the paged side


class Lane(NamedTuple):
    """One cache with its source, in bytes; kv_lane of lanes.h without addresses."""

    tok_arg: int
    page_arg: int
    tok_offset: int
    tok_inner: int
    tok_outer_stride: int
    tok_stride: int
    block_stride: int
    row_stride: int
    levels: tuple[Level, ...]
    piece_bytes: int
    token_bytes: int
    tiled: bool


class WindowLane(NamedTuple):
    """One cache with its source where a (batch, head) at a time is written; steps in bytes.

    Row r of the cache holds ``items`` items of one head; token t of the batch that begins at
    start s lies at s * start_stride + t * tok_stride, its heads head_stride apart.
    """

    tok_arg: int
    page_arg: int
    start_stride: int
    tok_stride: int
    head_stride: int
    tok_step: int
    block_stride: int
    row_stride: int
    page_step: int
    items: int
    item_bytes: int


def make_lane(
    tok_arg: int,
    page_arg: int,
    *,
    tok_stride: int,
    block_stride: int,
    row_stride: int,
    levels: Sequence[Level],
    item_bytes: int,
    tok_offset: int = 0,
    tok_inner: int = 0,
    tok_outer_stride: int = 0,
    nz: bool = False,
) -> Lane:
    """Build a lane from loops over single items, outermost first."""
    token_bytes = item_bytes
    for count, _, _ in levels:
        token_bytes *= count
    loops, piece = coalesce(levels, item_bytes) if token_bytes else ([], 0)
    # A tile is whole columns of packed tokens into rows that lie one after the other.
    tiled = (
        nz and piece == row_stride == NZ_BYTES and len(loops) in (1, 2) and loops[-1][1] == NZ_BYTES
    )
    return Lane(
        tok_arg,
        page_arg,
        tok_offset,
        tok_inner,
        tok_outer_stride,
        tok_stride,
        block_stride,
        row_stride,
        tuple(loops),
        piece,
        token_bytes,
        tiled,
    )
