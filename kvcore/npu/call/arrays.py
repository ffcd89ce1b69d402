# SPDX-License-Identifier: Apache-2.0
"""Arguments of a plan as the device sees them.

Two kinds of arrays live on a device: objects with ``__kvcore_device_array__`` (the runtime's
buffers) and torch_npu's tensors, taken by their data pointer.  Index arrays may also be on the
host, where ``backend="aclnn"`` was named: they are copied to the device.

What follows from shapes and types alone is worked out once for a Spec (``describe``); each plan
adds the addresses of its arrays (``place``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore._core.plan import Plan
from kvcore.dtypes import DType
from kvcore.errors import fail
from kvcore.strides import dense_strides, is_dense

__all__ = ["Argument", "Dims", "describe", "is_dense_from", "place"]

#: A storage must begin on this many bytes.
ALIGNMENT = 32


class Dims(NamedTuple):
    """Type, shape and strides as aclCreateTensor takes them, counted in elements.

    scale: elements in a stored item; 2 for packed types, else 1.
    """

    kind: DType
    shape: list[int]
    strides: list[int]
    scale: int


class Argument(NamedTuple):
    """One array of a call: what the operators' rules read of it, and where its storage lies.

    dtype: of the stored items.  element: what the operator takes the items for.
    strides, dense: bytes; dense are those of a contiguous array of that shape.
    dims, dense_dims: what its aclTensor is made of, and that of a contiguous copy; None: worked
    out when it is made.
    base, storage_bytes: the whole allocation that the array is a view of.
    device_id: None for host memory.
    key: the same for all arrays of one kvcore.Device; None for those of no Device.
    host_address: where the host, and every copy, finds memory of the host that a kernel uses by
    another address; None for memory of the device.
    source: the caller's object.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dense: tuple[int, ...]
    dtype: DType | None
    dtype_name: str
    itemsize: int
    size: int
    read_only: bool
    on_device: bool
    element: DType | None
    dims: Dims | None = None
    dense_dims: Dims | None = None
    address: int = 0
    base: int = 0
    storage_bytes: int = 0
    device_id: int | None = None
    key: object = None
    host_address: int | None = None
    source: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the items without gaps."""
        return self.size * self.itemsize

    def placed(self, address: int) -> Argument:
        """A contiguous array of the same shape at another place on the device."""
        return self._replace(
            strides=self.dense,
            dims=self.dense_dims,
            address=address,
            base=address,
            storage_bytes=max(self.size * self.itemsize, 1),
            on_device=True,
            host_address=None,
        )

    def seen_as(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Argument:
        """Another view of the same storage, ``offset`` bytes behind this one's first element."""
        host = self.host_address
        return self._replace(
            shape=tuple(shape),
            strides=tuple(strides),
            dense=dense_strides(shape, self.itemsize),
            size=math.prod(shape),
            dims=None,
            dense_dims=None,
            address=self.address + offset,
            host_address=None if host is None else host + offset,
        )

    def described(self) -> Argument:
        """This argument with its dims for ACL worked out, where ACL has its type."""
        if self.element is None or self.element.acl is None:
            return self
        return self._replace(dims=dims_of(self), dense_dims=dims_of(self, dense=True))


#: The fields that are the same for every call of one Spec come first.
_STATIC = Argument._fields.index("address")


def dims_of(one: Argument, *, dense: bool = False) -> Dims:
    """What an aclTensor is made of, without its address; refuses types that ACL does not have."""
    kind, item = one.element, one.itemsize
    if kind is None or kind.acl is None:
        fail(one.name, "a dtype that ACL has", one.dtype_name)
    scale = 2 if kind.packed else 1
    shape = list(one.shape)
    # The stride of an axis of length 1 may be any number, and CANN would check it.
    strides = [
        (stride if n > 1 and not dense else step) // item * scale
        for n, stride, step in zip(shape, one.strides, one.dense, strict=True)
    ]
    if kind.packed and shape:
        shape[-1] *= scale
        strides[-1] = 1
    return Dims(kind, shape, strides, scale)


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


def describe(plan: Plan) -> list[Argument | None]:
    """What shapes and types say of a plan's arguments; None for those not given."""
    return [
        None
        if info is None
        else Argument(
            info.name,
            info.shape,
            info.strides,
            dense_strides(info.shape, info.itemsize),
            info.dtype,
            info.dtype_name,
            info.itemsize,
            math.prod(info.shape),
            info.read_only,
            info.on_device,
            info.dtype,
        )
        for info in plan.infos()
    ]


def place(described: Sequence[Argument | None], plan: Plan) -> list[Argument | None]:
    """The arguments where a plan's arrays are; None where a description is.

    Raises ParamInvalidError for arrays of two NPUs or of two devices of the runtime, whose
    streams know nothing of each other, and for one that leaves its storage.
    """
    found: list[Argument | None] = []
    first: Argument | None = None
    for one, memory, source in zip(described, plan.memory(), plan.arrays, strict=True):
        if one is None or memory is None:
            found.append(None)
            continue
        address, low, high, owner = memory
        base, nbytes, device_id, key, host = address, 0, None, None, None
        if one.on_device:
            if owner is None:
                owner = _Tensor(source)
            base, nbytes, device_id = owner.base, owner.storage_bytes, owner.device_id
            key, host = getattr(owner, "key", None), getattr(owner, "host_address", None)
        where = (address, base, nbytes, device_id, key, host, source)
        # the same as Argument(...), without a Python frame for __init__
        placed: Argument = tuple.__new__(Argument, one[:_STATIC] + where)
        if one.on_device:
            if first is None:
                first = placed
            elif device_id != first.device_id or key is not first.key:
                _beside(placed, first)
            if one.size and (
                low < base
                or high > base + nbytes
                or base % ALIGNMENT
                or (address - base) % one.itemsize
            ):
                _outside(placed, low - base, high - base)
        found.append(placed)
    return found


class _Tensor:
    """The storage of a torch_npu tensor."""

    def __init__(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        self.base = storage.data_ptr()
        self.storage_bytes = storage.nbytes()
        self.device_id = tensor.device.index or 0


def _beside(one: Argument, first: Argument) -> None:
    if one.device_id != first.device_id:
        where = f"memory of NPU {first.device_id}, where {first.name} is"
        fail(one.name, where, f"memory of NPU {one.device_id}")
    if None not in (one.key, first.key):
        fail(one.name, f"memory of the Device that {first.name} is of", "another Device's")


def _outside(one: Argument, low: int, high: int) -> None:
    if low < 0 or high > one.storage_bytes:
        fail(
            one.name,
            f"elements inside its storage of {one.storage_bytes} bytes",
            f"bytes {low} to {high} of it",
        )
    if one.base % ALIGNMENT:
        fail(one.name, f"a storage that begins on {ALIGNMENT} bytes", f"address {one.base:#x}")
    seen = f"an offset of {one.address - one.base} bytes"
    fail(one.name, f"an offset of whole elements of {one.itemsize} bytes", seen)
