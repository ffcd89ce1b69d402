# SPDX-License-Identifier: Apache-2.0
"""The driver of a device whose queues, events and memory are an NPU's.

Opening and closing
-------------------
CANN is initialised once for the process by ``library``, and never finalised: another part of the
process (torch_npu) may use it.  A device opens nothing before its block is entered.  Closing goes
from what uses to what is used: the watch, the workers, every stream waited for, graphs, streams,
events, memory.  Each handle is taken off its list before it is destroyed, so neither an error in
the middle nor a second attempt destroys one twice.  What goes wrong on the way does not stop the
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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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
from kvcore.npu.cann.status import bare
from kvcore.npu.driver.buffers import AclBuffer, end_all
from kvcore.npu.driver.graph import NEEDED, AclProgram, Models
from kvcore.npu.driver.handles import Handles
from kvcore.npu.driver.heap import Heap
from kvcore.npu.driver.lane import AclLane
from kvcore.npu.driver.records import Events, HardwareRecord, record_of
from kvcore.npu.driver.turns import Turns
from kvcore.npu.driver.watch import HardwareWatch
from kvcore.runtime.abc import Driver
from kvcore.runtime.memory import Buffer
from kvcore.runtime.profile import SHIPPED, DeviceProfile

if TYPE_CHECKING:
    from kvcore.runtime.abc import Program, Step
    from kvcore.runtime.bell import Waitable
    from kvcore.runtime.core import Core
    from kvcore.runtime.queues._marks import Failure, Mark
    from kvcore.runtime.queues._queue import Queue

__all__ = ["AclDriver"]

#: Seconds that an allocation waits for work in flight to free memory, when there is none left.
RECLAIM_S = 0.2


class AclDriver(Driver):
    """One NPU, for ``Device(backend="aclnn")``, or "aclnn:n" for device n.

    cann:       the library.  device_id: which of its devices.
    handles, rings: streams of the program's work, and of the host that waits.
    lanes:      one a stream.  held: those whose queue waits for a host function.
    doomed:     records behind a failure that wait for what was before it.
    batches:    whether copies of many pieces go as one call.
    buffers:    all that live.
    failed:     the hardware has failed once: what closing complains of is no news.
    complaints: what went wrong when things were given back.
    """

    name = "aclnn"
    buffer_class: type[Buffer] = AclBuffer
    tidies = True

    cann: library.Cann

    def __init__(self, backend: str = "aclnn") -> None:
        self._backend = backend
        self._total: int | None = None
        self.turns: Turns = Turns()
        self.lanes: list[AclLane] = []
        self.buffers: weakref.WeakSet[AclBuffer] = weakref.WeakSet()
        self.held: set[AclLane] = set()
        self.doomed: set[HardwareRecord] = set()
        self.failed = False
        self.complaints: list[KVCoreError] = []

    # -- life

    def accept(self, profile: Any, clock: str) -> str | DeviceProfile | None:
        """The profile of the SoC that is there; None asks for whatever that is.

        Raises ParamInvalidError for the model clock and another SoC's profile, and
        BackendUnavailableError, saying why, where there is no NPU.
        """
        if isinstance(clock, str) and clock == "model":  # others are refused later
            raise ParamInvalidError(
                "clock: expected 'wall' on backend 'aclnn', got 'model'; an NPU keeps its own time",
                argument="clock",
                seen=clock,
                expected="wall",
            )
        device_id = _device_id(self._backend)
        self.cann = cann = _cann()
        self.device_id = device_id
        if not device_id < cann.device_count():
            raise BackendUnavailableError(
                f"backend: expected a device from 0 to {cann.device_count() - 1}, got {device_id}",
                argument="backend",
                seen=self._backend,
            )
        return _profile(profile, cann.soc().name)

    def attach(self, core: Core) -> None:
        """Make the parts that count handles and memory; nothing is taken yet."""
        super().attach(core)
        cann, device_id = self.cann, self.device_id
        self.watch: HardwareWatch = HardwareWatch(self)
        self.handles: Handles = Handles(cann, device_id)
        self.rings: Handles = Handles(cann, device_id)
        self.events: Events = Events(cann)
        self.models: Models = Models(cann, self.events)
        self.heap: Heap = Heap(cann, device_id)
        self.batches: bool = bool(cann.has("aclrtMemcpyBatchAsync"))

    def bind(self) -> library.OnDevice:
        """Give this thread the device for a block: ``with driver.bind():``."""
        return self.cann.on_device(self.device_id)

    def open(self) -> None:
        """Ask the NPU how much memory it has."""
        with self.bind():
            self._total = self._free_and_total()[1]

    def forked(self) -> None:
        """In a forked child: the watch is not here."""
        self.watch.abandon()

    def close(self) -> Sequence[KVCoreError]:
        """Give everything back, what uses before what is used."""
        self.watch.stop()
        with self.cann.on_device(self.device_id, giving_back=True):
            errors = self.complaints
            errors += self.handles.settle()
            errors += self.models.close()
            for lane in self.lanes:
                lane.flight.end()
            errors += self.handles.close()
            errors += self.rings.close(forced=True)
            errors += self.events.close()
            end_all(list(self.buffers))
            self.core.release_memory()
            errors += self.heap.close()
        for failure in (*self.core.executor.failures, *[q.failure for q in self.core.queues]):
            if failure is not None:
                bare(failure.cause)
        return () if self.failed else errors

    # -- streams and completion

    def lane(self, queue: Queue) -> AclLane:
        """A lane with a stream of its own on the NPU."""
        lane = AclLane(self, queue)
        self.lanes.append(lane)
        return lane

    def direct_stream(self) -> int:
        """The handle for an operator that is called, not launched, with arrays of this device."""
        lane: AclLane = self.core.default_queue().lane  # the caller may be a worker
        lane.shared = True
        return lane.flight.handle

    def until(self, marks: Sequence[Mark], *, timed: bool = True) -> Iterator[Waitable]:
        """Wait by the hardware's rings and the watch; see ``watch``."""
        return self.watch.until(marks)

    def wait_for(self, mark: Mark, seconds: float | None = None, *, timed: bool = True) -> None:
        """Wait in CANN's own synchronisation, one slice of time after the other."""
        self.watch.wait_for(mark, seconds)

    def look(self, mark: Mark) -> bool:
        """Query the mark's event."""
        return self.watch.look(mark)

    def reached(self) -> None:
        """Free memory that only finished work held."""
        with self.bind():
            self.heap.collect()

    def give_up(self, mark: Mark, failure: Failure | None) -> None:
        """Resolve the mark's record, so that lanes that wait for it go on."""
        if failure is not None:
            self.core.executor.failures.append(failure)
        record_of(self.core.executor, mark).resolve(failure, dropped=failure is None)

    def time_of(self, mark: Mark) -> float | None:
        """The time at which the host learnt that the mark was reached."""
        self.look(mark)  # its event may not have been queried yet
        return super().time_of(mark)

    def elapsed(self, start: Mark, end: Mark) -> float:
        """Milliseconds from one mark to another, by the NPU's clock."""
        handles = [_timed(start, "event"), _timed(end, "other")]
        with self.bind():
            found = ctypes.c_float()
            self.cann.aclrtEventElapsedTime(ctypes.byref(found), *handles)
            return found.value

    def begin_capture(self) -> None:
        """Raise BackendUnavailableError ("not in this CANN") where aclmdlRI* is missing."""
        for name in NEEDED:
            if not self.cann.has(name):
                getattr(self.cann, name)  # raises BackendUnavailableError

    def capture(self, steps: Sequence[Step], queues: Sequence[Queue]) -> Program:
        """A graph of the NPU's own."""
        with self.bind():
            return AclProgram(self, steps, queues)

    # -- memory

    def capacity(self, space: str) -> int | None:
        """What the NPU has, once it is opened."""
        return self._total if space == "device" else None

    def _free_and_total(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cann.aclrtGetMemInfo(constants.ACL_HBM_MEM, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def take(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate by CANN; when memory is exhausted, wait a little for work that holds some."""
        with self.bind():
            heap = self.heap
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
        """Wait a little for the work in flight, and free memory that only it held."""
        end = time.monotonic() + RECLAIM_S
        for lane in list(self.lanes):
            # A worker must not wait for the queue that it is in.
            if not (lane.idle or self.core.executor.inside()):
                with contextlib.suppress(KVCoreError):
                    self.watch.wait_for(lane.mark(), max(0.0, end - time.monotonic()))
        with self.bind():
            self.heap.trim()

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

    def scratch(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory for an operation in flight; freed with the last array over it."""
        if space == "host":
            return self.heap.staging(nbytes)
        return self.take(space, nbytes)

    def refuse(self, argument: str, owner: object) -> None:
        """Raise for memory that a kernel here must not touch; tensors of this NPU it may."""
        if not isinstance(owner, Buffer) and getattr(owner, "is_npu", False) is True:
            # A tensor of torch_npu: the operators check everything else about it.
            number = getattr(owner, "device", None)
            number = getattr(number, "index", None) or 0
            if number != self.device_id:
                fail(argument, f"memory of NPU {self.device_id}", f"memory of NPU {number}")
            return
        super().refuse(argument, owner)


def _timed(mark: Mark, argument: str) -> int:
    """The event of a mark that was reached."""
    record: HardwareRecord | None = mark.position
    if record is None or record.failure is not None or not record.handle:
        raise StreamError(
            f"{argument}: expected an event that was reached, got one that failed",
            argument=argument,
        )
    return record.handle


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


def _device_id(backend: str) -> int:
    name, _, number = backend.partition(":")
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
    return profile  # Settings refuses what is no profile
