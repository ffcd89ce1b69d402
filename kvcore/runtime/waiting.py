# SPDX-License-Identifier: Apache-2.0
"""How hosts wait for a device: one way for tasks, one for threads.

Tasks wait with a ``Bell`` of their event loop; threads wait on a lock (``hold``).  Neither is
ever waited for by a worker.  What has to happen, one thing after the other, until marks are
reached is the driver's knowledge (``Driver.until``): a mark may be all; the model's clock has to
learn the costs of work as well; hardware has to be asked again whenever something rings.
"""

from __future__ import annotations

import time
import weakref
from _thread import allocate_lock
from collections.abc import Iterable, Sequence
from typing import Protocol

import anyio.lowlevel

from kvcore.runtime.bell import Bell, Waitable
from kvcore.runtime.queues._marks import Mark, Waiter

__all__ = ["Waiting", "hold"]

#: The bells of the event loop that runs, by device; goes with the loop.
_BELLS: anyio.lowlevel.RunVar[weakref.WeakKeyDictionary[Waiting, Bell]] = anyio.lowlevel.RunVar(
    "kvcore_bells"
)


class Completion(Protocol):
    """What is needed of a driver to wait for marks; ``kvcore.runtime.abc.Driver`` has more."""

    def until(self, marks: Sequence[Mark], *, timed: bool = True) -> Iterable[Waitable]:
        """What to wait for, one thing after the other, until all of the marks are reached."""


class Waiting:
    """The tasks of any number of event loops that wait for one device."""

    def __init__(self, driver: Completion) -> None:
        self._driver = driver
        # weakly: a bell goes with its loop, of which one device may see any number
        self._bells: weakref.WeakSet[Bell] = weakref.WeakSet()

    def _bell(self) -> Bell:
        try:
            bells = _BELLS.get()
        except LookupError:
            bells = weakref.WeakKeyDictionary()
            _BELLS.set(bells)
        bell = bells.get(self)
        if bell is None:
            bell = bells[self] = Bell()
            self._bells.add(bell)
        return bell

    async def until(self, marks: Sequence[Mark], *, timed: bool = True) -> None:
        """Wait until all of the marks are reached; always a checkpoint.

        timed: False for a caller that only wants to know that the bytes have moved: then the
        model's time does not matter.
        """
        waited = False
        for thing in self._driver.until(marks, timed=timed):
            waited = True
            await self._bell().wait(thing)
        if not waited:
            await anyio.lowlevel.checkpoint()

    async def happened(self, thing: Waitable) -> None:
        """Wait for anything that has waiters; always a checkpoint."""
        await self._bell().wait(thing)

    @property
    def num_waiting(self) -> int:
        """Tasks that wait for this device at the moment."""
        return sum(bell.num_waiting for bell in list(self._bells))

    @property
    def num_loops(self) -> int:
        """Event loops from which tasks have waited and that are still there."""
        return len(self._bells)

    def close(self) -> None:
        """Give every bell's sockets back, once no task waits with it."""
        for bell in list(self._bells):
            bell.close()

    def abandon(self) -> None:
        """Forget the tasks that waited, which a forked child does not have."""
        for bell in list(self._bells):
            bell.abandon()
        self._bells.clear()


def hold(thing: Waitable, end: float | None = None) -> None:
    """Hold this thread until it has happened, or until ``end`` on ``time.monotonic``'s clock."""
    lock = allocate_lock()
    lock.acquire()
    waiter = Waiter(lock.release)
    if thing.add(waiter):
        try:
            lock.acquire(True, -1 if end is None else max(0.0, end - time.monotonic()))
        finally:
            thing.discard(waiter)
