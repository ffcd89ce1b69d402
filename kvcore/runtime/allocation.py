# SPDX-License-Identifier: Apache-2.0
"""New buffers of a device: what may be asked for, and whether there are bytes left for it."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcore.errors import DeviceOutOfMemoryError, ParamInvalidError
from kvcore.runtime._storage import Ledger, Storage
from kvcore.runtime.element_types import element_type
from kvcore.runtime.memory import Buffer, Keeper, Origin

__all__ = ["DEFAULT_ALIGNMENT", "Maker", "allocate"]

MAX_ALIGNMENT = 2 * 1024 * 1024  # a huge page, which CANN's own allocations come in
DEFAULT_ALIGNMENT = 512  # what a device's copy engines like best


class Maker(Keeper, Protocol):
    """What is needed of a device to make a buffer of its memory.

    key: what the device's storages carry.  buffer_class: what shows memory to a program.
    """

    key: object
    buffer_class: type[Buffer]

    @property
    def ledgers(self) -> Mapping[str, Ledger]:
        """Bytes used, by space."""

    def take(self, space: str, nbytes: int, /) -> npt.NDArray[np.uint8]:
        """New memory as bytes; MemoryError or DeviceOutOfMemoryError when there is none."""

    def keep(self, storage: Storage) -> None:
        """The storage is the device's, which gives it back when it is left."""


def allocate(
    maker: Maker,
    device: Any,
    shape: object,
    dtype: object,
    space: str,
    align: int,
    label: str | None = None,
) -> Buffer:
    """A new buffer of a device; see ``Device.empty``.  label: its name."""
    if label is not None and not isinstance(label, str):
        raise ParamInvalidError(
            f"name: expected a string or None, got {type(label).__name__}",
            argument="name",
            seen=type(label).__name__,
        )
    name, numpy_type = element_type(dtype)
    if numpy_type.hasobject or numpy_type.itemsize == 0 or numpy_type.subdtype is not None:
        raise ParamInvalidError(
            f"dtype: expected a type of fixed bytes, got {dtype!r}", argument="dtype", seen=dtype
        )
    dims = _dims(shape)
    if (
        not isinstance(align, int | np.integer)
        or isinstance(align, bool)
        or not 1 <= align <= MAX_ALIGNMENT
        or align & (align - 1)
    ):
        raise ParamInvalidError(
            f"align: expected a power of two from 1 to {MAX_ALIGNMENT}, got {align!r}",
            argument="align",
            seen=align,
        )
    wanted = math.prod(dims) * numpy_type.itemsize
    ledger = maker.ledgers[space]
    if wanted >= 2**62 or not ledger.take(wanted):
        raise _exhausted(space, wanted, ledger.used, ledger.capacity)
    try:
        base = maker.take(space, wanted + align)
        storage = Storage(ledger, maker.key, space, wanted, base)
    except BaseException as error:
        ledger.untake(wanted)
        if not isinstance(error, MemoryError) or isinstance(error, DeviceOutOfMemoryError):
            raise
        raise _exhausted(space, wanted, ledger.used, ledger.capacity, "this machine") from error
    start = -base.ctypes.data % align
    array = base[start : start + wanted].view(numpy_type).reshape(dims)
    row_bytes = wanted // dims[0] if dims and dims[0] else wanted
    storage.origin = Origin(
        label or "", dims, name, space, int(base.ctypes.data) + start, row_bytes
    )
    maker.keep(storage)
    maker.memory_changed()
    return maker.buffer_class(maker, device, storage, array, name, True)


def _dims(shape: object) -> tuple[int, ...]:
    try:
        if isinstance(shape, Sequence) and not isinstance(shape, str | bytes):
            dims = tuple(operator.index(n) for n in shape)
        else:
            dims = (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        dims = (-1,)
    # (a zero among them makes no room for a dimension that numpy cannot count)
    most = math.prod(n for n in dims if n > 0)
    if min(dims, default=0) < 0 or len(dims) > 32 or (0 in dims and most >= 2**58):
        raise ParamInvalidError(
            f"shape: expected whole numbers >= 0, at most 32 of them, got {shape!r}",
            argument="shape",
            seen=shape,
        )
    return dims


def _exhausted(
    space: str, wanted: int, used: int, capacity: int, whose: str = "the device"
) -> DeviceOutOfMemoryError:
    total = None if capacity < 0 else capacity
    free = None if total is None else total - used
    if total is None or whose != "the device":
        text = f"{space} memory: expected {wanted} bytes of {whose}, which has them not"
    else:
        text = f"{space} memory: expected {wanted} bytes, got {free} free of {total}"
    error = DeviceOutOfMemoryError(text, argument="shape", seen=free, expected=wanted)
    error.wanted, error.free, error.total = wanted, free, total
    return error
