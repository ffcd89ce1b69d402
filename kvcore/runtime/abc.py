# SPDX-License-Identifier: Apache-2.0
"""What a device needs of a driver: the contract between the runtime and what does the work.

``Device`` has what a program calls; a ``Driver`` says where bytes are, who does the work and when
it is done.  ``Device(backend=driver)`` takes an object of a class of one's own, and
``kvcore.runtime.driver.DRIVERS`` names classes by text.  A driver belongs to one device.

Who does what
-------------
The runtime keeps, for every driver: one *queue* a stream, with what was launched and has not been
begun; the threads (*workers*) that take operations from it, in order; what failed and to which
host that was reported; captures, the race check, the trace; tasks that wait.

A driver whose work is done by the workers themselves, as the model's is, gives no lanes
(``Driver.lane`` returns None): an operation is over when a worker has run it.  A driver with
queues of its own gives each stream a *lane*.  Then a worker does not run an operation but hands it
over to the lane and goes on; the driver says when a mark is reached.  ``Lane`` and ``FifoLane``,
which has all but the thread, are imported here from ``lanes``.

Order
-----
Everything on one lane is begun in the order it was launched, and each operation begins when the
one before it is over.  Lanes owe each other nothing but what ``wait_mark`` says.

Marks
-----
A *mark* is one record of an event, and is settled once: reached, failed (with the failure of the
work before it) or dropped (the device was left before its turn came).  ``Mark.pending`` is true
until then, ``Mark.add(waiter)`` has a waiter rung then.  ``settle`` settles one, from any thread.

Failure
-------
An operation that raises fails its lane: nothing behind it is begun, marks behind it fail with the
same ``Failure``, until it was reported to a host (``told``).  What had been launched by then is
still not begun; what is launched from then on is.

Threads
-------
``check``, ``prepare``, ``mark``, ``place``, ``record_mark``, ``wait_mark`` and ``told`` are called
by the program's threads, any number at once; they must not block.  What ``prepare`` returns runs on
a worker, where raising fails the lane; so do the actions of ``Lane.in_order``, which must not
raise.  ``until``, ``look`` and ``wait_for`` are called by the thread or task that waits.  No lock
of the runtime is held, but where a method says so.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcore.errors import KVCoreError, ParamInvalidError
from kvcore.runtime.arguments import refuse
from kvcore.runtime.failures import took_too_long
from kvcore.runtime.lanes import FifoLane, Lane
from kvcore.runtime.memory import Buffer
from kvcore.runtime.queues._marks import KIND_CALL, KIND_TIMER, KIND_WORK, Failure, Mark
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
        """A host has waited for work, so memory that only that work held can be freed now.

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
