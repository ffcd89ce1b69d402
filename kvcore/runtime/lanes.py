# SPDX-License-Identifier: Apache-2.0
"""What a stream is to a driver with queues of its own; ``abc`` says what lanes owe their device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kvcore.errors import BackendUnavailableError
from kvcore.runtime.queues import _outside as outside
from kvcore.runtime.queues._marks import KIND_CALL, KIND_TIMER, Failure, Mark, Waiter
from kvcore.runtime.queues._queue import Queue

__all__ = ["FifoLane", "Lane"]


class LaneDriver(Protocol):
    """What a lane uses of its driver, which is a ``kvcore.runtime.abc.Driver``."""

    name: str


class Lane(ABC):
    """What a stream is to a driver that has queues of its own.

    ``FifoLane`` has everything for a driver whose lane takes functions and runs them in order.
    """

    def __init__(self, driver: LaneDriver, queue: Queue) -> None:
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
        """The failure of a mark was reported to a host: the stream is usable again.

        False when this stream had no failure left to report, or another one.
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
        # A queue counts as idle while it wakes those who wait for its last record; what they call
        # here is part of the work.
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
        """Do what ``in_order`` does, for a record of this lane, which the race check observes."""
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
        """Call wait(mark) now, as a wait that the race check observes."""
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

    def __init__(self, driver: LaneDriver, queue: Queue) -> None:
        super().__init__(driver, queue)
        #: Failures so far: what was launched before one is not begun behind it.
        self.losses: int = 0
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
    """Wake no one: there is nothing to report."""


def _ignore(mark: Mark) -> None:
    """The mark was reached: there is nothing to wait for."""
