# SPDX-License-Identifier: Apache-2.0
"""Reads that leave the view they begin at: Nct, whose tokens lie in a buffer behind the array.

Such an operator counts from an array's first element with strides of its own.  Everything that it
reads must be memory that is known to belong to the array: the storage of a tensor, the ndarray at
the end of the chain of numpy bases (nothing says how long the memory below that is), a device's
allocation; of anything else the view's own extent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcore._core import adopt
from kvcore.errors import KVCoreError, fail
from kvcore.strides import extent

__all__ = ["Reach", "Seen", "as_read", "check"]


class Reach(NamedTuple):
    """What a call reads of one argument, in bytes from its first element.

    start, end: the first byte and one past the last.  shape, strides: of what begins at start.
    expected: the rule in elements, for an error.
    """

    argument: int
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    expected: str


class Seen(NamedTuple):
    """An argument as a call reads it; what the test of overlap asks of an ArrayInfo."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def as_read(infos: Sequence[Any], reaches: Iterable[Reach]) -> tuple[Any, ...]:
    """The infos of a call, with what is read where that is not the view."""
    found = list(infos)
    for one in reaches:
        info = found[one.argument]
        found[one.argument] = Seen(
            info.name, info.address + one.start, one.shape, one.strides, info.itemsize
        )
    return tuple(found)


def check(reach: Reach, info: Any, array: Any) -> None:
    """Raise ParamInvalidError unless the read stays in memory of that array."""
    first, past = _memory(array, info)
    if info.address + reach.start < first or info.address + reach.end > past:
        seen = max(past - info.address, 0) // info.itemsize
        fail(info.name, reach.expected, seen)


def _memory(array: Any, info: Any) -> tuple[int, int]:
    """(first, one past the last) address of the memory that is known to belong to an array."""
    own = _extent(info.address, info.shape, info.strides, info.itemsize)
    found = _storage(array)
    # An owner that does not hold its own view knows nothing.
    return found if found is not None and found[0] <= own[0] and own[1] <= found[1] else own


def _attribute(array: Any, name: str, default: Any) -> Any:
    try:
        return getattr(array, name, default)
    except (KVCoreError, MemoryError):  # a buffer that was freed says so itself
        raise
    except Exception:  # no word on memory: the view's own extent counts
        return default


def _storage(array: Any) -> tuple[int, int] | None:
    inner = _attribute(array, "__kvcore_array__", array)
    if isinstance(inner, np.ndarray):
        return _numpy(inner)
    if adopt.is_torch(array):
        storage = array.untyped_storage()
        first = int(storage.data_ptr())
        return first, first + int(storage.nbytes())
    device = _attribute(array, "__kvcore_device_array__", None)
    if device is not None:
        first = int(device.base)
        return first, first + int(device.storage_bytes)
    return None


_BASE = np.ndarray.__dict__["base"]


def _numpy(array: Any) -> tuple[int, int]:
    while True:
        below = _BASE.__get__(array)
        if not isinstance(below, np.ndarray):
            break
        array = below
    plain = np.ndarray.view(array, np.ndarray)
    return _extent(plain.ctypes.data, plain.shape, plain.strides, plain.itemsize)


def _extent(
    address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[int, int]:
    low, high = extent(shape, strides, itemsize)
    return address + low, address + high
