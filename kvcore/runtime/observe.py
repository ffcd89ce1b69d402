# SPDX-License-Identifier: Apache-2.0
"""What a device tells of its operations to the race check, the model clock and the trace.

A device that has none of them has no observer at all, so the launch path pays nothing.  The
first three calls come from the host with the device's lock held and give each operation a
``Note``; the others come from the workers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.runtime._marks import Mark, Op
    from kvcore.runtime._queue import Queue
    from kvcore.runtime.clock import ModelClock, Node
    from kvcore.runtime.device import Device
    from kvcore.runtime.race import RaceCheck
    from kvcore.runtime.trace import Trace

__all__ = ["Note", "Observer", "Site", "call_site"]

_HERE = str(Path(__file__).parent)
#: A place in the caller's program: its code and the line.
Site = tuple[CodeType, int]


def call_site() -> Site | None:
    """Where the caller's program stands: the nearest frame outside this package's runtime."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lineno)


class Note:
    """What is known of one operation: where it was launched and its place in every clock."""

    __slots__ = ("checksums", "count", "host", "lane", "late", "node", "site", "vector")

    def __init__(self, site: Site | None) -> None:
        self.site = site
        self.node: Node | None = None
        self.vector: Any = None
        self.late: Any = ()
        self.lane = 0
        self.count = 0
        self.host = 0
        self.checksums: Any = None


class Observer:
    """Passes on what happens; made only for a device that wants to know."""

    def __init__(
        self,
        device: Device,
        race: RaceCheck | None,
        clock: ModelClock | None,
        trace: Trace | None,
    ) -> None:
        self._device = device
        self._race = race
        self._clock = clock
        self._trace = trace
        self._wall_trace = trace if clock is None else None
        self._lock = device._lock

    # -- from the host, the device's lock held

    def launched(self, queue: Queue, op: Op) -> None:
        """An operation is about to be queued."""
        # a graph's operations bring the place where they were captured
        site = op.note
        if site is None and self._race is not None:
            site = call_site()
        note = op.note = Note(site)
        if self._race is not None:
            self._race.launched(queue.index, note, op)
        if self._clock is not None:
            note.node = self._clock.launched(queue, op)

    def marked(self, queue: Queue, mark: Mark) -> None:
        """A record is about to be queued."""
        if self._race is not None:
            mark.note = self._race.marked(queue.index)
        if self._clock is not None:
            if mark.position is None:
                mark.position = self._clock.marked(queue)
            else:
                self._clock.kept(queue, mark.position)

    def waited(self, queue: Queue, mark: Mark) -> None:
        """A wait for the mark is about to be queued."""
        if self._race is not None:
            if mark.note is None:
                self._race.promised(queue.index, mark)
            else:
                self._race.waited(queue.index, mark.note)
        if self._clock is not None:
            if mark.position is None:
                mark.position = self._clock.promise()
            self._clock.waited(queue, mark.position)
        if self._trace is not None:
            self._trace.waited(queue, mark)

    def event_call(self) -> None:
        """The host calls record or wait."""
        if self._clock is not None:
            with self._lock:
                self._clock.event_call()

    def waited_for_nothing(self, queue: Queue) -> None:
        """A wait for an event that was never recorded."""
        if self._race is not None:
            self._race.remark(
                f"stream {queue.name!r} waits for an event that was never recorded", call_site()
            )

    # -- from the workers

    def starting(self, queue: Queue, op: Op) -> None:
        """An operation is about to run."""
        if self._race is not None:
            self._race.starting(queue, op)

    def ran(self, queue: Queue, op: Op) -> None:
        """An operation has run."""
        with self._lock:
            if self._race is not None:
                self._race.ran(queue, op)
            if self._clock is not None:
                self._clock.ran(op.note.node, op)
            if self._wall_trace is not None:
                self._wall_trace.ran(queue, op)

    def skipped(self, queue: Queue, op: Op) -> None:
        """An operation failed, or will not run."""
        with self._lock:
            if self._race is not None:
                self._race.skipped(op)
            if self._clock is not None:
                self._clock.skipped(op.note.node, op)
