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
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import KVCoreError
from kvcore.npu.call import memory as pools
from kvcore.npu.cann import constants, library
from kvcore.npu.cann.status import bare
from kvcore.npu.cann.structs import MallocAttribute, MallocConfig

__all__ = ["Heap", "Piece"]

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
        # Workers and hosts allocate and free; garbage collection may free within either.
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
            # The device was left and this array outlived it; no thread frees anything for it later,
            # but for other devices, whose host function this may be in.
            _late.append(self)
            if not library.thread.in_host_function:
                _collect_late()

    def giving_back(self) -> library.OnDevice:
        """Give this thread the device for a block, also while Python ends."""
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
        """Free everything that is not in use."""
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
        """Free everything but host memory of which an array is still alive.

        That goes with its last array.  Returns what went wrong.
        """
        with self._lock:
            self._closed = True
        self.trim()
        for number, piece in list(self._live.items()):
            if piece.space == "device" and self._live.pop(number, None) is not None:
                self._free(piece)
        return self._errors


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
