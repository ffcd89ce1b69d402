# SPDX-License-Identifier: Apache-2.0
"""Device memory for work on a stream: workspaces, and copies of what a kernel cannot read.

Work of one stream runs in order, so a stream has one workspace and one place for copies, which
every launch uses anew.  When one must grow, the old one is retired: freed once an event recorded
behind its last use has passed.  A launch with ``keep`` gets memory of its own, for the
caller to free (a captured graph uses the same addresses at each replay).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import DeviceOutOfMemoryError, KVCoreError
from kvcore.npu.call import copies
from kvcore.npu.cann.constants import (
    ACL_EVENT_RECORDED_STATUS_COMPLETE,
    ACL_EVENT_SYNC,
    ACL_HBM_MEM,
    ACL_MEM_MALLOC_HUGE_FIRST,
    ACL_SUCCESS,
)
from kvcore.npu.cann.library import Cann

__all__ = ["DeviceMemory", "Pool", "Room", "allocate", "pool_of"]

#: Growing by less would retire a workspace at every slightly larger call.
GRANULE = 1 << 16
#: Launches whose memory waits for the stream, from which on each launch looks how far that is.
BACKLOG = 16
ALIGNMENT = 64


class DeviceMemory:
    """Bytes of a device: ``address``, ``nbytes``, and ``free()``, which may be called again."""

    def __init__(self, cann: Cann, device_id: int, address: int, nbytes: int) -> None:
        self._cann = cann
        self._free = True
        self._lock = threading.Lock()
        self.device_id = device_id
        self.address = address
        self.nbytes = nbytes

    def __repr__(self) -> str:
        state = "" if self._free else ", freed"
        return f"DeviceMemory({self.nbytes} bytes at {self.address:#x}{state})"

    def free(self) -> None:
        """Give the bytes back. No work on the device may use them any more."""
        with self._lock:
            owned, self._free = self._free, False
        if owned:
            with self._cann.on_device(self.device_id, giving_back=True):
                self._cann.aclrtFree(self.address)


def allocate(cann: Cann, device_id: int, nbytes: int) -> DeviceMemory:
    """Memory of a device; DeviceOutOfMemoryError says how much there is."""
    with cann.on_device(device_id):
        pointer = ctypes.c_void_p()
        try:
            # CANN refuses an allocation of 0 bytes.
            cann.aclrtMalloc(ctypes.byref(pointer), max(nbytes, 1), ACL_MEM_MALLOC_HUGE_FIRST)
        except DeviceOutOfMemoryError as error:
            error.wanted = nbytes
            free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
            if cann.has("aclrtGetMemInfo"):
                ask = cann.status("aclrtGetMemInfo")
                if ask(ACL_HBM_MEM, ctypes.byref(free), ctypes.byref(total)) == ACL_SUCCESS:
                    error.free, error.total = free.value, total.value
            raise
        return DeviceMemory(cann, device_id, pointer.value or 0, nbytes)


class Pool:
    """The memory of one stream; hold ``lock`` from taking memory to the launch that uses it."""

    def __init__(self, cann: Cann, device_id: int, stream: int) -> None:
        self.cann = cann
        self.device_id = device_id
        self.stream = stream
        self.lock: threading.RLock = threading.RLock()
        self._blocks: dict[str, DeviceMemory] = {}
        self._retired: deque[tuple[int, Sequence[DeviceMemory | _HeldArray]]] = deque()
        self._stuck: list[DeviceMemory | _HeldArray] = []

    def take(self, purpose: str, nbytes: int) -> int:
        """Address of at least that many bytes, the same ones each time for a purpose."""
        block = self._blocks.get(purpose)
        if block is not None and block.nbytes >= nbytes:
            return block.address
        self.collect()
        wanted = -(-nbytes // GRANULE) * GRANULE
        if block is not None:
            wanted = max(wanted, 2 * block.nbytes)
        try:
            grown = allocate(self.cann, self.device_id, wanted)
        except DeviceOutOfMemoryError:
            if wanted == nbytes:
                raise
            grown = allocate(self.cann, self.device_id, nbytes)
        self._blocks[purpose] = grown
        if block is not None:
            self.retire([block])
        return grown.address

    def retire(self, blocks: Sequence[DeviceMemory | _HeldArray]) -> None:
        """Free these blocks once all that is on the stream now has passed."""
        if not blocks:
            return
        cann, event = self.cann, ctypes.c_void_p()
        name = "aclrtCreateEventExWithFlag"
        if not cann.has(name):
            name = "aclrtCreateEventWithFlag"
        try:
            getattr(cann, name)(ctypes.byref(event), ACL_EVENT_SYNC)
            try:
                cann.aclrtRecordEvent(event, self.stream)
            except KVCoreError:
                cann.status("aclrtDestroyEvent")(event)
                raise
        except KVCoreError:
            # No event could be made: release() frees the blocks after a synchronise.
            self._stuck += blocks
            return
        self._retired.append((event.value or 0, blocks))

    def collect(self) -> None:
        """Free what was retired and is not used any more.

        Raises nothing: what cannot be freed is no fault of the call that happens to come next.
        """
        # A stream runs in order, so where one event is pending, the later ones are too.
        while self._retired and self._has_passed(self._retired[0][0]):
            event, blocks = self._retired.popleft()
            with contextlib.suppress(KVCoreError):
                self._free(event, blocks)

    def collect_backlog(self) -> None:
        """Free what was retired, when much of it waits."""
        if len(self._retired) > BACKLOG:
            self.collect()

    def _has_passed(self, event: int) -> bool:
        state = ctypes.c_int32(-1)
        return (
            self.cann.status("aclrtQueryEventStatus")(event, ctypes.byref(state)) == ACL_SUCCESS
            and state.value == ACL_EVENT_RECORDED_STATUS_COMPLETE
        )

    def release(self) -> None:
        """Free everything; the stream must have been synchronised."""
        with self.lock, self.cann.on_device(self.device_id, giving_back=True):
            retired, self._retired = self._retired, deque()
            stuck, self._stuck = self._stuck, []
            blocks = [*stuck, *self._blocks.values()]
            self._blocks = {}
            _all([partial(self._free, event, old) for event, old in [*retired, (0, blocks)]])

    def _free(self, event: int, blocks: Sequence[DeviceMemory | _HeldArray]) -> None:
        if event:
            self.cann.status("aclrtDestroyEvent")(event)
        _all([block.free for block in blocks])


_pools: dict[tuple[int, int, int], Pool] = {}
_pools_lock = threading.Lock()


def pool_of(cann: Cann, device_id: int, stream: int) -> Pool:
    """The pool of a stream, made when it is first asked for."""
    key = (id(cann), device_id, stream)
    with _pools_lock:
        found = _pools.get(key)
        if found is None or found.cann is not cann:
            found = _pools[key] = Pool(cann, device_id, stream)
        return found


def collect(cann: Cann, device_id: int) -> None:
    """Let go of what direct calls have finished with; the device is set on this thread."""
    with _pools_lock:
        pools = [pool for key, pool in _pools.items() if pool.cann is cann and key[1] == device_id]
    for pool in pools:
        if pool.lock.acquire(blocking=False):  # else its launch collects
            try:
                pool.collect()
            finally:
                pool.lock.release()


def release(cann: Cann, device_id: int, stream: int | None) -> None:
    """Free the pool of a stream, or of all streams of a device; they must be synchronised."""
    with _pools_lock:
        keys = [
            key
            for key, pool in _pools.items()
            if pool.cann is cann and key[1] == device_id and stream in (None, key[2])
        ]
        pools = [_pools.pop(key) for key in keys]
    _all([pool.release for pool in pools])


def _all(calls: Iterable[Callable[[], None]]) -> None:
    """Make every call, whatever the others raise; then raise the first error."""
    failed = None
    for call in calls:
        try:
            call()
        except KVCoreError as error:
            failed = failed or error
    if failed is not None:
        raise failed


Keep = Callable[[Any], object]


class _HeldArray:
    """An array that a launch uses; ``free`` drops the reference to it."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def free(self) -> None:
        self._array = None


class Room:
    """The memory of one launch: from the stream's pool, or new and handed to ``keep``."""

    def __init__(self, cann: Cann, device_id: int, stream: int, keep: Keep | None) -> None:
        self.cann = cann
        self.device_id = device_id
        self.stream = stream
        self.keep = keep
        self.pool: Pool | None = None if keep is not None else pool_of(cann, device_id, stream)
        self._new: list[DeviceMemory | _HeldArray] = []

    def __enter__(self) -> Room:
        if self.pool is not None:
            self.pool.lock.acquire()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        new, self._new = self._new, []
        try:
            if self.keep is not None:
                # Work may be on the stream even after an error: the caller frees in either case.
                for block in new:
                    self.keep(block)
            elif self.pool is not None:
                self.pool.retire(new)
                self.pool.collect_backlog()
        finally:
            if self.pool is not None:
                self.pool.lock.release()

    def hold(self, array: Any) -> None:
        """Let an array live until the launch is done, even when the caller drops it before."""
        if array is not None:
            self._new.append(_HeldArray(array))

    def take(self, purpose: str, nbytes: int) -> int:
        """Bytes that only work on this launch's stream touches."""
        return self.new(nbytes) if self.pool is None else self.pool.take(purpose, nbytes)

    def put(self, array: NDArray[Any]) -> int:
        """Copy host values to new memory on the device, contiguous; returns its address."""
        dense = np.ascontiguousarray(array)
        address = self.new(dense.nbytes)
        if dense.nbytes:
            copies.to_device(self.cann, address, dense.ctypes.data, dense.nbytes)
        return address

    def new(self, nbytes: int) -> int:
        """Bytes that nothing on any stream uses yet: the host may write them at once."""
        block = allocate(self.cann, self.device_id, nbytes)
        self._new.append(block)
        return block.address
