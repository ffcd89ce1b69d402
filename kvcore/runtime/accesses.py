# SPDX-License-Identifier: Apache-2.0
"""What an operation touches: arguments and their absolute byte ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import fail
from kvcore.runtime._storage import BufferCore
from kvcore.runtime.arguments import array_of
from kvcore.strides import merge_ranges

__all__ = ["Access", "Ranges", "Whole", "accesses_of", "ranges_of", "whole_accesses"]

Ranges = npt.NDArray[np.int64]
Whole = tuple[tuple["Access", ...], tuple["Access", ...]]


class Access:
    """What a plan touches of one argument: absolute byte ranges, worked out when asked for.

    argument: what reports call it.  owner: the buffer or array; it keeps the memory alive.
    arrays: numpy arrays that cover what is touched; None: the whole of the owner.
    """

    __slots__ = ("_arrays", "_ranges", "argument", "owner")

    def __init__(
        self, argument: str, owner: Any, arrays: Sequence[npt.NDArray[Any]] | None = None
    ) -> None:
        self.argument: str = argument
        self.owner: Any = owner
        if arrays is None:
            own = owner.storage.owner if isinstance(owner, BufferCore) else None
            arrays = (array_of(owner, argument, own),)
        self._arrays = arrays
        self._ranges: Ranges | None = None

    @property
    def read_only(self) -> bool:
        """Whether some of it may not be written."""
        return not all(array.flags.writeable for array in self._arrays)

    @property
    def ranges(self) -> Ranges:
        """Rows (start, end), ascending and merged."""
        if self._ranges is None:
            rows = [ranges_of(array) for array in self._arrays]
            self._ranges = rows[0] if len(rows) == 1 else merge_ranges(*np.concatenate(rows).T)
        return self._ranges


def ranges_of(array: npt.NDArray[Any]) -> Ranges:
    """The exact bytes of an array: rows (start, end), ascending and merged."""
    start = array.ctypes.data
    if array.size == 0:
        return np.empty((0, 2), np.int64)
    if array.flags.c_contiguous:
        return np.array([[start, start + array.nbytes]], np.int64)
    dims = [(n, s) for n, s in zip(array.shape, array.strides, strict=True) if n > 1]
    # a negative stride touches the same bytes from the other end; a zero one, the same byte
    start += sum((n - 1) * s for n, s in dims if s < 0)
    dims = sorted(((n, abs(s)) for n, s in dims if s), key=lambda d: d[1])
    run = array.itemsize
    while dims and dims[0][1] == run:
        run *= dims.pop(0)[0]
    starts = np.array([start], np.int64)
    for n, stride in dims:
        starts = (np.arange(n, dtype=np.int64)[:, None] * stride + starts[None, :]).ravel()
    return merge_ranges(starts, starts + run)


def accesses_of(
    argument: str, owners: Sequence[object], arrays: Sequence[npt.NDArray[Any]]
) -> tuple[Access, ...]:
    """One access an owner; owners of one storage are taken together."""
    groups: dict[int, tuple[object, list[npt.NDArray[Any]]]] = {}
    for owner, array in zip(owners, arrays, strict=True):
        key = id(owner.storage if isinstance(owner, BufferCore) else owner)
        groups.setdefault(key, (owner, []))[1].append(array)
    return tuple(Access(argument, owner, group) for owner, group in groups.values())


def whole_accesses(argument: str, given: object, key: object) -> tuple[Access, ...]:
    """An access to the whole of each of these; one buffer or array stands for itself."""
    if isinstance(given, BufferCore | np.ndarray) or hasattr(given, "__dlpack__"):
        return (Access(argument, given, (array_of(given, argument, key),)),)
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        fail(argument, "buffers or arrays", type(given).__name__)
    owners = list(given)
    names = [f"{argument}[{i}]" for i in range(len(owners))]
    return tuple(
        Access(name, owner, (array_of(owner, name, key),))
        for name, owner in zip(names, owners, strict=True)
    )
