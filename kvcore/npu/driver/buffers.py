# SPDX-License-Identifier: Apache-2.0
"""Buffers on an NPU: how they are described to operators, and what a launch keeps of them.

What their memory is and when it goes is in ``heap``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import numpy as np
import numpy.typing as npt

from kvcore.errors import ParamInvalidError
from kvcore.npu.driver.heap import Piece
from kvcore.runtime.allocation import DEFAULT_ALIGNMENT, allocate
from kvcore.runtime.memory import Buffer, stand_in

if TYPE_CHECKING:
    from kvcore.npu.driver.parts import Hardware
    from kvcore.runtime._storage import Storage
    from kvcore.runtime.core import Core

__all__ = ["AclBuffer", "BufferDescription", "HeldBuffers", "end_all"]


def end_all(buffers: Iterable[AclBuffer]) -> None:
    """The device is left: let no buffer keep memory that nothing but the buffer needs."""
    for buffer in buffers:
        buffer._end()  # noqa: SLF001  (no method: programs have the buffer too)


class HeldBuffers:
    """The memory of a launch's buffers: they may be freed before it is done, or handed over.

    owners: what the launch's arrays belong to; those that are no buffers hold themselves.
    """

    __slots__ = ("_arrays",)

    def __init__(self, owners: Iterable[object]) -> None:
        self._arrays = {
            owner: (owner.storage.array, owner._array)  # noqa: SLF001  (a freed one's too)
            for owner in owners
            if isinstance(owner, AclBuffer)
        }

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let this thread see the buffers as they were when the launch was made."""
        before, _handing_over.held = _handing_over.held, self._arrays
        try:
            yield
        finally:
            _handing_over.held = before


class _HandingOver(threading.local):
    held: Mapping[Any, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}


_handing_over = _HandingOver()


@dataclass(frozen=True, slots=True)
class BufferDescription:
    """A buffer as it is described to operators; see ``kvcore._core.adopt``.

    address: of element 0, as the device has it; strides: bytes; base, storage_bytes: the whole
    allocation; stream: the aclrtStream to run on when the call names none; key: the same for all
    arrays of one device; maker, device: what makes more memory of it; host_address: the host's
    address of element 0 of swapped memory.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    read_only: bool
    base: int
    storage_bytes: int
    device_id: int
    stream: int
    key: object
    maker: Core
    device: Any
    host_address: int | None = None

    def empty(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        """A new buffer on the same device, for what an operator returns; on a worker too."""
        return allocate(self.maker, self.device, shape, dtype, "device", DEFAULT_ALIGNMENT)


class AclBuffer(Buffer):
    """A buffer whose memory CANN manages.

    In the spaces "host" and "swapped" the host uses it as any buffer.  Device memory has an
    address that the host cannot follow: ``host()``, ``numpy()`` and the array protocols raise
    ParamInvalidError; ``stream.copy`` to pinned memory shows its contents.
    """

    def __init__(
        self,
        keeper: Core,
        device: Any,
        storage: Storage,
        array: npt.NDArray[Any],
        dtype: str,
        whole: bool,
    ) -> None:
        super().__init__(keeper, device, storage, array, dtype, whole)
        self._core = keeper
        self._driver = cast("Hardware", keeper.driver)
        self._driver.buffers.add(self)

    def _end(self) -> None:
        """The device is left: this buffer must not keep pinned memory, unless for an array.

        One made through the array interface has nothing but this buffer.
        """
        if not self._lent:
            self._array = stand_in(self._array)

    def _whole_and_view(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The allocation's bytes and this buffer's array; also while a launch holds them."""
        held = _handing_over.held.get(self)
        return (self.storage.array, self._live()) if held is None else held

    @property
    def __kvcore_owner__(self) -> object:
        """What keeps the memory: a call holds it until the device is done, freed or not."""
        return self._whole_and_view()[0].base

    @property
    def __kvcore_array__(self) -> npt.NDArray[Any]:
        """The memory as a numpy array, for planning; absent for device memory."""
        if self.space == "device":
            raise AttributeError("__kvcore_array__")
        return self._whole_and_view()[1]

    @property
    def __kvcore_device_array__(self) -> BufferDescription | None:
        """The description for operators; None for pinned memory, which the device cannot use."""
        if self.space == "host":
            return None
        whole, array = self._whole_and_view()
        driver = self._driver
        memory: Any = whole.base
        piece: Piece = memory.piece
        shift = piece.seen_at - piece.address
        return BufferDescription(
            address=array.ctypes.data + shift,
            shape=array.shape,
            strides=array.strides,
            dtype=self.dtype,
            itemsize=array.itemsize,
            read_only=False,
            base=piece.seen_at,
            storage_bytes=piece.nbytes,
            device_id=driver.device_id,
            stream=driver.direct_stream(),
            key=self._core.key,
            maker=self._core,
            device=self.device,
            host_address=array.ctypes.data if piece.space == "swapped" else None,
        )

    def _refuse_host(self) -> NoReturn:
        raise ParamInvalidError(
            "buffer: expected memory that the host can read, got device memory of an NPU; copy it "
            "to dev.empty_host(...) with stream.copy and wait for the copy",
            argument="buffer",
            seen="device",
            expected="host or swapped memory",
        )

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.space == "device":
            raise AttributeError("__array_interface__")
        return super().__array_interface__

    def __array__(self, *args: Any, **options: Any) -> npt.NDArray[Any]:
        """For numpy, which would otherwise take device memory for a sequence of buffers."""
        return np.asarray(self.numpy(), *args, **options)

    def host(
        self, mode: Literal["r", "w", "rw"] = "r"
    ) -> contextlib.AbstractContextManager[npt.NDArray[Any]]:
        """The memory as a numpy array while the host uses it; not of device memory."""
        self._live()
        if self.space == "device":
            self._refuse_host()
        return super().host(mode)

    def numpy(self) -> npt.NDArray[Any]:
        """The memory as a numpy array; not of device memory."""
        self._live()
        if self.space == "device":
            self._refuse_host()
        return super().numpy()
