# SPDX-License-Identifier: Apache-2.0
"""A lane whose work a hardware stream does; the package's page says how the two share it.

It shares with ``FifoLane`` what every lane has (turns in the queue, ``Lane.in_order``), and no more
than that.  A ``FifoLane`` calls each operation itself, so it knows when one begins, ends or fails:
a mark is one more call behind them, a wait holds the queue on the host, and counts of what is in
flight are enough.  Here the hardware begins the work, and waits by itself, and reports nothing: a
mark is an event that is asked about, a failure is found afterwards and ends everything in flight at
once, and memory is held item by item until a later event is known to be complete.  That is
``Flight`` and ``HardwareRecord``, of which a ``FifoLane`` would use nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kvcore.errors import KVCoreError
from kvcore.npu.cann.status import bare
from kvcore.npu.driver.flight import Flight
from kvcore.npu.driver.hostcalls import HostCall
from kvcore.npu.driver.records import TIMEOUTS, Dependency, HardwareRecord, record_of
from kvcore.npu.driver.transfers import within_host
from kvcore.npu.driver.work import Handover, Work, name_of, owners_of, work_of
from kvcore.runtime.abc import Lane
from kvcore.runtime.copies import Copy, Fill
from kvcore.runtime.failures import not_in_a_capture
from kvcore.runtime.queues._marks import KIND_CALL, Failure, Mark
from kvcore.runtime.queues._outside import fail, promise, settle

if TYPE_CHECKING:
    from kvcore.npu.driver.parts import Hardware
    from kvcore.runtime.abc import Driver
    from kvcore.runtime.queues._queue import Queue

__all__ = ["AclLane"]

#: Things in flight from which on the lane looks by itself how far the hardware is.
FLIGHT = 256
#: Seconds between two looks for a failure by a host that polls.
PATIENCE_S = 0.05
#: Milliseconds of a synchronisation that is made only to have CANN report a failure.
GLANCE_MS = 1


class AclLane(Lane):
    """Work in launch order on an NPU's stream.

    ``compute`` is refused: work that only takes time is a notion of the model.  A plan that has
    no arrays, only ``run()``, is a host function.

    npu: the driver.  flight: what the hardware has.  shared: others put work on the handle too,
    so that an empty flight says nothing.
    """

    def __init__(self, npu: Hardware, queue: Queue) -> None:
        super().__init__(cast("Driver", npu), queue)
        self.npu = npu
        self.flight: Flight = Flight(npu.handles)
        self.shared = False
        #: A mark behind everything launched here, or None.
        self._tail: Mark | None = None
        self._next_look = 0.0
        self._stuck_at: HardwareRecord | None = None
        #: The last failures that were reported to the host here.
        self._told_of: deque[Failure] = deque(maxlen=32)

    # -- launching

    def check(self, kind: int, target: Any) -> None:
        """Refuse ``compute``, and in a capture what CANN cannot capture."""
        super().check(kind, target)
        if self.queue.capture is None:
            return
        if isinstance(target, Copy | Fill):
            if within_host(target):
                raise not_in_a_capture(f"stream {self.name!r}", "copy within host memory")
        elif kind == KIND_CALL or owners_of(target) is None:
            raise not_in_a_capture(f"stream {self.name!r}", "call a host function")

    def check_external(self, verb: str) -> None:
        """Refuse: what CANN captures are ordinary events."""
        raise not_in_a_capture(
            f"stream {self.name!r}", f"{verb} an external event, which this backend cannot capture"
        )

    def prepare(self, kind: int, target: Any, args: Any, us: float) -> tuple[Any, Mark | None]:
        """Make what hands the operation over; its errors reach the host at a synchronise."""
        self._tail = None
        if isinstance(target, Handover):
            return target, None
        if kind == KIND_CALL:
            call = HostCall(self, target, args, name_of(target, "__qualname__"))
            return call, call.done
        work: Work | None = work_of(self, target)
        if work is not None:
            return work, None
        call = HostCall(self, target.run, (), name_of(target))
        return call, call.done

    # -- order

    def mark(self) -> Mark:
        """A mark behind everything launched here so far."""
        mark = self._tail
        if mark is None or not mark.pending or self.shared:
            # Kept after it is placed: a host that polls asks for the same mark again and again.
            mark = self.place(False)
            self._tail = mark
        return mark

    def place(self, timing: bool) -> Mark:
        """A new mark behind everything launched here."""
        mark = promise(self.queue)
        mark.position = HardwareRecord(self.queue.executor, mark, timing, self)
        self.record_mark(mark)
        return mark

    def record_mark(self, mark: Mark) -> None:
        """Record on the hardware when the queue has come this far."""
        self._tail = None
        record = record_of(self.queue.executor, mark)
        record.lane = self
        record.losses = self.flight.losses
        self.record_in_order(mark, record.hand_over)

    def wait_mark(self, mark: Mark) -> None:
        """Have the hardware wait when the queue has come this far."""
        self._tail = None
        self.wait_in_order(mark, self._wait_for)

    def _wait_for(self, mark: Mark) -> None:
        record = record_of(self.queue.executor, mark)
        if not mark.pending:
            if mark.failed:
                self.hold_until(mark)
            return
        if record.ready.pending:
            # The hardware must have the record before it can wait for it.
            self.hold_until(record.ready)
        self.in_order(partial(self._depend, record, self.flight.losses))

    def _depend(self, record: HardwareRecord, losses: int, step: Mark) -> Callable[[], object]:
        """Have the hardware wait for a record.  Never raises."""
        if step.failed or step.dropped:
            return _nothing
        executor, npu = self.queue.executor, self.npu
        if record.mark is None:
            if record.failure is not None:
                fail(executor, self.queue, record.failure)
            return _nothing
        try:
            with npu.bind(), self.flight.using(losses) as handle:
                if handle:
                    npu.cann.aclrtStreamWaitEvent(handle, record.handle)
                    self.flight.took(Dependency(record), losses)
        except BaseException as error:  # reported to the host like any failure
            fail(executor, self.queue, Failure(bare(error), self.name, "wait_event"))
        return _nothing

    # -- state

    @property
    def idle(self) -> bool:
        """True when nothing is queued here and the hardware was found to have nothing left."""
        return self.rests and not self.flight

    @property
    def num_in_flight(self) -> int:
        """Operations that the hardware was given and is not known to have done."""
        return len(self.flight.operations())

    @property
    def is_quiet(self) -> bool:
        """True when the hardware has nothing of this stream that is not known to be done."""
        return not self.flight and not self.shared

    def told(self, failure: Failure | None) -> bool:
        """A mark's failure was reported to the host; a ``Queue`` has one failure at a time.

        Here two may meet: the hardware's, which one thread finds, and that of a launch which a
        worker hands over meanwhile.  Marks have the one or the other; reporting either of them
        reports both.
        """
        queue = self.queue
        with self.flight.lock:
            last: Failure | None = queue.failure
            if failure is not last and any(failure is one for one in self._told_of):
                return False
            found: bool = queue.usable_again(None)
            told = [one for one in (last, failure) if one is not None]
            for one in told:
                bare(one.cause)
            self._told_of += told
            if failure is not None:
                queue.executor.tell(failure)
            return found or failure is not None

    def look_around(self) -> None:
        """A program that never waits must not hold all that it ever launched."""
        if len(self.flight) < FLIGHT or len(self.flight) % (FLIGHT // 4):
            return
        records = self.flight.records()
        for record in records:
            if not record.look():
                break
        if not records or records[-1].mark is None:
            executor = self.queue.executor
            step = promise(self.queue)
            settle(executor, step)
            HardwareRecord(executor, promise(self.queue), False, self).hand_over(step)()

    # -- failing

    def passed(self, record: HardwareRecord) -> None:
        """The hardware is past a record: everything before it is done."""
        self._stuck_at = None
        self.flight.passed(record)

    def synchronize_briefly(self) -> None:
        """Have CANN report a failure, if there is one.  Raises KVCoreError."""
        cann = self.npu.cann
        if not self.flight.has_handle or not cann.has("aclrtSynchronizeStreamWithTimeout"):
            return
        try:
            with self.flight.using(self.flight.losses) as handle:
                if handle:
                    cann.aclrtSynchronizeStreamWithTimeout(handle, GLANCE_MS)
        except KVCoreError as error:
            if error.code not in TIMEOUTS:
                raise

    def look_for_failure(self, seen: set[AclLane], *, polling: bool = False) -> None:
        """Find out whether this lane, or one that it waits for, has failed.

        Only a lane whose work may have begun can have: one that is held back by another is not
        asked.
        """
        if polling:
            now = time.monotonic()
            if now < self._next_look:
                return
            self._next_look = now + PATIENCE_S
        path = [self]
        order: list[AclLane] = []
        while path:
            lane = path.pop()
            if lane not in seen and lane.flight:
                seen.add(lane)
                order.append(lane)
                path += [cast("AclLane", record.lane) for record in lane.flight.waited_for()]
        for lane in reversed(order):
            lane.look_here()

    def look_here(self) -> None:
        """Find out whether this lane has failed, by itself or with one that it waits for."""
        flight = self.flight
        losses = flight.losses
        records = flight.waited_for()
        held = [record for record in records if not record.look()]
        for record in records:
            if record.failure is not None:
                self.lose(record.failure.cause, record.failure)
                return
        if held:
            return
        try:
            # One after the other, so that what was reached before a fault is found whole.
            for record in flight.records():
                if not record.happens_within(GLANCE_MS):
                    if self._stuck_at is not record:
                        # It may be on its way, and a fault behind it must not be taken for one
                        # before it: only who is stuck for a second look is asked as a whole.
                        self._stuck_at = record
                        return
                    break
                record.confirm()
            self.synchronize_briefly()
        except KVCoreError as error:
            self.lose(error, losses=losses)

    def lose(
        self, cause: BaseException, failure: Failure | None = None, losses: int | None = None
    ) -> None:
        """The hardware has failed here, or on a lane that this one waits for.

        losses: how many failures there had been when this one was met; if there are more, another
        thread was faster and this is no other.
        """
        if failure is None:
            failure = Failure(bare(cause), self.name, self._in_flight_names())
        tell = partial(fail, self.queue.executor, self.queue)
        self._end(self.flight.cut(failure, losses, tell=tell), failure)

    def give_up(self, failure: Failure) -> None:
        """Count what is in flight as not done, and do without the handle from now on.

        The worker that calls this has an error, which it gives to the queue itself.
        """
        self._end(self.flight.cut(failure), failure)

    def _end(self, items: list[Any] | None, failure: Failure) -> None:
        if items is None:
            return
        self.npu.failed = True
        self._stuck_at = None
        for item in items:
            if isinstance(item, HardwareRecord):
                item.resolve(failure)
            elif isinstance(item, HostCall):
                item.abandon(failure)

    def _in_flight_names(self) -> str:
        names = [name for name in map(name_of, self.flight.operations()) if name]
        if not names:
            return "work"
        return names[0] if len(names) == 1 else f"one of {len(names)} operations ({names[0]}, ...)"


def _nothing() -> None:
    """Wake no one: there is nothing to report."""
