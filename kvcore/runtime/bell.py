# SPDX-License-Identifier: Apache-2.0
"""Waking tasks from a worker, without ever waiting for their event loop.

Handing a wake-up to a loop with ``from_thread.run_sync`` would hold the worker until the loop's
thread runs again, which is never while that thread is blocked.  So a worker only marks the
waiter as rung and, if no other has been since the loop last looked, writes one byte into a socket
pair that the loop watches.  One byte is enough, however many waiters are rung before it looks.

There is no task in the background.  Of the tasks that wait, one (the leader) watches the socket
and wakes the others; when it leaves, for whatever reason, another one takes its place.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Protocol

import anyio
import anyio.lowlevel

from kvcore.runtime.queues._marks import Waiter

__all__ = ["Bell", "Waitable"]


class Waitable(Protocol):
    """What can be waited for: a mark, or an operation of the model clock."""

    def add(self, waiter: Waiter, /) -> bool:
        """Tell this waiter when it happens; False when it has happened."""
        ...

    def discard(self, waiter: Waiter, /) -> None:
        """Take the waiter off the list: it is not rung any more."""
        ...


class _Seat:
    __slots__ = ("event", "waiter")

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.event = anyio.Event()


class Bell:
    """The wake-ups of one device for one event loop."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._rung = False
        self._led = False
        self._closing = False
        self._seats: dict[int, _Seat] = {}

    def ring(self) -> None:
        """Make the loop look; from any thread, never waits."""
        if not self._rung:
            self._rung = True
            # A full pipe means bytes the loop has yet to read; a closed one, no loop.
            with contextlib.suppress(OSError):
                self._writer.send(b"\0")

    @property
    def num_waiting(self) -> int:
        """Tasks of this loop that wait at the moment."""
        return len(self._seats)

    def _look(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        # Only now: a ring that came before this line wrote no byte, but its waiter is marked and
        # is found below; one that comes after it writes a byte.
        self._rung = False
        for seat in self._seats.values():
            if seat.waiter.fired:
                seat.event.set()

    async def wait(self, thing: Waitable) -> None:
        """Wait until it has happened; always a checkpoint, and cancelling stops the waiting."""
        waiter = Waiter(self.ring)
        if not thing.add(waiter):
            await anyio.lowlevel.checkpoint()
            return
        seat = _Seat(waiter)
        self._seats[id(seat)] = seat
        try:
            while not waiter.fired:
                if self._led:
                    await seat.event.wait()
                    if not waiter.fired:  # called to lead
                        seat.event = anyio.Event()
                    continue
                self._led = True
                try:
                    await anyio.wait_readable(self._reader)
                finally:
                    self._led = False
                self._look()
        finally:
            del self._seats[id(seat)]
            thing.discard(waiter)
            if not self._led:
                for other in self._seats.values():
                    # (a loop that was closed can wake no task)
                    with contextlib.suppress(RuntimeError):
                        other.event.set()
                    break
            if self._closing and not self._seats:
                self._shut()

    def close(self) -> None:
        """Give the sockets back, once the last waiter has left."""
        self._closing = True
        if not self._seats:
            self._shut()

    def abandon(self) -> None:
        """In a forked child: the tasks that waited are not here."""
        self._seats.clear()
        self._shut()

    def __del__(self) -> None:
        # Its loop has ended; a ring from now on finds a closed pipe.
        with contextlib.suppress(AttributeError):
            self._shut()

    def _shut(self) -> None:
        self._reader.close()
        self._writer.close()
