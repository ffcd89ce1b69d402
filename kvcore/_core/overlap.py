# SPDX-License-Identifier: Apache-2.0
"""Bytes that arrays share, and the byte ranges a plan touches.

Whether two strided views meet in a byte is a bounded Diophantine problem; numpy's
``shares_memory`` solves it exactly within a work limit.  Undecided counts as shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore._core import spans
from kvcore.errors import fail
from kvcore.strides import merge_ranges

__all__ = [
    "Access", "check_all_apart", "check_apart", "check_self", "extents", "merge", "named",
]  # fmt: skip

# Candidate solutions numpy may look at: some 10 ms at the most.
MAX_WORK = 100_000


class Access(NamedTuple):
    """Byte ranges of one argument.

    argument: its name; owner: the object the caller passed; ranges: int64 [n, 2] of absolute
    byte addresses [start, end), ascending and merged.
    """

    argument: str
    owner: Any
    ranges: NDArray[np.int64]

    def __repr__(self) -> str:
        kind = type(self.owner).__name__
        return f"Access({self.argument}: {kind}, {len(self.ranges)} ranges, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())


class _Bytes:
    """A view on memory that is never dereferenced, for shares_memory."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
        }


def _as_array(info: Any, shape: tuple[int, ...] | None = None, address: int | None = None) -> Any:
    return np.asarray(
        _Bytes(
            info.address if address is None else address,
            info.shape if shape is None else shape,
            info.strides,
            info.itemsize,
        )
    )


def _share(a: Any, b: Any) -> bool:
    try:
        # numpy's stub knows only the two named efforts; the function takes any count.
        return bool(np.shares_memory(a, b, max_work=MAX_WORK))  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return True


def check_apart(infos: tuple[Any, ...], i: int, j: int) -> None:
    """Raise unless argument i, an output, shares no byte with argument j."""
    if _share(_as_array(infos[i]), _as_array(infos[j])):
        name, other = infos[i].name, infos[j].name
        fail(name, "memory of its own", f"bytes shared with {other}")


def _self_overlaps(info: Any) -> bool:
    axes = sorted(
        (abs(step), size) for size, step in zip(info.shape, info.strides, strict=True) if size > 1
    )
    reach = info.itemsize
    for step, size in axes:
        if step < reach:
            break
        reach = step * (size - 1) + reach
    else:
        return False
    # Two different indices name one byte iff, for the first axis in which they differ, index 0
    # there meets an index above 0, with the axes before it fixed and those behind it free.
    for axis, size in enumerate(info.shape):
        if size < 2:
            continue
        fixed = (1,) * axis
        rest = info.shape[axis + 1 :]
        first = _as_array(info, (*fixed, 1, *rest))
        others = _as_array(info, (*fixed, size - 1, *rest), info.address + info.strides[axis])
        if _share(first, others):
            return True
    return False


def check_self(info: Any) -> None:
    """Raise when two elements of an output lie on one byte (zero or folded strides)."""
    if 0 in info.shape or info.itemsize == 0:
        return
    if _self_overlaps(info):
        fail(
            info.name,
            "elements with bytes of their own",
            f"overlapping ones (shape {info.shape}, strides {info.strides} bytes)",
        )


def check_all_apart(infos: Iterable[Any]) -> None:
    """Raise when two of these arrays, all of them outputs, share a byte.

    Bounds are compared first; where they meet, as in a slab that layers share, the answer depends
    on shapes, strides and distance alone and is found once.
    """
    known: set[object] = set()
    open_ones: list[tuple[int, Any]] = []
    for low, high, info in sorted(
        (_bounds(info) for info in infos if 0 not in info.shape), key=lambda one: one[:2]
    ):
        open_ones = [(end, other) for end, other in open_ones if end > low]
        for _, other in open_ones:
            form = (other.shape, other.strides, other.itemsize, info.shape, info.strides)
            key = (*form, info.itemsize, info.address - other.address)
            if key not in known:
                check_apart((info, other), 0, 1)
                known.add(key)
        open_ones.append((high, info))


def _bounds(info: Any) -> tuple[int, int, Any]:
    """(first byte, one past the last byte, the array's info)."""
    low = high = info.address
    for size, step in zip(info.shape, info.strides, strict=True):
        if size > 1:
            low += min(0, (size - 1) * step)
            high += max(0, (size - 1) * step)
    return low, high + info.itemsize, info


def merge(starts: NDArray[np.int64], nbytes: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Ranges [n, 2] from starts and lengths: ascending, touching ones merged."""
    if isinstance(nbytes, int):
        return spans.merge(starts.reshape(-1), nbytes)
    return merge_ranges(starts, starts + nbytes)


def extents(plan: Any, written: bool) -> tuple[Access, ...]:
    """The whole extents of a plan's outputs, or of all its arrays that are no outputs."""
    outputs = plan.spec.outputs
    found = []
    for i, name in enumerate(plan.operator.arguments):
        extent = plan.extent(i)
        if extent is not None and (i in outputs) == written:
            found.append(Access(name, plan.arrays[i], np.array([extent], np.int64)))
    return tuple(found)


def named(plan: Any, side: list[tuple[int, NDArray[np.int64]]]) -> tuple[Access, ...]:
    """Access tuples from (argument index, ranges) pairs; ranges of one argument are merged."""
    by_argument: dict[int, list[NDArray[np.int64]]] = {}
    for i, ranges in side:
        if len(ranges):
            by_argument.setdefault(i, []).append(ranges)
    found = []
    for i in sorted(by_argument):
        parts = by_argument[i]
        ranges = parts[0]
        if len(parts) > 1:
            both = np.concatenate(parts)
            ranges = merge_ranges(both[:, 0], both[:, 1])
        found.append(Access(plan.operator.arguments[i], plan.arrays[i], ranges))
    return tuple(found)
