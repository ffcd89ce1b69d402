# SPDX-License-Identifier: Apache-2.0
"""Marks that the hardware reaches, and the events that hold them.

Each record has an aclrtEvent of its own, from a pool: an event that a task waits for may be
recorded again meanwhile, and the task means the record from before.  A handle goes back to the
pool with the last reference to its record; a stream that waits for it on the hardware holds one.

Events are made by aclrtCreateEventExWithFlag, as torch_npu makes them: recording again is allowed
and status is asked by aclrtQueryEventStatus, where 1 means complete (aclrtQueryEvent, which is
older, says 0).  aclrtRecordEvent takes the event first, aclrtStreamWaitEvent the stream.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kvcore.errors import KVCoreError
from kvcore.npu.cann import constants
from kvcore.npu.cann.status import bare
from kvcore.runtime.queues._executor import Executor
from kvcore.runtime.queues._marks import Failure, Mark
from kvcore.runtime.queues._outside import fail, promise, settle

if TYPE_CHECKING:
    from kvcore.npu.driver.parts import OnHardware

__all__ = ["TIMEOUTS", "Dependency", "Events", "HardwareRecord", "record_of"]

#: Statuses that say "not yet".
TIMEOUTS = (
    constants.ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
    constants.ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
)


class Events:
    """The event handles of one device, with and without timing."""

    def __init__(self, cann: Any) -> None:
        self._cann = cann
        self._idle: tuple[deque[int], deque[int]] = (deque(), deque())
        self._all: set[int] = set()

    def lend(self, record: HardwareRecord, timing: bool) -> int:
        """A handle for as long as the record lives."""
        idle = self._idle[timing]
        try:
            handle = idle.popleft()
        except IndexError:
            handle = self.make(timing)
        weakref.finalize(record, idle.append, handle).atexit = False
        return handle

    def make(self, timing: bool) -> int:
        """A new handle, destroyed by ``drop`` or with the device."""
        found = ctypes.c_void_p()
        flag = constants.ACL_EVENT_SYNC | (constants.ACL_EVENT_TIME_LINE if timing else 0)
        self._cann.aclrtCreateEventExWithFlag(ctypes.byref(found), flag)
        handle = found.value or 0
        self._all.add(handle)
        return handle

    def drop(self, handles: Iterable[int]) -> list[KVCoreError]:
        """Destroy events that nothing waits for any more; returns the errors met."""
        errors: list[KVCoreError] = []
        for handle in handles:
            if handle not in self._all:
                continue
            self._all.discard(handle)
            try:
                self._cann.aclrtDestroyEvent(handle)
            except KVCoreError as error:
                errors.append(bare(error))
        return errors

    def close(self) -> list[KVCoreError]:
        """Destroy every event; returns the errors met."""
        for idle in self._idle:
            idle.clear()
        return self.drop(list(self._all))


class HardwareRecord:
    """One record of an event on a stream, from its place in the queue to the hardware's report.

    mark:    what the program sees; None once it is resolved.
    lane:    where it is recorded; None for an external event that is not recorded yet.
    ready:   a mark resolved when the hardware has the record (or will never have it).
    handle:  the aclrtEvent, 0 until then.
    failure: why it was not reached; set before its stream is aborted, which completes its event.
    doomed:  why it will not count as reached, when what was before it is done: its queue has
             failed, but the hardware still has work from before.
    losses:  failures of the lane when it was launched.
    rungs:   marks resolved when those who wait should ask the hardware again.
    """

    __slots__ = (
        "__weakref__",
        "_executor",
        "doomed",
        "failure",
        "handle",
        "in_flight",
        "lane",
        "losses",
        "mark",
        "ready",
        "rungs",
        "timing",
    )

    def __init__(
        self, executor: Executor, mark: Mark, timing: bool, lane: OnHardware | None = None
    ) -> None:
        self._executor = executor
        self.lane: OnHardware = cast("OnHardware", lane)
        self.mark: Mark | None = mark
        self.timing: bool = timing
        self.ready: Mark = promise(None)
        self.handle: int = 0
        self.failure: Failure | None = None
        self.doomed: Failure | None = None
        self.rungs: list[Mark] = []
        self.in_flight: bool = False
        self.losses: int = 0

    def hand_over(self, step: Mark) -> Callable[[], object]:
        """The queue has come to this record; what the call returns wakes those who wait.

        Never raises: it is called in a worker's loop.
        """
        lane = self.lane
        flight = lane.flight
        executor = self._executor
        failure = step.failure
        if not step.dropped:
            try:
                quiet = lane.is_quiet and (failure is not None or not self.timing)
                # Asked in this order: a lane may be quiet because it has just lost its work.
                lost = flight.loss_since(self.losses)
                if quiet and lost is None:
                    return partial(self.resolve, failure)
                self.doomed = failure
                if lost is None and self._put(lane):
                    if failure is not None:
                        lane.npu.doomed.add(self)
                        return _nothing
                    return partial(settle, executor, self.ready)
                failure = failure or flight.loss_since(self.losses)
            except BaseException as error:  # reported to the host as any failure is
                failure = failure or Failure(bare(error), lane.name, "record_event")
                fail(executor, lane.queue, failure)
                # Nobody can say when the hardware is done with what it has: it must end, since
                # those who wait for this record take all before it for over.
                lane.give_up(failure)
        return partial(self.resolve, failure, dropped=step.dropped)

    def _put(self, lane: OnHardware) -> bool:
        """Record an event on the hardware; False when the lane has failed meanwhile."""
        driver = lane.npu
        with driver.bind(), lane.flight.using(self.losses) as on:
            if not on:
                return False
            handle = driver.events.lend(self, self.timing)
            driver.cann.aclrtRecordEvent(handle, on)
            if not lane.flight.took(self, self.losses):
                return False
            self.handle = handle
            return True

    def resolve(self, failure: Failure | None = None, *, dropped: bool = False) -> None:
        """Settle the marks of the record, once, and wake those who wait for them."""
        failure = failure or self.failure
        if self.doomed is not None:
            failure = self.doomed
            self.lane.npu.doomed.discard(self)
        mark, self.mark = self.mark, None
        executor = self._executor
        if mark is not None:
            self.failure = failure
            settle(executor, mark, failure, dropped)
        settle(executor, self.ready, failure, dropped)
        for rung in self.rungs:
            settle(executor, rung)
        self.rungs.clear()

    def look(self) -> bool:
        """Ask the hardware, and resolve when it has an answer; True when resolved."""
        if self.mark is None:
            return True
        if not self.handle:
            return False
        status = ctypes.c_int32(-1)
        try:
            self.lane.npu.cann.aclrtQueryEventStatus(self.handle, ctypes.byref(status))
        except KVCoreError as error:
            self.lane.lose(error, losses=self.losses)
            return True
        if status.value != constants.ACL_EVENT_RECORDED_STATUS_COMPLETE:
            return False
        self.confirm()
        return True

    def happens_within(self, time_ms: int) -> bool:
        """Wait a little for the event; KVCoreError for a failure."""
        cann = self.lane.npu.cann
        if not cann.has("aclrtSynchronizeEventWithTimeout"):
            return self.look()
        try:
            cann.aclrtSynchronizeEventWithTimeout(self.handle, time_ms)
        except KVCoreError as error:
            if error.code in TIMEOUTS:
                return False
            raise
        return True

    def confirm(self) -> None:
        """The event is complete: resolve, unless there is a failure to report.

        An asynchronous fault is reported by the next synchronisation, so there is one; what is
        waited for here has happened.  A stream that waited for one that failed goes on, on the
        hardware: so what this one waited for is confirmed first.
        """
        for record in _in_order(self):
            record.confirm_alone()

    def confirm_alone(self) -> None:
        """Do what ``confirm`` does, when what this record waited for is confirmed."""
        lane = self.lane
        for other in lane.flight.waited_for(self):
            if other.failure is not None:
                lane.lose(other.failure.cause, other.failure, self.losses)
        if self.mark is None:
            return
        try:
            # Those before it first: what was reached before a fault is whole.
            for record in lane.flight.records_until(self):
                lane.npu.cann.aclrtSynchronizeEvent(record.handle)
                if record is not self:
                    lane.passed(record)
            if lane.flight.ends_with(self):
                lane.synchronize_briefly()
        except KVCoreError as error:
            lane.lose(error, losses=self.losses)
        else:
            lane.passed(self)


def _in_order(last: HardwareRecord) -> list[HardwareRecord]:
    """What a record depends on, on other lanes, each before what depends on it; then itself."""
    order: list[HardwareRecord] = []
    seen = {last}
    path = [(last, iter(last.lane.flight.waited_for(last)))]
    while path:
        record, others = path[-1]
        for other in others:
            if other not in seen and other.mark is not None and other.handle:
                seen.add(other)
                path.append((other, iter(other.lane.flight.waited_for(other))))
                break
        else:
            order.append(record)
            path.pop()
    return order


def _nothing() -> None:
    """Wake no one yet: the record is resolved when the hardware has reached it."""


def record_of(executor: Executor, mark: Mark) -> HardwareRecord:
    """The record of a mark; an external event's is made when it is first asked for."""
    record: HardwareRecord | None = mark.position
    if record is None:
        record = mark.position = HardwareRecord(executor, mark, False)
    return record


class Dependency:
    """An item in a lane's flight: the hardware waits there for a record of another lane."""

    __slots__ = ("record",)

    def __init__(self, record: HardwareRecord) -> None:
        self.record: HardwareRecord = record
