# SPDX-License-Identifier: Apache-2.0
"""A device whose queues, events and memory are an NPU's.

Opening and closing
-------------------
CANN is initialised once for the process by ``library``, and never finalised: another part of the
process (torch_npu) may use it.  A device opens nothing before its block is entered.  Closing goes
from what uses to what is used: the watch, the workers, every stream waited for, graphs, streams,
events, memory.  Each handle is taken from its book before it is given back, so neither an error in
the middle nor a second attempt gives one back twice.  What goes wrong on the way does not stop the
rest; it is raised when nothing else is and no failure came before (after a fault on the device
nearly every call fails).

The thread
----------
Every call of ACL needs the device set on its OS thread.  Work is handed over by workers, and a
host may be any thread: so each call of ours sets it first, always, and puts the thread back where
it was (``library.OnDevice``).
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from kvcore.errors import (
    BackendUnavailableError,
    DeviceOutOfMemoryError,
    KVCoreError,
    ParamInvalidError,
    StreamError,
    fail,
)
from kvcore.npu.cann import constants, library
from kvcore.npu.driver.graph import AclCapture, Models
from kvcore.npu.driver.handles import Handles, bare
from kvcore.npu.driver.memory import AclBuffer, Heap
from kvcore.npu.driver.records import AclEvent, Events, Record, record_of
from kvcore.npu.driver.stream import AclStream
from kvcore.npu.driver.turns import Turns
from kvcore.npu.driver.watch import AclHost
from kvcore.runtime._marks import Failure
from kvcore.runtime.device import Device
from kvcore.runtime.external import never_recorded
from kvcore.runtime.memory import DEFAULT_ALIGNMENT, Buffer, allocate, refuse
from kvcore.runtime.profile import SHIPPED, DeviceProfile

if TYPE_CHECKING:
    from kvcore.runtime._marks import Mark
    from kvcore.runtime.settings import RaceMode
    from kvcore.runtime.stream import Stream

__all__ = ["AclDevice"]

#: Seconds that an allocation waits for work that holds memory, when there is no other.
RECLAIM_S = 0.2


class AclDevice(Device):
    """One NPU; use it as any ``kvcore.Device``, of which it is one.

    profile: None, or what the NPU must be ("A2", "A3", "950", a DeviceProfile): ParamInvalidError
             for another SoC.  A profile's capacity is kept to when it is less than the NPU's.
    backend: "aclnn", or "aclnn:n" for device n.
    clock:   "wall" alone.

    Raises BackendUnavailableError, saying why, where there is no NPU.
    """

    _stream_class = AclStream
    _event_class = AclEvent
    _buffer_class = AclBuffer

    def __init__(
        self,
        profile: str | DeviceProfile | None = None,
        *,
        clock: Literal["wall", "model"] = "wall",
        race_check: RaceMode | None = None,
        trace: bool = False,
        workers: int = 2,
        backend: str | None = "aclnn",
        seed: int | None = None,
        check_host: bool = False,
        max_events: int | None = None,
    ) -> None:
        if isinstance(clock, str) and clock == "model":  # whatever else is no clock, super says
            raise ParamInvalidError(
                "clock: expected 'wall' on backend 'aclnn', got 'model'; an NPU keeps its own time",
                argument="clock",
                seen=clock,
                expected="wall",
            )
        device_id = _device_id(backend)
        self._cann = cann = _cann()
        self.device_id = device_id
        if not device_id < cann.device_count():
            raise BackendUnavailableError(
                f"backend: expected a device from 0 to {cann.device_count() - 1}, got {device_id}",
                argument="backend",
                seen=backend,
            )
        super().__init__(
            _profile(profile, cann.soc().name),
            clock=clock,
            race_check=race_check,
            trace=trace,
            workers=workers,
            seed=seed,
            check_host=check_host,
            max_events=max_events,
        )
        self.backend = "aclnn"
        self._executor.admission.refuse = self._refuse
        self._host: AclHost = AclHost(self)
        self._handles = Handles(cann, device_id)
        self._rings = Handles(cann, device_id)
        self._events = Events(cann)
        self._models = Models(cann, self._events)
        self._turns = Turns()
        self._heap = Heap(cann, device_id)
        self._buffers: weakref.WeakSet[AclBuffer] = weakref.WeakSet()
        #: Streams whose queue waits for a host function.
        self._held: set[AclStream] = set()
        #: Records behind a failure that wait for what was before it.
        self._doomed: set[Record] = set()
        self._batches = bool(cann.has("aclrtMemcpyBatchAsync"))
        #: The hardware has failed once: what closing complains of is no news.
        self._failed = False
        self._close_errors: list[KVCoreError] = []

    def _bind(self) -> library.OnDevice:
        """``with device._bind():`` gives this thread the device for the block."""
        return self._cann.on_device(self.device_id)

    def _open(self) -> None:
        if not self._entered and not self._executor.is_forked:
            with self._bind():
                total = self._free_and_total()[1]
                ledger = self._ledgers["device"]
                ledger.capacity = total if ledger.capacity < 0 else min(ledger.capacity, total)
        super()._open()

    # -- streams

    def _direct_stream(self) -> int:
        """The handle for an operator that is called, not launched, with arrays of this device."""
        if self._default is None:  # (a worker may be who asks)
            self._default = self._new_stream("default")
        stream = self._default
        assert isinstance(stream, AclStream)
        stream.shared = True
        return stream.handle

    def capture(self, stream: Stream) -> AclCapture:
        """``async with device.capture(stream) as graph:``; see ``kvcore.Device.capture``.

        The graph becomes one of the NPU's when the block ends; BackendUnavailableError ("not in
        this CANN") where aclmdlRI* is missing.  Host functions cannot be captured.
        """
        self._executor.check()
        return AclCapture(self, self._own(stream))

    # -- memory

    def _free_and_total(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._cann.aclrtGetMemInfo(constants.ACL_HBM_MEM, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def _take_bytes(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        with self._bind():
            heap = self._heap
            heap.collect()
            try:
                return heap.take(space, nbytes)
            except DeviceOutOfMemoryError:
                self._reclaim()
            try:
                return heap.take(space, nbytes)
            except DeviceOutOfMemoryError as error:
                raise self._exhausted(space, nbytes, error) from error

    def _reclaim(self) -> None:
        """Give the work under way a little time, and free what only that held."""
        end = time.monotonic() + RECLAIM_S
        for stream in self._streams:
            # A worker must not wait for the queue that it is in.
            if isinstance(stream, AclStream) and not (stream.idle or self._executor.inside()):
                with contextlib.suppress(KVCoreError):
                    self._host.wait_blocking(stream.mark(), max(0.0, end - time.monotonic()))
        with self._bind():
            self._heap.trim()

    def _exhausted(
        self, space: str, wanted: int, cause: DeviceOutOfMemoryError
    ) -> DeviceOutOfMemoryError:
        free: int | None = None
        total: int | None = None
        if space == "device":
            free, total = self._free_and_total()
        text = f"{space} memory: expected {wanted} bytes"
        text += f", got {free} free of {total}" if total is not None else " of pinned host memory"
        error = DeviceOutOfMemoryError(
            f"{text} ({cause})", argument="shape", seen=free, expected=wanted, code=cause.code
        )
        error.wanted, error.free, error.total = wanted, free, total
        return error

    def _scratch(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of an operation under way: it goes with its last array."""
        if space == "host":
            return self._heap.staging(nbytes)
        return self._take_bytes(space, nbytes)

    def _result(self, shape: Any, dtype: str) -> AclBuffer:
        """Memory that an operator returns; a worker may ask for it."""
        found = allocate(self, shape, dtype, "device", DEFAULT_ALIGNMENT)
        assert isinstance(found, AclBuffer)
        return found

    def _refuse(self, argument: str, owner: object) -> None:
        """Raise for an argument that a kernel here must not touch."""
        if not isinstance(owner, Buffer) and getattr(owner, "is_npu", False) is True:
            # A tensor of torch_npu: the operators look at the rest themselves.
            number = getattr(owner, "device", None)
            number = getattr(number, "index", None) or 0
            if number != self.device_id:
                fail(argument, f"memory of NPU {self.device_id}", f"memory of NPU {number}")
            return
        refuse(self._key, argument, owner)

    def _host_reached(self, mark: Mark) -> None:
        super()._host_reached(mark)
        with self._bind():
            self._heap.collect()

    def _time_of(self, mark: Mark) -> float | None:
        if mark.graph is None:
            self._host.finds(mark)  # nobody may have asked the hardware yet
        return super()._time_of(mark)

    # -- the end

    def _break_promises(self, *, fail: bool) -> None:
        for mark in self._promises.take():
            self._break_promise(
                mark, Failure(never_recorded(), "none", "wait_event") if fail else None
            )

    def _break_promise(self, mark: Mark, failure: Failure | None) -> None:
        if failure is not None:
            self._executor.failures.append(failure)
        record_of(self._executor, mark).resolve(failure, dropped=failure is None)

    def _close(self) -> None:
        self._workers.end()
        self._host.stop()
        with self._cann.on_device(self.device_id, giving_back=True):
            self._close_all()

    def _close_all(self) -> None:
        errors = self._close_errors
        errors += self._handles.settle()
        errors += self._models.close()
        for stream in self._streams:
            assert isinstance(stream, AclStream)
            stream._flight.clear()
            stream._handle = 0
        errors += self._handles.close()
        errors += self._rings.close(forced=True)
        errors += self._events.close()
        for buffer in list(self._buffers):
            buffer._end()
        super()._close()
        errors += self._heap.close()
        for failure in (*self._executor.failures, *[stream.failure for stream in self._streams]):
            if failure is not None:
                bare(failure.cause)

    def _raise_unseen(self) -> None:
        super()._raise_unseen()
        if self._close_errors and not self._failed:
            first = self._close_errors[0]
            error = StreamError(
                f"device: expected to give everything back, got: {first}",
                argument="device",
                seen=str(first),
                code=first.code,
            )
            for other in self._close_errors[1:10]:
                error.add_note(str(other))
            raise error from first


def _cann() -> library.Cann:
    try:
        return library.current()
    except BackendUnavailableError as error:
        raise BackendUnavailableError(
            f"backend 'aclnn' is not available: {error}; use backend='cpu'",
            argument="backend",
            seen="aclnn",
            code=error.code,
        ) from error


def _device_id(backend: str | None) -> int:
    name, _, number = (backend if isinstance(backend, str) else "").partition(":")
    if name == "aclnn" and (backend == name or (number.isdecimal() and len(number) < 6)):
        return int(number or 0)
    raise BackendUnavailableError(
        f"backend: expected 'aclnn' or 'aclnn:' with a device's number, got {backend!r}",
        argument="backend",
        seen=backend,
    )


def _profile(profile: str | DeviceProfile | None, found: str) -> str | DeviceProfile:
    """The profile of the SoC that was found, or the one given when that is of this SoC."""
    name = profile.name if isinstance(profile, DeviceProfile) else profile
    if profile is None:
        return DeviceProfile.named(found)
    if isinstance(name, str) and name in SHIPPED and name != found:
        raise ParamInvalidError(
            f"profile: expected {found!r}, which this NPU is, or None, got {name!r}",
            argument="profile",
            seen=name,
            expected=found,
        )
    return profile  # super knows what is none
