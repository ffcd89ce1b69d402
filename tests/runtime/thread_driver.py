# SPDX-License-Identifier: Apache-2.0
"""A driver in memory, written from the text of ``kvcore.runtime.abc`` alone.

Each stream is a thread that takes functions and calls them; each space is plain memory of a
limited number of bytes, counted by what is alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import KVCoreError, StreamError
from kvcore.runtime.abc import Driver, FifoLane, Lane, Queue

__all__ = ["ThreadDriver"]


class ThreadLane(FifoLane):
    """A thread that calls what it was given, in order."""

    def __init__(self, driver: Driver, queue: Queue) -> None:
        super().__init__(driver, queue)
        self._acts: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kvcore-lane-{queue.name}")
        self._thread.start()

    def submit(self, act: Callable[[], object]) -> None:
        self._acts.put(act)

    def _run(self) -> None:
        while (act := self._acts.get()) is not None:
            act()
            act = None  # it holds what the operation worked on

    def end(self) -> None:
        self._acts.put(None)
        self._thread.join()


class ThreadDriver(Driver):
    """This machine's memory, and a thread a stream."""

    name = "threads"

    def __init__(self, capacity_bytes: int = 1 << 26) -> None:
        self._capacity = capacity_bytes
        self._lanes: list[ThreadLane] = []
        #: Bytes that were taken and have not gone, by space.
        self.alive = {"device": 0, "host": 0, "swapped": 0}
        self.opened = self.closed = 0

    def open(self) -> None:
        self.opened += 1

    def close(self) -> Sequence[KVCoreError]:
        self.closed += 1
        for lane in self._lanes:
            lane.end()
        return [] if self.closed == 1 else [StreamError("closed twice", argument="device")]

    def capacity(self, space: str) -> int | None:
        return self._capacity if space == "device" else None

    def take(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        found = np.full(nbytes, 0xAA, np.uint8)
        self.alive[space] += nbytes
        weakref.finalize(found, self._gone, space, nbytes).atexit = False
        return found

    def _gone(self, space: str, nbytes: int) -> None:
        self.alive[space] -= nbytes

    def lane(self, queue: Queue) -> Lane:
        lane: Any = ThreadLane(self, queue)
        self._lanes.append(lane)
        return lane
