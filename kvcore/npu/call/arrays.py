# SPDX-License-Identifier: Apache-2.0
"""Arguments of a plan as the device sees them.

Two kinds of arrays live on a device: objects with ``__kvcore_device_array__`` (the runtime's
buffers) and torch_npu's tensors, taken by their data pointer.  Index arrays may also be on the
host, where ``backend="aclnn"`` was named: they are copied to the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvcore._core.plan import Plan
from kvcore.dtypes import BY_NAME, TORCH_NAMES, DType
from kvcore.errors import fail
from kvcore.strides import dense_strides, extent, is_dense

__all__ = ["Argument", "dtype_named", "element", "is_dense_from", "read_all"]

#: A storage must begin on this many bytes.
ALIGNMENT = 32


@dataclass(slots=True)
class Argument:
    """One array of a call; what operators' rules read of it, and where its storage is.

    strides in bytes.  base, storage_bytes: the whole allocation that the array is a view of.
    dtype: of the stored items.  element: what the operator takes the items for.
    source: the caller's object.  device_id: None for host memory.
    key: the same for all arrays of one kvcore.Device; None for those of no Device.
    host_address: where the host, and every copy, finds memory of the host that a kernel uses by
    another address; None for memory of the device.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType | None
    dtype_name: str
    itemsize: int
    read_only: bool
    on_device: bool
    address: int
    base: int
    storage_bytes: int
    device_id: int | None
    source: Any
    element: DType | None = None
    key: object = None
    host_address: int | None = None
    #: What its aclTensor is made of, from the first time on; a replaced argument has none yet.
    described: tuple[Any, ...] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Stored items."""
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the items without gaps."""
        return self.size * self.itemsize

    def placed(self, address: int) -> Argument:
        """A contiguous array of the same shape at another place on the device."""
        return replace(
            self,
            strides=dense_strides(self.shape, self.itemsize),
            address=address,
            base=address,
            storage_bytes=max(self.nbytes, 1),
            on_device=True,
            host_address=None,
        )

    def seen_as(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Argument:
        """Another view of the same storage, ``offset`` bytes behind this one's first element."""
        host = self.host_address
        return replace(
            self,
            shape=tuple(shape),
            strides=tuple(strides),
            address=self.address + offset,
            host_address=None if host is None else host + offset,
        )


def is_dense_from(argument: Argument, axis: int) -> bool:
    """Whether the axes from ``axis`` on are C-contiguous among themselves.

    The others may lie apart, by whole elements: CANN counts in these.
    """
    shape, strides, item = argument.shape, argument.strides, argument.itemsize
    if not is_dense(shape, strides, item, axis):
        return False
    size = item * math.prod(shape[axis:])
    return 0 in shape or all(
        n == 1 or (stride >= size and not stride % item)
        for n, stride in zip(shape[:axis], strides[:axis], strict=True)
    )


def read_all(plan: Plan) -> tuple[Argument | None, ...]:
    """Every argument of a plan; None for those not given.

    Raises ParamInvalidError for arrays of two NPUs or of two devices of the runtime, whose
    streams know nothing of each other, and for one that leaves its storage.
    """
    found: list[Argument | None] = []
    first: Argument | None = None
    for info, source in zip(plan.infos(), plan.arrays, strict=True):
        if info is None:
            found.append(None)
            continue
        base, storage_bytes, device_id, key = info.address, 0, None, None
        if info.on_device:
            base, storage_bytes, device_id, key = _storage(source)
        one = Argument(
            info.name,
            info.shape,
            info.strides,
            info.dtype,
            info.dtype_name,
            info.itemsize,
            info.read_only,
            info.on_device,
            info.address,
            base,
            storage_bytes,
            device_id,
            source,
            info.dtype,
            key,
            _host_address(source) if info.on_device else None,
        )
        if info.on_device:
            first = first or one
            _beside(one, first)
            _inside(one)
        found.append(one)
    return tuple(found)


def _storage(source: Any) -> tuple[int, int, int, object]:
    """(base address, bytes, device, its Device's key) of the allocation behind a device array."""
    described = getattr(source, "__kvcore_device_array__", None)
    if described is not None:
        key = getattr(described, "key", None)
        return described.base, described.storage_bytes, described.device_id, key
    storage = source.untyped_storage()
    return storage.data_ptr(), storage.nbytes(), source.device.index or 0, None


def _host_address(source: Any) -> int | None:
    described = getattr(source, "__kvcore_device_array__", None)
    found: int | None = getattr(described, "host_address", None)
    return found


def _beside(one: Argument, first: Argument) -> None:
    if one.device_id != first.device_id:
        where = f"memory of NPU {first.device_id}, where {first.name} is"
        fail(one.name, where, f"memory of NPU {one.device_id}")
    if None not in (one.key, first.key) and one.key is not first.key:
        fail(one.name, f"memory of the Device that {first.name} is of", "another Device's")


def _inside(one: Argument) -> None:
    if one.size == 0:
        return
    first, past = extent(one.shape, one.strides, one.itemsize)
    low, high = one.address - one.base + first, one.address - one.base + past
    if low < 0 or high > one.storage_bytes:
        fail(
            one.name,
            f"elements inside its storage of {one.storage_bytes} bytes",
            f"bytes {low} to {high} of it",
        )
    if one.base % ALIGNMENT:
        fail(one.name, f"a storage that begins on {ALIGNMENT} bytes", f"address {one.base:#x}")
    if (one.address - one.base) % one.itemsize:
        seen = f"an offset of {one.address - one.base} bytes"
        fail(one.name, f"an offset of whole elements of {one.itemsize} bytes", seen)


def dtype_named(name: Any) -> DType | None:
    """The row of a ``dtype=`` argument that the operator has accepted."""
    if name is None or isinstance(name, DType):
        return name
    spelled = name if isinstance(name, str) else str(name)
    spelled = spelled.removeprefix("torch.")
    spelled = TORCH_NAMES.get(spelled, spelled)
    return BY_NAME[spelled if spelled in BY_NAME else np.dtype(name).name]


def element(argument: Argument | None, named: DType | None) -> Argument | None:
    """The argument with the type its raw unsigned items stand for."""
    if argument is None or named is None or argument.dtype is None:
        return argument
    own = argument.dtype
    raw = own.kind == "uint" and own.itemsize == named.itemsize
    if raw or (own.packed and named.packed):
        return replace(argument, element=named)
    return argument
