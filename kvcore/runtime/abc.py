# SPDX-License-Identifier: Apache-2.0
"""What a device needs of a driver: the contract between the runtime and what does the work.

``Device`` has what a program calls; a ``Driver`` says where bytes are, who does the work and when
it is done.  ``Device(backend=driver)`` takes an object of a class of one's own, and
``kvcore.runtime.driver.DRIVERS`` names classes by text.  A driver belongs to one device.

Who does what
-------------
The runtime keeps, for every driver: one *queue* a stream, with what was launched and has not been
begun; the threads (*workers*) that take operations from it, in order; what failed and which host
knows of it; captures, the race check, the trace; tasks that wait.

A driver whose work is done by the workers themselves, as the model's is, gives no lanes
(``Driver.lane`` returns None): an operation is over when a worker has run it.  A driver with
queues of its own gives each stream a *lane*.  Then a worker does not run an operation but hands it
over to the lane and goes on; the driver says when a mark is reached.

Order
-----
Everything on one lane is begun in the order it was launched, and each operation begins when the
one before it is over.  Lanes owe each other nothing but what ``wait_mark`` says.

Marks
-----
A *mark* is one record of an event, and is settled once: reached, failed (with the failure of the
work before it) or dropped (the device was left before its turn came).  ``Mark.pending`` is true
until then, ``Mark.add(waiter)`` has a waiter told.  ``settle`` settles one, from any thread.

Failure
-------
An operation that raises fails its lane: nothing behind it is begun, marks behind it fail with the
same ``Failure``, until a host was told (``told``).  What had been launched by then is still not
begun; what is launched from then on is.

Threads
-------
``check``, ``prepare``, ``mark``, ``place``, ``record_mark``, ``wait_mark`` and ``told`` are called
by the program's threads, any number at once; they must not block.  What ``prepare`` returns runs
on a worker, where raising fails the lane; so do the actions of ``Lane.in_order``, which must not
raise.  ``until``, ``look`` and ``wait_for`` are called by whoever waits.  No lock of the runtime
is held, but where a method says so.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcore.errors import BackendUnavailableError, KVCoreError, ParamInvalidError
from kvcore.runtime.arguments import refuse
from kvcore.runtime.failures import took_too_long
from kvcore.runtime.memory import Buffer
from kvcore.runtime.queues import _outside as outside
from kvcore.runtime.queues._marks import KIND_CALL, KIND_TIMER, KIND_WORK, Failure, Mark, Waiter
from kvcore.runtime.queues._queue import Queue
from kvcore.runtime.waiting import hold

if TYPE_CHECKING:
    from kvcore.runtime.bell import Waitable
    from kvcore.runtime.core import Core
    from kvcore.runtime.model._clock import ModelClock
    from kvcore.runtime.profile import DeviceProfile

__all__ = [
    "KIND_CALL",
    "KIND_TIMER",
    "KIND_WORK",
    "Driver",
    "External",
    "Failure",
    "FifoLane",
    "Lane",
    "Launch",
    "Mark",
    "Program",
    "Queue",
    "Record",
    "Step",
    "Wait",
    "hold",
]


# ---------------------------------------------------------------- captures


class Launch(NamedTuple):
    """A captured operation.

    branch: 0 for the captured stream, 1, 2, ... for streams that joined.  kind: KIND_WORK
    (``target.run()``), KIND_CALL (``target(*args)``) or KIND_TIMER (``us`` microseconds).
    site: (code, line) of the launch, for reports.
    """

    branch: int
    kind: int
    target: Any
    args: Any
    us: float
    site: Any


class Record(NamedTuple):
    """An event was recorded on the branch; ``number`` is what a ``Wait`` calls it."""

    branch: int
    number: int


class Wait(NamedTuple):
    """The branch waits for a record of the same capture."""

    branch: int
    number: int


class External(NamedTuple):
    """A verb ("record", "wait" or "reset") of an external event."""

    branch: int
    verb: str
    event: Any


Step = Launch | Record | Wait | External


class Program(Protocol):
    """A capture that a driver replays as one operation."""

    def replay(self, queue: Queue) -> None:
        """Queue one replay and return at once; the device's lock is held."""


# ---------------------------------------------------------------- the driver


class Driver(ABC):
    """Memory, work and completion of one device.

    name:         what ``Device.backend`` says.
    device_id:    the device's number among those of the backend.
    buffer_class: what shows memory to a program; a subclass where the host cannot read all of it.
    clock:        the model's time line; None where time is the machine's own.
    core:         what the parts of the device share; set by ``attach``.
    tidies:       whether ``reached`` has something to do.
    """

    name: str
    device_id: int = 0
    buffer_class: type[Buffer] = Buffer
    clock: ModelClock | None = None
    core: Core
    tidies: bool = False

    # -- life

    def accept(self, profile: Any, clock: str) -> str | DeviceProfile | None:
        """Agree to be what a program asks for, or raise; returns the profile to use.

        Called once, first of all, with the arguments as the program gave them; nothing of the
        system may be taken yet.  Raises BackendUnavailableError where there is no such device,
        ParamInvalidError for a profile or a clock that it cannot have.
        """
        if isinstance(clock, str) and clock == "model":
            raise ParamInvalidError(
                f"clock: expected 'wall' on backend {self.name!r}, got 'model', which modelled "
                "devices have",
                argument="clock",
                seen=clock,
                expected="wall",
            )
        found: str | DeviceProfile | None = profile
        return found

    def attach(self, core: Core) -> None:
        """The device is made; nothing of the system may be taken before ``open``."""
        self.core = core

    def open(self) -> None:  # noqa: B027 (not every driver has something to open)
        """The device's block is entered.  Raises KVCoreError, and then has taken nothing."""

    @abstractmethod
    def close(self) -> Sequence[KVCoreError]:
        """Give everything back; returns what went wrong, and raises nothing.

        The workers have ended, every mark is settled and nothing runs.  Memory may outlive this
        call in arrays that a program still has, and then goes with the last of them.
        """

    def forked(self) -> None:  # noqa: B027 (not every driver has threads)
        """This process is a forked child: no thread and no handle of the driver is valid here."""

    # -- memory

    def capacity(self, space: str) -> int | None:
        """Bytes that a space ("device", "host" or "swapped") has; None: no limit of its own."""
        return None

    @abstractmethod
    def take(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """New memory of that space as an array, shape [nbytes], contents undefined.

        Given back by the driver when the last array over it has gone, which may be in any thread.
        Raises MemoryError or DeviceOutOfMemoryError when there is none.
        """

    def refuse(self, argument: str, owner: object) -> None:
        """Raise for memory of a plan that its kernels must not touch; returns when they may.

        Asked about every owner that is not this device's own device or swapped memory.
        Raises ParamInvalidError that names the argument.
        """
        refuse(self.core.key, argument, owner)

    def reached(self) -> None:  # noqa: B027 (not every driver has something to tidy)
        """A host has waited for work: a good moment to free what only that work held.

        Called where ``tidies`` is true.
        """

    # -- work

    @abstractmethod
    def lane(self, queue: Queue) -> Lane | None:
        """The lane of a new stream, whose queue this is; None: workers run its operations."""

    # -- completion

    def until(self, marks: Sequence[Mark], *, timed: bool = True) -> Iterator[Waitable]:
        """What to wait for, one thing after the other, until all of the marks are settled.

        A thing is whatever has ``add(waiter)`` and ``discard(waiter)``, a mark for one.  The
        caller asks for the next one when the last has happened; it may give up at any of them,
        and may ask again for one that has not happened.  timed: see ``Waiting.until``.
        """
        for mark in marks:
            while mark.pending:
                yield mark

    def wait_for(self, mark: Mark, seconds: float | None = None, *, timed: bool = True) -> None:
        """Hold this thread until the mark is settled; StreamError after so many seconds.

        Works in any thread, with and without an event loop.
        """
        end = None if seconds is None else time.monotonic() + seconds
        for thing in self.until((mark,), timed=timed):
            if seconds is not None and end is not None and time.monotonic() >= end:
                raise took_too_long(mark.queue.name, seconds)
            hold(thing, end)

    def look(self, mark: Mark) -> bool:
        """Whether the host, asking now, finds the mark settled; must not wait for work."""
        return not mark.pending

    def give_up(self, mark: Mark, failure: Failure | None) -> None:
        """Nobody will record this external event any more: settle its mark.

        failure: why streams that wait for it fail; None: they are dropped, with the device.
        """
        self.core.executor.give_up(mark, failure)

    # -- time

    def time_of(self, mark: Mark) -> float | None:
        """Microseconds from the device's opening to the mark; None while it is pending."""
        return None if mark.pending else self.core.since_opening(mark.time)

    def elapsed(self, start: Mark, end: Mark) -> float:
        """Milliseconds from one settled mark to another; both were placed with ``timing``.

        Raises StreamError that names "event" (start) or "other" (end) where there is no time.
        """
        return ((self.time_of(end) or 0.0) - (self.time_of(start) or 0.0)) / 1e3

    # -- captures

    def begin_capture(self) -> None:  # noqa: B027 (most drivers have nothing to prepare)
        """A capture begins.  Raises BackendUnavailableError when the device has none."""

    def capture(self, steps: Sequence[Step], queues: Sequence[Queue]) -> Program | None:
        """Make a program of a capture that has ended well; None: the runtime replays its steps.

        queues: by branch.  Raises CaptureError when the driver cannot.  The program must not
        need the queues, but for ``queues[i].lane``; it keeps what it uses.
        """
        return None


# ---------------------------------------------------------------- lanes


class Lane(ABC):
    """What a stream is to a driver that has queues of its own.

    ``FifoLane`` has everything for a driver whose lane takes functions and runs them in order.
    """

    def __init__(self, driver: Driver, queue: Queue) -> None:
        self.driver = driver
        self.queue = queue
        self._steps: list[Mark] = []

    @property
    def name(self) -> str:
        """The stream's name."""
        return self.queue.name

    # -- operations

    def check(self, kind: int, target: Any) -> None:
        """Refuse an operation that this device cannot do; raises KVCoreError.

        Called before an operation is queued or captured (``queue.capture`` is then not None).
        """
        if kind == KIND_TIMER:
            raise BackendUnavailableError(
                f"compute: expected a plan to launch on backend {self.driver.name!r}, got work "
                "that only takes time, which modelled devices have",
                argument="us",
                seen=str(target),
            )

    def check_external(self, verb: str) -> None:  # noqa: B027 (most lanes have nothing against it)
        """Refuse a verb of an external event inside a capture; raises CaptureError."""

    @abstractmethod
    def prepare(self, kind: int, target: Any, args: Any, us: float) -> tuple[Any, Mark | None]:
        """(what to queue, a mark or None) for an operation that is being launched.

        What is queued has ``run()`` (KIND_WORK) or can be called (KIND_CALL), by a worker, to
        hand the operation over; it answers for ``name``, ``reads``, ``writes``, ``touched`` and
        ``bytes_moved`` as the target does.  With a mark, nothing behind the operation is handed
        over before that is settled, and a failure of the mark is one of the stream.
        """

    # -- order

    def mark(self) -> Mark:
        """A mark behind everything launched here so far."""
        return self.place(False)

    def place(self, timing: bool) -> Mark:
        """A new mark behind everything launched here; timing: whether its time may be asked."""
        mark = outside.promise(self.queue)
        self.record_mark(mark)
        return mark

    @abstractmethod
    def record_mark(self, mark: Mark) -> None:
        """Place a mark behind everything launched here; others may wait for it already."""

    @abstractmethod
    def wait_mark(self, mark: Mark) -> None:
        """Begin nothing that is launched from here on before the mark is settled.

        A failed mark fails the lane.  The mark may be of any lane of the device, or of none yet.
        """

    def told(self, failure: Failure | None) -> bool:
        """A host was told of the failure of a mark: the stream is usable again.

        False when this stream had no failure left to tell, or another one.
        """
        return self.queue.usable_again(failure)

    # -- state

    @property
    @abstractmethod
    def idle(self) -> bool:
        """True when nothing is queued and the lane is known to have nothing left."""

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """Operations that the lane has and that are not known to be over."""

    # -- for lanes: turns in the queue

    @property
    def rests(self) -> bool:
        """True when all that was launched has been handed over."""
        # A queue counts as idle while it is telling of its last record; what is told here is
        # part of the work.
        return self.queue.rests and not self._steps

    def in_order(self, action: Callable[[Mark], Callable[[], object]]) -> None:
        """Call action(step) when all launched so far was handed over: at once, or on a worker.

        ``step.failure`` is the queue's failure by then, ``step.dropped`` that the device is left.
        What the action returns is called when the queue may be asked again.  Neither may raise.
        """
        executor = self.queue.executor
        step = outside.promise(self.queue)
        if self.rests:
            outside.settle(executor, step, self.queue.failure)
            action(step)()
        else:
            self._steps.append(step)
            step.add(Waiter(partial(self._act, action, step)))
            outside.place(executor, self.queue, step)

    def _act(self, action: Callable[[Mark], Callable[[], object]], step: Mark) -> None:
        tell = action(step)
        self._steps.pop()
        tell()

    def record_in_order(self, mark: Mark, action: Callable[[Mark], Callable[[], object]]) -> None:
        """``in_order`` for a record of this lane, which the race check hears of."""
        queue = self.queue
        outside.owned(mark, queue)
        observer = queue.executor.observer
        if observer is None:
            self.in_order(action)
        else:
            with queue.executor.lock:
                observer.marked(queue, mark)
                self.in_order(action)

    def wait_in_order(self, mark: Mark, wait: Callable[[Mark], None]) -> None:
        """Call wait(mark) now; the race check hears of it."""
        queue = self.queue
        observer = queue.executor.observer
        if observer is None:
            wait(mark)
        else:
            with queue.executor.lock:
                observer.waited(queue, mark)
                wait(mark)

    def hold_until(self, mark: Mark) -> None:
        """Hand nothing over that is launched from here on before the mark is settled."""
        outside.hold(self.queue.executor, self.queue, mark)


class FifoLane(Lane):
    """A lane that takes functions and calls them in order, one at a time, in a thread of its own.

    A driver implements ``submit``; failures, marks and host functions follow from that.
    """

    def __init__(self, driver: Driver, queue: Queue) -> None:
        super().__init__(driver, queue)
        #: Failures so far: what was launched before one is not begun behind it.
        self.losses = 0
        self._last: Failure | None = None
        self._in_flight = 0
        self._marks_in_flight = 0

    @abstractmethod
    def submit(self, act: Callable[[], object]) -> None:
        """Call act() behind everything that was submitted before; act never raises.

        Called by a worker, or by the program's thread; must not block.
        """

    def prepare(self, kind: int, target: Any, args: Any, us: float) -> tuple[Any, Mark | None]:
        """An operation that submits itself; host functions hold the queue until they are over."""
        handed = _Handed(self, kind, target, args)
        return handed, handed.done

    def record_mark(self, mark: Mark) -> None:
        """Settle the mark when everything launched before it is over."""
        self.record_in_order(mark, partial(self._record, mark, self.losses))

    def _record(self, mark: Mark, losses: int, step: Mark) -> Callable[[], object]:
        executor = self.queue.executor
        if step.dropped:
            return partial(outside.settle, executor, mark, None, dropped=True)
        reach = partial(self._reach, mark, losses, step.failure)
        if not self._in_flight and not self._marks_in_flight:
            return reach
        self.begun(0, marks=1)
        self.submit(partial(self._pass, reach))
        return _nothing

    def _pass(self, reach: Callable[[], None]) -> None:
        reach()
        self.begun(0, marks=-1)

    def _reach(self, mark: Mark, losses: int, failure: Failure | None) -> None:
        if losses != self.losses:
            failure = failure or self._last
        outside.settle(self.queue.executor, mark, failure)

    def wait_mark(self, mark: Mark) -> None:
        """Hand nothing over before the mark is settled."""
        if mark.pending or mark.failed:
            self.wait_in_order(mark, self.hold_until)
        else:
            self.wait_in_order(mark, _ignore)

    def lose(self, failure: Failure) -> None:
        """An operation has failed: nothing of what was launched by now is begun."""
        self._last = failure
        self.losses += 1
        outside.fail(self.queue.executor, self.queue, failure)

    def loss_since(self, losses: int) -> Failure | None:
        """The last failure, when there was one since."""
        return None if losses == self.losses else self._last

    @property
    def idle(self) -> bool:
        """True when nothing is queued and nothing runs."""
        return self.rests and not self._in_flight

    @property
    def num_in_flight(self) -> int:
        """Operations that were submitted and are not over."""
        return self._in_flight

    def begun(self, operations: int, marks: int = 0) -> None:
        """So many operations and marks more (or fewer, below 0) are in flight."""
        with self.queue.executor.lock:
            self._in_flight += operations
            self._marks_in_flight += marks


class _Handed:
    """An operation of a FifoLane, from its launch to its end."""

    def __init__(self, lane: FifoLane, kind: int, target: Any, args: Any) -> None:
        self._lane = lane
        self._target = target
        self._args = args
        self._losses = lane.losses
        self._act = partial(target, *args) if kind == KIND_CALL else target.run
        self._calling: Any = None
        self.done = outside.promise(lane.queue) if kind == KIND_CALL else None

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._target, attribute)  # name, reads, writes, touched, ...

    def run(self) -> None:
        """Hand over; called by a worker when the queue has come to this."""
        self._calling = self._lane.queue.executor.calling()
        self._lane.begun(1)
        self._lane.submit(self._begin)

    __call__ = run

    def _begin(self) -> None:
        lane, executor = self._lane, self._lane.queue.executor
        failure = lane.loss_since(self._losses)
        if failure is None:
            outside.enter(executor, self._calling)
            try:
                self._act()
            except BaseException as error:  # whatever it is, it is the stream's failure
                name = getattr(self._target, "name", None) or getattr(
                    self._target, "__qualname__", type(self._target).__name__
                )
                failure = Failure(error, lane.name, str(name))
                lane.lose(failure)
            finally:
                outside.leave(executor)
        lane.begun(-1)
        if self.done is not None:
            outside.settle(executor, self.done, failure)


def _nothing() -> None:
    """Nobody is to be told."""


def _ignore(mark: Mark) -> None:
    """The mark was reached: there is nothing to wait for."""
