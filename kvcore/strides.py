# SPDX-License-Identifier: Apache-2.0
"""Integers about shapes: strides, contiguity, joined axes, extents and byte ranges.

Every room may use this one, and it knows none of them: no array, no dtype, no error of kvcore's.
Strides and ranges count bytes, or anything else, as long as one call counts one thing.  The stride
of an axis of one item says nothing, since no index moves along it, and may be any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "coalesce",
    "dense_strides",
    "extent",
    "is_dense",
    "join",
    "meant_strides",
    "merge_ranges",
    "moving_strides",
]

#: How often an axis is stepped along, then the step on each side: a copy has two sides.
Axis = tuple[int, ...]
Ranges = NDArray[np.int64]


def dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides of a C-contiguous array; an empty axis counts as one item."""
    steps, step = [], itemsize
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def meant_strides(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides, with that of a contiguous array for each axis of one item."""
    steps: list[int] = []
    dense = itemsize
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        steps.append(dense if size == 1 else step)
        dense = size * steps[-1]
    return tuple(reversed(steps))


def moving_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides, with 0 for each axis along which no index moves."""
    return tuple([step if size > 1 else 0 for size, step in zip(shape, strides, strict=True)])


def is_dense(shape: Sequence[int], strides: Sequence[int], itemsize: int, first: int = 0) -> bool:
    """Whether the axes from ``first`` on are C-contiguous among themselves."""
    if 0 in shape:
        return True
    step = itemsize
    for axis in range(len(shape) - 1, first - 1, -1):
        if shape[axis] != 1 and strides[axis] != step:
            return False
        step *= shape[axis]
    return True


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """(first, one past the last) byte, counted from the first item; (0, 0) of an empty array."""
    if 0 in shape:
        return 0, 0
    low, high = 0, itemsize
    for size, step in zip(shape, strides, strict=True):
        if step < 0:
            low += (size - 1) * step
        else:
            high += (size - 1) * step
    return low, high


def join(axes: Iterable[Axis]) -> list[Axis]:
    """The same steps in the same order in as few axes as the strides allow, outermost first."""
    joined: list[Axis] = []  # innermost first
    for count, *steps in reversed([axis for axis in axes if axis[0] != 1]):
        if joined:
            inner, *below = joined[-1]
            if steps == [inner * step for step in below]:
                joined[-1] = (count * inner, *below)
                continue
        joined.append((count, *steps))
    return joined[::-1]


def coalesce(axes: Iterable[Axis], itemsize: int) -> tuple[list[Axis], int]:
    """(axes, bytes of a piece): the same items in the same order in as long pieces as possible.

    A piece is contiguous on every side; the axes above it are joined.
    """
    left = [axis for axis in axes if axis[0] != 1]
    piece = itemsize
    while left and left[-1][1:] == (piece,) * (len(left[-1]) - 1):
        piece *= left.pop()[0]
    return join(left), piece


def merge_ranges(starts: Ranges, ends: Ranges) -> Ranges:
    """Ranges [n, 2] from starts and ends: ascending, those that touch or overlap merged."""
    if starts.size == 0:
        return np.empty((0, 2), np.int64)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.empty(starts.size, bool)
    first[0] = True
    np.greater(starts[1:], ends[:-1], out=first[1:])
    heads = np.flatnonzero(first)
    tails = np.append(heads[1:], starts.size) - 1
    return np.stack([starts[heads], ends[tails]], axis=1)
