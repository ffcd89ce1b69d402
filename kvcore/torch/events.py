# SPDX-License-Identifier: Apache-2.0
"""Events in torch_npu's words: ordinary ones, and external ones that are waited for first.

A stream may wait for an external event before anybody has recorded it.  The runtime knows nothing
of such waits, so what comes behind one on that stream (calls, records, waits) is kept here and put
on the stream when the record is made; the order that the runtime then sees is the real one, for
its race check too.  In a graph the wait is a host function that holds its worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvcore.errors import StreamError
from kvcore.torch.streams import active, the_stream

if TYPE_CHECKING:
    from kvcore.runtime import Event as RuntimeEvent
    from kvcore.runtime import Stream as RuntimeStream
    from kvcore.torch.streams import Stream

__all__ = ["Event", "ExternalEvent", "Record"]

#: A replayed graph waits no longer for an event; a device that is left ends the wait at once.
WAIT_LIMIT_S = 60.0
LOOK_EVERY_S = 0.05


class Record:
    """One record of an event, which may be made later; streams that wait for it are held."""

    def __init__(self, raw: RuntimeEvent) -> None:
        self.raw = raw
        self.made = False
        self.waiting: list[Stream] = []

    def make(self, stream: RuntimeStream) -> None:
        """Record behind what the stream has now, and let go of those who wait."""
        self.raw.record(stream)
        self.made = True
        waiting, self.waiting = self.waiting, []
        for held in waiting:
            held._go_on(self)


class Event:
    """An event; blocking and interprocess are accepted and mean nothing."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.streams = active()
        self._options = {"blocking": bool(blocking), "enable_timing": bool(enable_timing)}
        self.raw: RuntimeEvent = self.streams.device.event(**self._options)
        self._record: Record | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record behind what the stream (the current one by default) has."""
        found = the_stream(stream, self.streams)
        if self._record is not None and not self._record.made:  # others may wait for that one
            self.raw = self.streams.device.event(**self._options)
        self._record = None
        if found.held:
            self._record = Record(self.raw)
            found._do(partial(self._record.make, found.raw))
        else:
            self.raw.record(found.raw)

    def wait(self, stream: Stream | None = None) -> None:
        """Order what comes on the stream (the current one by default) behind the last record."""
        found = the_stream(stream, self.streams)
        if self._record is None and not found.held:
            self.raw.wait(found.raw)
            return
        record = self._record
        if record is None:
            record = Record(self.raw)
            record.made = True
        found._wait_for(record)

    def query(self) -> bool:
        """Whether the last record was reached."""
        return self._made and self.raw.query()

    def synchronize(self) -> None:
        """Wait for the last record."""
        if not self._made:
            raise StreamError(
                "event: expected one recorded on a stream that goes on, got one on a stream that "
                "waits for an ExternalEvent; record that first",
                argument="event",
            )
        self.raw.synchronize_blocking()

    @property
    def _made(self) -> bool:
        return self._record is None or self._record.made

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds to another event."""
        return self.raw.elapsed_time(getattr(end_event, "raw", end_event))

    def __repr__(self) -> str:
        return f"<npu.Event {self.raw!r}>"


class ExternalEvent:
    """An event for graphs, which others record: ``wait`` may come before ``record``.

    A flag: record raises it, reset lowers it, and both happen in stream order.  What comes on a
    stream behind a wait for a lowered flag runs once it is raised.  In a capture, wait, reset and
    record become part of the graph; a replay that reaches a wait holds there, for a minute at most
    and with one worker of the device.
    """

    def __init__(self) -> None:
        self.streams = active()
        self._record = Record(self.streams.device.event())
        self._flag = threading.Condition()
        self._raised = False

    def record(self, stream: Stream | None = None) -> None:
        """Record behind what the stream (the current one by default) has."""
        found = the_stream(stream, self.streams)
        if found.raw.is_capturing:
            found.raw.call(self._raise)
        else:
            found._do(lambda: self._make(found))

    def _make(self, stream: Stream) -> None:
        if self._record.made:
            self._record = Record(self.streams.device.event())
        self._in_order(stream, self._raise)
        self._record.make(stream.raw)

    def wait(self, stream: Stream | None = None) -> None:
        """Hold the stream (the current one by default) until the event is recorded."""
        found = the_stream(stream, self.streams)
        if found.raw.is_capturing:
            found.raw.call(self._reach)
        else:
            found._do(lambda: found._wait_for(self._record))

    def reset(self, stream: Stream | None = None) -> None:
        """Take the record back: whoever waits from here on waits for the next one."""
        found = the_stream(stream, self.streams)
        if found.raw.is_capturing:
            found.raw.call(self._lower)
        else:
            found._do(lambda: self._take_back(found))

    def _take_back(self, stream: Stream) -> None:
        if self._record.made:
            self._record = Record(self.streams.device.event())
        self._in_order(stream, self._lower)

    # -- the flag, for graphs

    def _in_order(self, stream: Stream, act: Callable[[], None]) -> None:
        if stream.raw.idle:
            act()
        else:
            stream.raw.call(act)

    def _raise(self) -> None:
        with self._flag:
            self._raised = True
            self._flag.notify_all()

    def _lower(self) -> None:
        with self._flag:
            self._raised = False

    def _reach(self) -> None:
        """The wait of a replayed graph, on a worker."""
        waited = 0.0
        with self._flag:
            while not self._raised:
                if waited >= WAIT_LIMIT_S or not self.streams.usable:
                    raise StreamError(
                        "event: expected the ExternalEvent that a graph waits for to be recorded, "
                        + (
                            f"got no record in {WAIT_LIMIT_S:.0f} s"
                            if self.streams.usable
                            else "got a device that is being left"
                        ),
                        argument="event",
                    )
                if not self._flag.wait(LOOK_EVERY_S):
                    waited += LOOK_EVERY_S
