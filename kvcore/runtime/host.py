# SPDX-License-Identifier: Apache-2.0
"""How hosts wait for a device: tasks, threads, and the model's time line.

Tasks wait with a ``Bell`` of their event loop; threads wait on a lock.  Neither is ever waited
for by a worker.  On the model clock a synchronise waits twice: for the bytes (a mark), and then
until the costs are known that the model needs to say when that was (nodes of the model).
"""

from __future__ import annotations

import weakref
from _thread import allocate_lock
from collections.abc import Sequence

import anyio.lowlevel

from kvcore.runtime._clock import ModelClock
from kvcore.runtime._marks import Mark, Waiter
from kvcore.runtime.bell import Bell, Waitable

__all__ = ["Host", "block"]

#: The bells of the event loop that runs, by host; goes with the loop.
_BELLS: anyio.lowlevel.RunVar[weakref.WeakKeyDictionary[Host, Bell]] = anyio.lowlevel.RunVar(
    "kvcore_bells"
)


class Host:
    """The host's side of one device, whatever tasks and threads it has."""

    def __init__(self, clock: ModelClock | None) -> None:
        self._clock = clock
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

    async def wait(self, mark: Mark | None) -> None:
        """Wait for a mark, and for the model to reach it; always a checkpoint."""
        if mark is None or not mark.pending:
            await anyio.lowlevel.checkpoint()
        else:
            await self._bell().wait(mark)
        if mark is not None and self._clock is not None:
            while (node := self._clock.reach(mark.position)) is not None:
                await self._bell().wait(node)

    async def wait_all(self, marks: Sequence[Mark]) -> None:
        """Wait for all of them; always a checkpoint."""
        await anyio.lowlevel.checkpoint()
        for mark in marks:
            await self.wait(mark)

    async def wait_for_bytes(self, mark: Mark) -> None:
        """Wait for a mark alone."""
        if mark.pending:
            await self._bell().wait(mark)

    async def wait_for(self, thing: Waitable) -> None:
        """Wait for anything that tells; always a checkpoint."""
        await self._bell().wait(thing)

    def wait_blocking(self, mark: Mark) -> None:
        """``wait``, holding this thread."""
        block(mark)
        if self._clock is not None:
            while (node := self._clock.reach(mark.position)) is not None:
                block(node)

    def block_for_bytes(self, mark: Mark) -> None:
        """``wait_for_bytes``, holding this thread."""
        block(mark)

    def finds(self, mark: Mark) -> bool:
        """Whether the host, asking now, finds the mark reached."""
        clock = self._clock
        if clock is None:
            return not mark.pending
        reached, node = clock.look(mark.position, charge=True)
        # A host function takes as long as it takes; the model waits for plans and copies only.
        while node is not None and not clock.calls_under_way:
            block(node)
            reached, node = clock.look(mark.position, charge=False)
        if reached and mark.pending and not clock.calls_under_way:
            block(mark)
        return reached and not mark.pending

    def close(self) -> None:
        """Nobody is told of anything any more."""
        for bell in list(self._bells):
            bell.close()

    def abandon(self) -> None:
        """In a forked child: the tasks that waited are not here."""
        for bell in list(self._bells):
            bell.abandon()
        self._bells.clear()


def block(thing: Waitable) -> None:
    """Hold this thread until it has happened."""
    lock = allocate_lock()
    lock.acquire()
    waiter = Waiter(lock.release)
    if thing.add(waiter):
        try:
            lock.acquire()
        finally:
            thing.discard(waiter)
