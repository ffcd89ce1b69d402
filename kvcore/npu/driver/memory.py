# SPDX-License-Identifier: Apache-2.0
"""Memory of an NPU, and of the host for it.

``device``   aclrtMalloc.
``host``     aclrtMallocHost: pinned.
``swapped``  pinned host memory, registered for the device: kernels use the address that
             aclrtHostRegister gives, the host (and every copy) its own.

A piece of memory is carried by a numpy array over its address, so a buffer has shapes, views and
byte ranges as on a modelled device; the array of device memory is never read here.  The piece
goes when the last array over it has gone, in two steps: its number is put on a list (which may
happen in any thread, within anything), and a thread that may call ACL frees what is on the list.
aclrtFree does not wait for streams; whatever is in flight holds its arrays.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import numpy as np
import numpy.typing as npt

from kvcore.errors import KVCoreError, ParamInvalidError
from kvcore.npu.call import memory as pools
from kvcore.npu.cann import constants, library
from kvcore.npu.cann.structs import MallocAttribute, MallocConfig
from kvcore.npu.driver.handles import bare
from kvcore.runtime.allocation import DEFAULT_ALIGNMENT, allocate
from kvcore.runtime.memory import Buffer, stand_in

if TYPE_CHECKING:
    from kvcore.npu.driver.parts import Hardware
    from kvcore.runtime._storage import Storage
    from kvcore.runtime.core import Core

__all__ = ["AclBuffer", "DeviceArray", "Heap", "Held", "Piece", "end_all"]

PAGE = mmap.PAGESIZE
#: Pinned bytes kept for the staging of pageable copies.
MAX_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """One allocation: what was got, where its use begins, and the device's view of it."""

    space: str
    got: int
    address: int
    nbytes: int
    seen_at: int
    reused: bool = False


class _Memory:
    """Shows a piece to numpy; the piece lives as long as this."""

    __slots__ = ("__array_interface__", "__weakref__", "piece")

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.__array_interface__ = {
            "version": 3,
            "data": (piece.address, False),
            "shape": (piece.nbytes,),
            "typestr": "|u1",
        }


class Heap:
    """The allocations of one device."""

    def __init__(self, cann: Any, device_id: int) -> None:
        self._cann = cann
        self._device_id = device_id
        self._live: dict[int, Piece] = {}
        self._numbers = itertools.count()
        self._gone: deque[int] = deque()
        self._spare: dict[int, list[Piece]] = {}
        self._spare_bytes = 0
        self._closed = False
        # Workers and hosts take and give back; the collector may do so within either.
        self._lock = threading.RLock()
        self._errors: list[KVCoreError] = []
        self._process = os.getpid()

    # -- taking; the device is set on this thread

    def take(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory as an array of bytes.  Raises the status's error."""
        if space == "device":
            piece = self._device(nbytes)
        elif space == "host":
            piece = self._host(nbytes)
        else:
            piece = self._swapped(nbytes)
        return self._show(piece)

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Pinned memory that is used again when it is given back."""
        self.collect()
        size = max(PAGE, 1 << (nbytes - 1).bit_length())
        with self._lock:
            spare = self._spare.get(size)
            piece = spare.pop() if spare else None
            if piece is not None:
                self._spare_bytes -= size
        if piece is None:
            got = self._pinned(size)
            piece = Piece("host", got, got, size, 0, reused=True)
        return self._show(piece)[:nbytes]

    def _show(self, piece: Piece) -> npt.NDArray[np.uint8]:
        memory = _Memory(piece)
        number = next(self._numbers)
        self._live[number] = piece
        weakref.finalize(memory, self._let_go, number).atexit = False
        return np.asarray(memory)

    def _device(self, nbytes: int) -> Piece:
        found = ctypes.c_void_p()
        self._cann.aclrtMalloc(ctypes.byref(found), nbytes, constants.ACL_MEM_MALLOC_HUGE_FIRST)
        address = found.value or 0
        return Piece("device", address, address, nbytes, address)

    def _pinned(self, nbytes: int) -> int:
        found = ctypes.c_void_p()
        self._cann.aclrtMallocHost(ctypes.byref(found), nbytes)
        return found.value or 0

    def _host(self, nbytes: int) -> Piece:
        address = self._pinned(nbytes)
        return Piece("host", address, address, nbytes, 0)

    def _swapped(self, nbytes: int) -> Piece:
        size = -(-nbytes // PAGE) * PAGE
        got = self._mappable(size)
        if got is None:
            # Pinned memory need not begin with a page, and what is registered must.
            got = self._pinned(size + PAGE)
        address = -(-got // PAGE) * PAGE
        try:
            seen_at = self._register(address, size)
        except BaseException:
            with contextlib.suppress(KVCoreError):
                self._cann.aclrtFreeHost(got)
            raise
        return Piece("swapped", got, address, nbytes, seen_at)

    def _mappable(self, size: int) -> int | None:
        """Pinned memory with an address that the device can have too; None: ask for plain."""
        if not self._cann.has("aclrtMallocHostWithCfg"):
            return None
        attribute = MallocAttribute(constants.ACL_RT_MEM_ATTR_VA_FLAG, 1)
        config = MallocConfig(ctypes.pointer(attribute), 1)
        found = ctypes.c_void_p()
        try:
            self._cann.aclrtMallocHostWithCfg(ctypes.byref(found), size, ctypes.byref(config))
        except KVCoreError as error:
            if error.code == constants.ACL_ERROR_RT_FEATURE_NOT_SUPPORT:
                return None
            raise
        got = found.value or 0
        if got % PAGE:
            self._cann.aclrtFreeHost(got)
            return None
        return got

    def _register(self, address: int, size: int) -> int:
        found = ctypes.c_void_p()
        cann = self._cann
        try:
            cann.aclrtHostRegister(
                address, size, constants.ACL_HOST_REGISTER_MAPPED, ctypes.byref(found)
            )
        except KVCoreError as error:
            second = ("aclrtHostRegisterV2", "aclrtHostGetDevicePointer")
            if error.code != constants.ACL_ERROR_RT_FEATURE_NOT_SUPPORT or not all(
                map(cann.has, second)
            ):
                raise
            cann.aclrtHostRegisterV2(address, size, constants.ACL_HOST_REG_MAPPED)
            try:
                cann.aclrtHostGetDevicePointer(address, ctypes.byref(found), 0)
            except BaseException:
                with contextlib.suppress(KVCoreError):
                    cann.aclrtHostUnregister(address)
                raise
        return found.value or 0

    # -- giving back

    def _let_go(self, number: int) -> None:
        """The last array has gone.  In any thread, perhaps within the collector: no lock here."""
        self._gone.append(number)
        if self._closed and os.getpid() == self._process:
            # The device was left and this array outlived it; nobody will come by again, but for
            # other devices, whose host function this may be in.
            _late.append(self)
            if not library.thread.in_host_function:
                _collect_late()

    def giving_back(self) -> library.OnDevice:
        """``with heap.giving_back():`` gives this thread the device, also while Python ends."""
        bound: library.OnDevice = self._cann.on_device(self._device_id, giving_back=True)
        return bound

    def collect(self) -> None:
        """Free what has gone; the device is set on this thread."""
        if not self._closed:
            if _late:
                _collect_late()
            pools.collect(self._cann, self._device_id)
        while self._gone:
            try:
                piece = self._live.pop(self._gone.popleft(), None)
            except IndexError:
                return
            if piece is None:
                continue
            if not self._put_by(piece):
                self._free(piece)

    def _put_by(self, piece: Piece) -> bool:
        with self._lock:
            if self._closed or not piece.reused or self._spare_bytes >= MAX_SPARE_BYTES:
                return False
            self._spare.setdefault(piece.nbytes, []).append(piece)
            self._spare_bytes += piece.nbytes
            return True

    def trim(self) -> None:
        """Free everything that nobody uses."""
        self.collect()
        with self._lock:
            spare, self._spare = self._spare, {}
            self._spare_bytes = 0
        for pieces in spare.values():
            for piece in pieces:
                self._free(piece)

    def _free(self, piece: Piece) -> None:
        calls = {
            "device": [("aclrtFree", piece.got)],
            "host": [("aclrtFreeHost", piece.got)],
            "swapped": [("aclrtHostUnregister", piece.address), ("aclrtFreeHost", piece.got)],
        }[piece.space]
        for name, address in calls:
            try:
                getattr(self._cann, name)(address)
            except KVCoreError as error:
                self._errors.append(bare(error))  # live memory holds this heap

    def close(self) -> list[KVCoreError]:
        """Free everything but host memory that somebody still has an array of.

        That goes with its last array.  Returns what went wrong.
        """
        with self._lock:
            self._closed = True
        self.trim()
        for number, piece in list(self._live.items()):
            if piece.space == "device" and self._live.pop(number, None) is not None:
                self._free(piece)
        return self._errors


def end_all(buffers: Iterable[AclBuffer]) -> None:
    """The device is left: let no buffer keep memory that nothing but the buffer needs."""
    for buffer in buffers:
        buffer._end()  # noqa: SLF001  (no method: programs have the buffer too)


class Held:
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

#: Heaps of devices that were left, with something to free.
_late: deque[Heap] = deque()


def _collect_late() -> None:
    with contextlib.suppress(IndexError):
        while True:
            heap = _late.popleft()
            with (
                contextlib.suppress(KVCoreError),
                heap.giving_back(),
            ):
                heap.collect()


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """What operators are told of a buffer; see ``kvcore._core.adopt``.

    address: of element 0, as the device has it; strides: bytes; base, storage_bytes: the whole
    allocation; stream: the aclrtStream to run on when nobody names one; key: the same for all
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

    def _allocation(self) -> object:
        """What the memory goes with: a direct call holds it until the device is done."""
        return self._whole_and_view()[0].base

    @property
    def __kvcore_array__(self) -> npt.NDArray[Any]:
        """The memory as a numpy array, for planning; absent for device memory."""
        if self.space == "device":
            raise AttributeError("__kvcore_array__")
        return self._whole_and_view()[1]

    @property
    def __kvcore_device_array__(self) -> DeviceArray | None:
        """What operators on the device are told; None for pinned memory, which it cannot use."""
        if self.space == "host":
            return None
        whole, array = self._whole_and_view()
        driver = self._driver
        memory: Any = whole.base
        piece: Piece = memory.piece
        shift = piece.seen_at - piece.address
        return DeviceArray(
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
