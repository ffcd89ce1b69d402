# SPDX-License-Identifier: Apache-2.0
"""Whose arrays a call is made of: the runtime's buffers, or torch_npu's tensors.

The owner says on which stream the work goes when the caller does not, makes the arrays that an
operator returns, and knows where temporary memory comes from.
"""

from __future__ import annotations

import sys
from typing import Any

from kvcore._core.plan import Plan
from kvcore.dtypes import BY_NAME
from kvcore.errors import BackendUnavailableError
from kvcore.npu.call.arrays import Argument
from kvcore.npu.call.memory import Keep, Room
from kvcore.npu.cann.library import Cann

__all__ = ["BufferOwner", "Owner", "TorchOwner", "owner_of"]


class Owner:
    """What a launch asks of its arrays' owner; ``like`` is one of them."""

    def __init__(self, like: Argument) -> None:
        self.like = like
        assert like.device_id is not None
        self.device_id: int = like.device_id

    def stream(self) -> int:
        """The handle to run on; 0 is the default stream."""
        raise NotImplementedError

    def empty(self, rows: int) -> tuple[Any, Argument]:
        """A new int32 array [rows] on the device, and what a call must know of it."""
        raise NotImplementedError

    def keeper(self, one: Argument) -> object:
        """The object that keeps an array's memory alive, for a launch to hold; None: not needed."""
        return None

    def room(self, cann: Cann, stream: int, keep: Keep | None) -> Room:
        """Temporary memory for one launch."""
        return Room(cann, self.device_id, stream, keep)


def _answer(array: Any, rows: int, place: tuple[int, int, int], device_id: int) -> Argument:
    """The Argument of a new int32 array; place: address, storage's address, storage's bytes."""
    kind = BY_NAME["int32"]
    return Argument(
        name="selection_kv_actual_seq",
        shape=(rows,),
        strides=(kind.itemsize,),
        dense=(kind.itemsize,),
        dtype=kind,
        dtype_name=kind.name,
        itemsize=kind.itemsize,
        size=rows,
        read_only=False,
        on_device=True,
        address=place[0],
        base=place[1],
        storage_bytes=place[2],
        device_id=device_id,
        source=array,
        element=kind,
    )


class BufferOwner(Owner):
    """Arrays with ``__kvcore_device_array__``.

    One that may be freed before the device is done with it also has ``__kvcore_owner__``: the
    object that keeps its memory alive.  Of any other the array itself does.
    """

    def stream(self) -> int:
        """The stream that the buffer names."""
        return int(self.like.source.__kvcore_device_array__.stream)

    def keeper(self, one: Argument) -> object:
        """The owner that the array names for its memory, or the array itself."""
        owner: object = getattr(one.source, "__kvcore_owner__", one.source)
        return owner

    def empty(self, rows: int) -> tuple[Any, Argument]:
        """A buffer of the same device."""
        array = self.like.source.__kvcore_device_array__.empty((rows,), "int32")
        seen = array.__kvcore_device_array__
        place = seen.address, seen.base, seen.storage_bytes
        return array, _answer(array, rows, place, self.device_id)


class TorchOwner(Owner):
    """torch_npu's tensors.

    Temporary memory is torch's too: it gives memory back in stream order, and keeps what was
    taken while a graph is being captured for as long as the graph.
    """

    def _torch(self) -> Any:
        if "torch_npu" not in sys.modules:
            raise BackendUnavailableError("NPU tensors without torch_npu: import torch_npu first")
        return sys.modules["torch"]

    def stream(self) -> int:
        """torch_npu's current stream of the tensors' device."""
        self._torch()
        return int(sys.modules["torch_npu"].npu.current_stream(self.device_id).npu_stream)

    def make_empty(self, count: int, dtype: str) -> Any:
        """A new tensor [count] on the device of the arrays."""
        torch = self._torch()
        return torch.empty((count,), dtype=getattr(torch, dtype), device=self.like.source.device)

    def empty(self, rows: int) -> tuple[Any, Argument]:
        """A tensor on the same device."""
        tensor = self.make_empty(rows, "int32")
        storage = tensor.untyped_storage()
        place = tensor.data_ptr(), storage.data_ptr(), storage.nbytes()
        return tensor, _answer(tensor, rows, place, self.device_id)

    def room(self, cann: Cann, stream: int, keep: Keep | None) -> Room:
        """torch's memory, but where the caller keeps it, or names a stream that torch does not use.

        Torch hands memory out again in the order of its own stream, which knows no other.
        """
        if keep is not None or stream != self.stream():
            return super().room(cann, stream, keep)
        return TorchRoom(cann, self, stream)


class TorchRoom(Room):
    """Temporary memory from torch, given back when the launch is queued."""

    #: What torch_npu adds to a workspace; its kernels may read past the end.
    PADDING_BYTES = 32

    def __init__(self, cann: Cann, owner: TorchOwner, stream: int) -> None:
        super().__init__(cann, owner.device_id, stream, None)
        self._owner = owner
        self._tensors: list[Any] = []

    def hold(self, array: Any) -> None:
        """None: torch reuses memory in stream order, so nothing has to be held."""

    def take(self, purpose: str, nbytes: int) -> int:
        """Bytes that only work on this launch's stream touches."""
        tensor = self._owner.make_empty(nbytes + self.PADDING_BYTES, "uint8")
        self._tensors.append(tensor)
        return int(tensor.data_ptr())

    def __exit__(self, kind: object, *rest: object) -> None:
        self._tensors.clear()
        super().__exit__(kind, *rest)


def owner_of(plan: Plan) -> type[Owner]:
    """The kind of owner of a plan's first array on the device."""
    on_device = [
        array
        for info, array in zip(plan.infos(), plan.arrays, strict=True)
        if info is not None and info.on_device
    ]
    described = getattr(on_device[0], "__kvcore_device_array__", None)
    return TorchOwner if described is None else BufferOwner
