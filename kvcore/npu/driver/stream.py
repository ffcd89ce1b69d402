# SPDX-License-Identifier: Apache-2.0
"""A stream whose work a hardware stream does; the package's page says how the two share it."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

from kvcore.errors import BackendUnavailableError, KVCoreError, ParamInvalidError
from kvcore.npu.call import launch as operators
from kvcore.npu.cann import status
from kvcore.npu.driver.handles import bare
from kvcore.npu.driver.hostcalls import HostCall
from kvcore.npu.driver.memory import Held
from kvcore.npu.driver.records import TIMEOUTS, AclEvent, Dependency, Record, record_of
from kvcore.npu.driver.transfers import Transfer
from kvcore.runtime._marks import Failure, Mark, Waiter
from kvcore.runtime._outside import fail, hold, owned, place, promise, settle
from kvcore.runtime._queue import Queue
from kvcore.runtime.copies import Copy, Fill
from kvcore.runtime.stream import Stream

if TYPE_CHECKING:
    from kvcore.npu.driver.device import AclDevice

__all__ = ["AclStream"]

#: Things in flight from which on the stream looks by itself how far the hardware is.
FLIGHT = 256
#: Seconds between two looks for a failure by a host that polls.
PATIENCE_S = 0.05
#: Milliseconds of a synchronisation that only wants to hear of a failure.
GLANCE_MS = 1


class _Work:
    """An operation as the queue has it: the plan for whoever asks about it, and how it is run."""

    __slots__ = ("_held", "_losses", "_plan", "_stream", "name")

    def __init__(self, stream: AclStream, plan: Any, owners: Iterable[object] = ()) -> None:
        self._losses = stream.losses
        self._stream = stream
        self._plan = plan
        self._held = Held(owners)
        self.name = _name(plan)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._plan, attribute)  # reads, writes, touched, arrays, ...

    def run(self) -> None:
        """Hand over; called by a worker when the queue comes to it."""
        stream = self._stream
        with stream.device._bind(), stream._using(self._losses) as handle:
            if not handle:
                return  # behind a failure that the queue has not heard of yet
            try:
                self.hand_over(handle, stream._took)
            except KVCoreError as error:
                if error.code is not None and status.is_sticky(error.code):
                    # An earlier fault that this call happened to report: nothing in flight is sure.
                    stream._give_up(Failure(bare(error), stream.name, self.name))
                raise
            stream._look_around()

    def hand_over(self, handle: int, keep: Callable[[Any], object]) -> None:
        """Run the plan, which puts its kernels on the stream."""
        keep(self)
        # The operators keep their workspace by stream, but in a capture.
        sink = None if keep == self._stream._took else keep
        device = self._stream.device
        with (
            device._turns.of(self._plan),
            operators.onto(stream=handle, device_id=device.device_id, keep=sink),
            self._held.in_use(),
        ):
            self._plan.run()


class _Arrays(_Work):
    """A plan that has ``arrays``: the admission looks at them once for each type."""

    __slots__ = ()


class _Accesses(_Work):
    """A plan that has ``reads`` and ``writes`` alone."""

    __slots__ = ()


class _Moves(_Work):
    """A copy or a fill."""

    __slots__ = ("_transfer",)

    def __init__(self, stream: AclStream, transfer: Transfer) -> None:
        super().__init__(stream, transfer.plan)
        self._transfer = transfer

    def hand_over(self, handle: int, keep: Callable[[Any], object]) -> None:
        """Put its copies on the stream."""
        self._transfer.hand_over(handle, keep)


class AclStream(Stream):
    """Work in launch order on an NPU's stream; see ``kvcore.runtime.Stream``.

    ``compute`` is refused: work that only takes time is a notion of the model.  A plan that has
    no arrays, only ``run()``, is a host function.
    """

    device: AclDevice

    def __init__(self, device: AclDevice, name: str, index: int) -> None:
        super().__init__(device, name, index)
        self._flight: deque[Any] = deque()
        self._steps: list[Mark] = []
        self._flight_lock = threading.Lock()
        self._handle = device._handles.make()
        #: A mark behind everything launched here, or None.
        self._tail: Mark | None = None
        self._next_look = 0.0
        self._stuck_at: Record | None = None
        #: Failures of the hardware so far: what was launched before one may not be handed over
        #: behind it, and a worker can be about to while another thread finds out.
        self.losses = 0
        self._last_loss: Failure | None = None
        #: Failures that the host was told of here, the last ones.
        self._told_of: deque[Failure] = deque(maxlen=32)
        #: Calls that use the handle now; a lost one is destroyed behind the last of them.
        self._users = 0
        self._doomed: list[int] = []
        #: Others put work on the handle too: an empty flight says nothing.
        self.shared = False

    @property
    def handle(self) -> int:
        """The aclrtStream; a new one after a failure."""
        if not self._handle:
            self._handle = self.device._handles.make()
        return self._handle

    @contextlib.contextmanager
    def _using(self, losses: int) -> Iterator[int]:
        """The handle, kept until the block ends; 0 when there was a failure since ``losses``."""
        handle = 0
        while not handle and self.losses == losses:
            made = self.handle
            with self._flight_lock:
                if self.losses == losses and self._handle == made:
                    handle = made
                    self._users += 1
        try:
            yield handle
        finally:
            if handle:
                with self._flight_lock:
                    self._users -= 1
                    doomed: list[int] = []
                    if not self._users:
                        doomed, self._doomed = self._doomed, doomed
                for lost in doomed:
                    self.device._handles.discard(lost)

    def loss_since(self, losses: int) -> Failure | None:
        """The last failure of the hardware, if there was one since."""
        with self._flight_lock:
            return None if self.losses == losses else self._last_loss

    # -- launching

    def launch(self, plan: Any) -> None:
        """Queue one run of a plan on the NPU and return at once.

        Plans of kvcore's operators run by aclnn.  Errors of handing it over and of the device
        reach the host at the next synchronise.
        """
        if isinstance(plan, type) or not callable(getattr(plan, "run", None)):
            super().launch(plan)  # which refuses it
            return
        self._tail = None
        if hasattr(plan, "reads") and hasattr(plan, "writes"):
            arrays = getattr(plan, "arrays", None)
            if isinstance(arrays, tuple):
                super().launch(_Arrays(self, plan, arrays))
                return
            if accesses := (*plan.reads, *plan.writes):
                super().launch(_Accesses(self, plan, [access.owner for access in accesses]))
                return
        self._call_named(plan.run, (), _name(plan))

    def _move(self, plan: Copy | Fill, dsts: Sequence[object], srcs: Sequence[object]) -> None:
        self._tail = None
        transfer = Transfer(self.device, plan, dsts, srcs)
        if self.capture is not None and transfer.within_host:
            raise self.device._capture_error(f"stream {self.name!r}", "copy within host memory")
        self._launch_unchecked(_Moves(self, transfer))

    def _call(self, fn: Callable[..., object], args: tuple[object, ...]) -> None:
        self._call_named(fn, args, _name(fn, "__qualname__"))

    def _call_named(self, fn: Callable[..., object], args: tuple[object, ...], name: str) -> None:
        self.executor.check()
        if self.capture is not None:
            raise self.device._capture_error(f"stream {self.name!r}", "call a host function")
        self._tail = None
        call = HostCall(self, fn, args, name)
        with self.device._lock:  # nothing may come between the two
            super()._call(call, ())
            hold(self.executor, self, call.done)

    def _again(self, kind: int, target: Any, args: Any, us: float, note: Any) -> None:
        self._tail = None
        super()._again(kind, target, args, us, note)

    def _timer(self, us: float, target: object) -> NoReturn:
        raise BackendUnavailableError(
            "compute: expected a plan to launch on backend 'aclnn', got work that only takes time, "
            "which modelled devices have",
            argument="us",
            seen=us,
        )

    # -- order

    def mark(self) -> Mark:
        """A mark behind everything launched here so far."""
        mark = self._tail
        if mark is None or not mark.pending or self.shared:
            # Kept after it is placed: a host that polls asks for the same mark again and again.
            mark = self._place(timing=False)
            self._tail = mark
        return mark

    def _place(self, *, timing: bool) -> Mark:
        mark = promise(self)
        mark.position = Record(self.executor, mark, timing)
        self._record_mark(mark)
        return mark

    def _record_mark(self, mark: Mark) -> None:
        self._tail = None
        record = record_of(self.executor, mark)
        owned(mark, self)
        record.stream = self
        record.losses = self.losses
        observer = self.executor.observer
        if observer is None:
            self._in_order(record.hand_over)
        else:
            with self.device._lock:
                observer.marked(self, mark)
                self._in_order(record.hand_over)

    def _in_order(self, action: Callable[[Mark], Callable[[], object]]) -> None:
        """Call action(step) when the queue has come this far: here and now when it is empty.

        What it returns is called when the queue may be asked again.
        """
        executor = self.executor
        step = promise(self)
        if self._rests():
            settle(executor, step, self.failure)
            action(step)()
        else:
            self._steps.append(step)
            step.add(Waiter(partial(self._act, action, step)))
            place(executor, self, step)

    def _act(self, action: Callable[[Mark], Callable[[], object]], step: Mark) -> None:
        tell = action(step)
        self._steps.pop()
        tell()

    def _rests(self) -> bool:
        # A queue counts as idle while it is telling of its last record; what is told here is
        # part of the work.
        idle: bool = Queue.idle.__get__(self)
        return idle and not self._steps

    def _record(self, event: Any) -> None:
        executor = self.executor
        executor.check()
        self._same_device(event)
        if self.capture is not None:
            event._last = self.capture.record(self)
            return
        if executor.observer is not None:
            executor.observer.event_call()
        event._last = self._place(timing=event.enable_timing)

    def _wait(self, event: Any) -> None:
        executor = self.executor
        executor.check()
        self._same_device(event)
        mark = event.mark
        if mark is None:
            if executor.observer is not None:
                executor.observer.waited_for_nothing(self)
            return
        inside = mark.graph is not None or self.capture is not None
        if inside and executor.graph_wait(self, mark):
            return
        if executor.observer is not None:
            executor.observer.event_call()
        self._wait_mark(mark)

    def _wait_mark(self, mark: Mark) -> None:
        if mark.queue is self:
            return
        if mark.promises is not None or mark.queue is None:
            self._follow(mark)
        self._tail = None
        observer = self.executor.observer
        if observer is None:
            self._wait_for(mark)
        else:
            with self.device._lock:
                observer.waited(self, mark)
                self._wait_for(mark)

    def _wait_for(self, mark: Mark) -> None:
        record = record_of(self.executor, mark)
        if not mark.pending:
            if mark.failed:
                hold(self.executor, self, mark)
            return
        if record.ready.pending:
            # The hardware must have the record before it can be told to wait for it.
            hold(self.executor, self, record.ready)
        self._in_order(partial(self._depend, record, self.losses))

    def _depend(self, record: Record, losses: int, step: Mark) -> Callable[[], object]:
        """Tell the hardware to wait for a record.  Never raises, as ``Record.hand_over``."""
        if step.failed or step.dropped:
            return _nothing
        executor = self.executor
        if record.mark is None:
            if record.failure is not None:
                fail(executor, self, record.failure)
            return _nothing
        try:
            with self.device._bind(), self._using(losses) as handle:
                if handle:
                    self.device._cann.aclrtStreamWaitEvent(handle, record.handle)
                    self._took(Dependency(record), losses)
        except BaseException as error:  # told to the host as any failure is
            fail(executor, self, Failure(bare(error), self.name, "wait_event"))
        return _nothing

    def _same_device(self, event: Any) -> None:
        if not isinstance(event, AclEvent) or event.executor is not self.executor:
            raise ParamInvalidError(
                "event: expected an event of the stream's own device, got one of another device",
                argument="event",
                expected=f"an event of the device of stream {self.name!r}",
            )

    # -- waiting

    def synchronize_blocking(self, timeout_s: float | None = None) -> None:
        """Wait until everything launched here before this call is done, holding this thread.

        Raises StreamError as ``synchronize``, and one with code 507046 when the work took longer
        than the given seconds; it goes on then.  ParamInvalidError for what are no seconds.
        """
        seconds = _seconds(timeout_s)
        self._may_wait("synchronise")
        mark = self.mark()
        self.device._host.wait_blocking(mark, seconds)
        self._finish(mark, always=False)

    def _told(self, failure: Failure | None) -> bool:
        """The host hears of a mark's failure: see ``Queue``, where a queue has one at a time.

        Here two may meet: the hardware's, which one thread finds, and that of a launch which a
        worker hands over meanwhile.  Marks have the one or the other; both are told by either.
        """
        with self._flight_lock:
            last: Failure | None = self.failure
            if failure is not last and any(failure is one for one in self._told_of):
                return False
            found: bool = super()._told(None)
            told = [one for one in (last, failure) if one is not None]
            for one in told:
                bare(one.cause)
            self._told_of += told
            if failure is not None:
                self.executor.tell(failure)
            return found or failure is not None

    @property
    def idle(self) -> bool:
        """True when nothing is queued here and the hardware was found to have nothing left."""
        return self._rests() and not self._flight

    # -- what the hardware has

    @property
    def is_quiet(self) -> bool:
        """True when the hardware has nothing of this stream that is not known to be done."""
        return not self._flight and not self.shared

    def _took(self, item: object, losses: int | None = None) -> bool:
        """Remember what the hardware has; False when there was a failure since ``losses``."""
        with self._flight_lock:
            if losses is not None and self.losses != losses:
                return False
            self._flight.append(item)
            if isinstance(item, Record):
                item.in_flight = True
            return True

    def _ran(self, call: HostCall) -> None:
        """A host function is over: with nothing before it, that is all there is to know."""
        with self._flight_lock:
            if self._flight and self._flight[0] is call:
                self._flight.popleft()

    def _ends_with(self, record: Record) -> bool:
        with self._flight_lock:
            return bool(self._flight) and self._flight[-1] is record

    def _own_records(self) -> list[Record]:
        with self._flight_lock:
            return [item for item in self._flight if isinstance(item, Record)]

    def _records_until(self, last: Record) -> list[Record]:
        """The records in flight up to this one; it alone when it is not."""
        found = []
        with self._flight_lock:
            for item in self._flight:
                if isinstance(item, Record):
                    found.append(item)
                    if item is last:
                        return found
        return [last]

    def _passed(self, record: Record) -> None:
        """The hardware is past a record: everything before it is done."""
        self._stuck_at = None
        gone = []
        with self._flight_lock:
            while record.in_flight and self._flight:
                item = self._flight.popleft()
                gone.append(item)
                if isinstance(item, Record):
                    item.in_flight = False
        for item in gone:
            if isinstance(item, Record):
                item.resolve()
        record.resolve()

    def _look_around(self) -> None:
        """A program that never waits must not hold all that it ever launched."""
        if len(self._flight) < FLIGHT or len(self._flight) % (FLIGHT // 4):
            return
        records = self._own_records()
        for record in records:
            if not record.look():
                break
        if not records or records[-1].mark is None:
            step = promise(self)
            settle(self.executor, step)
            Record(self.executor, promise(self), False).hand_over(step)()

    def _synchronize_briefly(self) -> None:
        """Hear of a failure, if there is one; KVCoreError."""
        cann = self.device._cann
        if not self._handle or not cann.has("aclrtSynchronizeStreamWithTimeout"):
            return
        try:
            with self._using(self.losses) as handle:
                if handle:
                    cann.aclrtSynchronizeStreamWithTimeout(handle, GLANCE_MS)
        except KVCoreError as error:
            if error.code not in TIMEOUTS:
                raise

    def _waited_for(self, record: Record | None = None) -> list[Record]:
        """The records of other streams that this one was told to wait for before a record of its.

        The last one of each stream, which says as much as those before it.
        """
        last: dict[object, Record] = {}
        with self._flight_lock:
            for item in self._flight:
                if isinstance(item, Dependency):
                    last[item.record.stream] = item.record
                elif item is record:
                    break
            else:
                if record is not None:
                    return []  # the hardware is past it
        return list(last.values())

    def _look_for_failure(self, seen: set[AclStream], *, polling: bool = False) -> None:
        """Find out whether this stream, or one that it waits for, has failed.

        Only a stream whose work may have begun can have: one that is held back by another is not
        asked.
        """
        if polling:
            now = time.monotonic()
            if now < self._next_look:
                return
            self._next_look = now + PATIENCE_S
        path = [self]
        order: list[AclStream] = []
        while path:
            stream = path.pop()
            if stream not in seen and stream._flight:
                seen.add(stream)
                order.append(stream)
                path += [record.stream for record in stream._waited_for()]
        for stream in reversed(order):
            stream._look_here()

    def _look_here(self) -> None:
        losses = self.losses
        records = self._waited_for()
        held = [record for record in records if not record.look()]
        for record in records:
            if record.failure is not None:
                self._lose(record.failure.cause, record.failure)
                return
        if held:
            return
        try:
            # One after the other, so that what was reached before a fault is found whole.
            for record in self._own_records():
                if not record.happens_within(GLANCE_MS):
                    if self._stuck_at is not record:
                        # It may be on its way, and a fault behind it must not be taken for one
                        # before it: only who is stuck for a second look is asked as a whole.
                        self._stuck_at = record
                        return
                    break
                record.confirm()
            self._synchronize_briefly()
        except KVCoreError as error:
            self._lose(error, losses=losses)

    # -- failing

    def _lose(
        self, cause: BaseException, failure: Failure | None = None, losses: int | None = None
    ) -> None:
        """The hardware has failed here, or on a stream that this one waits for.

        losses: how many failures there had been when this one was met; if there are more, another
        thread was faster and this is no other.
        """
        if failure is None:
            failure = Failure(bare(cause), self.name, self._in_flight_names())
        items = self._cut(failure, losses, tell=True)
        if items is not None:
            _resolve(items, failure)

    def _give_up(self, failure: Failure) -> None:
        """Count what is in flight as not done, and do without the handle from now on.

        The worker that calls this has an error that it tells the queue of.
        """
        _resolve(self._cut(failure) or [], failure)

    def _cut(
        self, failure: Failure, losses: int | None = None, *, tell: bool = False
    ) -> list[Any] | None:
        """Part with the handle and with what is in flight, which is returned."""
        with self._flight_lock:
            if losses is not None and self.losses != losses:
                return None
            if tell:
                # Before the count: from then on what was launched earlier is not handed over, and
                # a mark behind it must not be reached.
                fail(self.executor, self, failure)
            self.losses += 1
            self._last_loss = failure
            items = list(self._flight)
            self._flight.clear()
            handle, self._handle = self._handle, 0
            for item in items:
                if isinstance(item, Record):
                    item.in_flight = False
            if handle and self._users:
                self._doomed.append(handle)
                handle = 0
        self.device._failed = True
        self._stuck_at = None
        if handle:
            self.device._handles.discard(handle)
        return items

    def _in_flight_names(self) -> str:
        with self._flight_lock:
            items = list(self._flight)
        names = [_name(item) for item in items if not isinstance(item, Record | Dependency)]
        names = [name for name in names if name]
        if not names:
            return "work"
        return names[0] if len(names) == 1 else f"one of {len(names)} operations ({names[0]}, ...)"


def _resolve(items: list[Any], failure: Failure) -> None:
    for item in items:
        if isinstance(item, Record):
            item.resolve(failure)
        elif isinstance(item, HostCall):
            item.abandon(failure)


def _nothing() -> None:
    """Nobody is to be told."""


def _seconds(timeout_s: object) -> float | None:
    """A time to wait; None for ever."""
    if timeout_s is None:
        return None
    seconds = math.nan
    if isinstance(timeout_s, Real) and not isinstance(timeout_s, bool):
        with contextlib.suppress(OverflowError):  # an int that no float can be
            seconds = float(timeout_s)
    if not seconds >= 0:
        raise ParamInvalidError(
            f"timeout_s: expected seconds that are not negative, or None, got {timeout_s!r}",
            argument="timeout_s",
            seen=timeout_s,
            expected="seconds that are not negative, or None",
        )
    return None if seconds == math.inf else seconds


def _name(plan: object, attribute: str = "name") -> str:
    """What an operation is called in messages; the program's own classes may answer anything."""
    if isinstance(plan, Transfer):
        plan = plan.plan
    for path in ((), ("operator",)):
        with contextlib.suppress(Exception):
            name = getattr(functools.reduce(getattr, path, plan), attribute)
            if isinstance(name, str):
                return name
    return "" if isinstance(plan, tuple) else type(plan).__name__
