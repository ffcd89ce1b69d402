# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a token lie: pure integers, from shapes and byte strides to piece loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["NZ_BYTES", "Lane", "Level", "WindowLane", "join", "make_lane", "meant_strides"]

#: Bytes of one FRACTAL_NZ column, for every dtype (32 // itemsize elements).
NZ_BYTES = 32

Level = tuple[int, int, int]  # count, byte step on the linear side, byte step on the paged side


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


def meant_strides(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides, with that of a contiguous array for each axis of one item.

    No index moves along such an axis, so its own stride may be any number.
    """
    steps: list[int] = []
    dense = itemsize
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        steps.append(dense if size == 1 else step)
        dense = size * steps[-1]
    return tuple(reversed(steps))


def join(levels: Iterable[Level]) -> tuple[Level, ...]:
    """The same steps in the same order in as few loops as strides allow."""
    merged: list[Level] = []
    for count, tok, page in reversed([level for level in levels if level[0] != 1]):
        if merged:
            inner_count, inner_tok, inner_page = merged[-1]
            if tok == inner_count * inner_tok and page == inner_count * inner_page:
                merged[-1] = (count * inner_count, inner_tok, inner_page)
                continue
        merged.append((count, tok, page))
    return tuple(reversed(merged))


def coalesce(levels: list[Level], item_bytes: int) -> tuple[tuple[Level, ...], int]:
    """The same bytes in the same order with as few and as long pieces as strides allow."""
    levels = [level for level in levels if level[0] != 1]
    piece = item_bytes
    while levels and levels[-1][1] == piece and levels[-1][2] == piece:
        piece *= levels.pop()[0]
    return join(levels), piece


def make_lane(
    tok_arg: int,
    page_arg: int,
    *,
    tok_stride: int,
    block_stride: int,
    row_stride: int,
    levels: list[Level],
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
    loops: tuple[Level, ...] = ()
    piece = 0
    if token_bytes:
        loops, piece = coalesce(levels, item_bytes)
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
        loops,
        piece,
        token_bytes,
        tiled,
    )
