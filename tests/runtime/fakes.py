# SPDX-License-Identifier: Apache-2.0
"""Plans that tests make: the protocol of real ones, and nothing of operators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import kvcore
from kvcore.runtime.accesses import ranges_of
from kvcore.runtime.memory import Buffer


class Access:
    def __init__(self, argument: str, owner: object, ranges: npt.NDArray[np.int64]) -> None:
        self.argument = argument
        self.owner = owner
        self.ranges = ranges


def array(x: Any) -> npt.NDArray[Any]:
    return x.__kvcore_array__ if isinstance(x, Buffer) else x


class FakePlan:
    """Calls a function when it runs; touches the whole of what it is given."""

    workspace_size = 0

    def __init__(
        self,
        action: Callable[[], object] | None = None,
        *,
        reads: Sequence[Any] = (),
        writes: Sequence[Any] = (),
        name: str = "plan",
        num_descriptors: int = 1,
    ) -> None:
        self.action = action
        self.name = name
        self.runs = 0
        self.reads = tuple(Access(f"in{i}", x, ranges_of(array(x))) for i, x in enumerate(reads))
        self.writes = tuple(Access(f"out{i}", x, ranges_of(array(x))) for i, x in enumerate(writes))
        self.num_descriptors = num_descriptors
        self.bytes_moved = sum(int(np.diff(a.ranges).sum()) for a in self.writes)

    def run(self) -> None:
        self.runs += 1
        if self.action is not None:
            self.action()

    def touched(self) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        return self.reads, self.writes


class Scatter:
    """cache[slots[i]] = rows[i], slots of -1 skipped; reads its slots when it runs.

    Reports the rows of the last run, as real plans do.
    """

    name = "scatter"
    workspace_size = 0

    def __init__(self, rows: Any, cache: Any, slots: npt.NDArray[np.int64]) -> None:
        self.rows, self.cache, self.slots = array(rows), array(cache), slots
        self.row_bytes = self.cache[0].nbytes
        self.reads = (Access("rows", rows, ranges_of(self.rows)),)
        self.writes = (Access("cache", cache, ranges_of(self.cache)),)
        self._cache = cache
        self._last: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)
        self.num_descriptors = 0
        self.bytes_moved = 0

    def run(self) -> None:
        slots = self.slots.copy()
        if slots.max(initial=-1) >= len(self.cache):
            raise kvcore.SlotRangeError(f"slot_mapping: expected slot < {len(self.cache)}")
        for i, slot in enumerate(slots):
            if slot >= 0:
                self.cache[slot] = self.rows[i]
        used = np.unique(slots[slots >= 0])
        starts = self.cache.ctypes.data + used * self.row_bytes
        self._last = np.stack([starts, starts + self.row_bytes], axis=1)
        self.num_descriptors = len(used)
        self.bytes_moved = len(used) * self.row_bytes

    def touched(self) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        return self.reads, (Access("cache", self._cache, self._last),)


class Gate:
    """Holds a stream at a host function until it is opened."""

    def __init__(self, stream: Any) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        stream.call(self._wait)

    def _wait(self) -> None:
        self.entered.set()
        assert self._open.wait(50)

    def open(self) -> None:
        self._open.set()


class Hold:
    """Holds a stream at a host function until what was queued behind it has been dropped."""

    def __init__(self, stream: Any) -> None:
        self.entered = threading.Event()
        self.held = True
        self._stream = stream
        self._armed = threading.Event()
        self._event: Any = None
        stream.call(self._wait)

    def until_dropped(self) -> None:
        """Everything is queued: from here on, let go when this record is dropped."""
        self._event = self._stream.record_event()
        self._armed.set()

    def _wait(self) -> None:
        self.entered.set()
        assert self._armed.wait(50)
        pause = threading.Event()
        for _ in range(50_000):
            if not self._event.mark.pending:
                self.held = False
                return
            pause.wait(0.001)
        raise AssertionError("nothing was dropped")


def device(clock: str = "wall", **options: Any) -> kvcore.Device:
    """A device on that clock; the wall one without a profile, so that plans may use any array."""
    profile = options.pop("profile", "A3" if clock == "model" else None)
    return kvcore.Device(profile, clock=clock, **options)
