# SPDX-License-Identifier: Apache-2.0
"""Events in torch_npu's words: ordinary ones, and external ones that are waited for first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.torch.streams import active, the_stream

if TYPE_CHECKING:
    from kvcore.runtime import Event as RuntimeEvent
    from kvcore.runtime import ExternalEvent as RuntimeExternalEvent
    from kvcore.torch.streams import Stream, Streams

__all__ = ["Event", "ExternalEvent"]


class Event:
    """An event; blocking and interprocess are accepted and mean nothing."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.streams: Streams = active()
        self.raw: RuntimeEvent = self.streams.device.event(
            blocking=bool(blocking), enable_timing=bool(enable_timing)
        )

    def record(self, stream: Stream | None = None) -> None:
        """Record behind what the stream (the current one by default) has."""
        self.raw.record(the_stream(stream, self.streams).raw)

    def wait(self, stream: Stream | None = None) -> None:
        """Order what comes on the stream (the current one by default) behind the last record."""
        self.raw.wait(the_stream(stream, self.streams).raw)

    def query(self) -> bool:
        """Whether the last record was reached."""
        return self.raw.query()

    def synchronize(self) -> None:
        """Wait for the last record."""
        mark = self.raw.mark
        self.streams.be_patient(lambda: mark is None or not mark.pending)
        self.raw.synchronize_blocking()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds to another event."""
        return self.raw.elapsed_time(getattr(end_event, "raw", end_event))

    def __repr__(self) -> str:
        return f"<npu.Event {self.raw!r}>"


class ExternalEvent:
    """An event for graphs, which others record: ``wait`` may come before ``record``.

    What comes on a stream behind a wait runs once the event is recorded; in a graph each replay
    waits, records and resets anew.
    """

    def __init__(self) -> None:
        self.streams: Streams = active()
        self.raw: RuntimeExternalEvent = self.streams.device.external_event()

    def record(self, stream: Stream | None = None) -> None:
        """Record behind what the stream (the current one by default) has."""
        self.raw.record(the_stream(stream, self.streams).raw)

    def wait(self, stream: Stream | None = None) -> None:
        """Hold the stream (the current one by default) until the event is recorded."""
        self.raw.wait(the_stream(stream, self.streams).raw)

    def reset(self, stream: Stream | None = None) -> None:
        """Take the record back: a wait from here on is for the next one."""
        self.raw.reset(the_stream(stream, self.streams).raw)

    def __repr__(self) -> str:
        return f"<npu.{self.raw!r}>"
