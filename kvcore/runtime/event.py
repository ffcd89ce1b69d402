# SPDX-License-Identifier: Apache-2.0
"""Events: points on streams that other streams and hosts can wait for.

An event can be recorded again.  Each record is a mark of its own; a wait, a query or a
synchronise means the last record made before it, as in CUDA and as for ACL's Ex events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.errors import ParamInvalidError, StreamError
from kvcore.runtime.failures import failed, not_in_a_capture
from kvcore.runtime.queues._queue import EventCore, StreamCore

if TYPE_CHECKING:
    from kvcore.runtime.core import Core
    from kvcore.runtime.queues._marks import Mark
    from kvcore.runtime.queues._queue import Queue
    from kvcore.runtime.stream import Stream

__all__ = ["Event"]


class Event(EventCore):
    """A point on a stream.

    blocking:      accepted and kept for programs that pass it; waiting never spins here.
    enable_timing: whether ``elapsed_time`` may be asked (True unless said otherwise).
    """

    def __init__(
        self, core: Core, device: Any, *, blocking: bool = False, enable_timing: bool = True
    ) -> None:
        self._bind(core.executor)
        self._core = core
        self.device = device
        self.blocking = blocking
        self.enable_timing = enable_timing

    @property
    def recorded(self) -> bool:
        """True once the event was recorded."""
        return self.mark is not None

    def record(self, stream: Stream | None = None) -> None:
        """Record behind everything launched on the stream (the current one by default)."""
        self._queue(stream).record(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Make the stream (the current one by default) wait for the last record."""
        self._queue(stream).wait(self)

    def _queue(self, stream: Stream | None) -> Queue:
        # (a stream of another device says itself that this event is not its own)
        if stream is None:
            stream = self.device.current_stream()
        own = stream if isinstance(stream, StreamCore) else self._core.own(stream)
        return own.queue

    def query(self) -> bool:
        """True when the last record was reached, or when there is none.

        Raises StreamError when the work before it failed.  On the model clock each query takes
        some of the host's time, and may have to wait for the real work that the model needs.
        """
        self._core.check()
        mark = self.mark
        if mark is None:
            return True
        self._no_capture(mark)
        if not self._core.driver.look(mark):
            return False
        self._finish(mark)
        return True

    async def synchronize(self) -> None:
        """Wait until the last record is reached; at once when there is none.

        Cancelling stops the waiting, not the work.  Raises StreamError, from the first cause,
        each time while the event is failed (recording it again ends that), and RaceError.
        """
        self._core.check()
        mark = self.mark
        if mark is not None:
            self._no_capture(mark)
        await self._core.waiting.until(() if mark is None else (mark,))
        if mark is not None:
            self._finish(mark)

    def synchronize_blocking(self) -> None:
        """Do what ``synchronize`` does, holding this thread.

        Works on an event loop's own thread, and without a loop.
        """
        self._core.check()
        mark = self.mark
        if mark is not None:
            self._no_capture(mark)
            self._core.driver.wait_for(mark)
            self._finish(mark)

    def elapsed_time(self, other: object) -> float:
        """Milliseconds from this event's last record to the other's.

        Both must have been reached (ask ``query`` or synchronise first) and have
        ``enable_timing``.  On the model clock these are the model's.
        """
        if not isinstance(other, Event) or other.executor is not self.executor:
            raise ParamInvalidError(
                "other: expected an event of the same device, got "
                + ("one of another device" if isinstance(other, Event) else type(other).__name__),
                argument="other",
            )
        self._core.check_process()
        start, end = self._timed(self, "event"), self._timed(other, "other")
        return self._core.driver.elapsed(start, end)

    def _timed(self, event: Event, argument: str) -> Mark:
        """The event's last record, which must have been reached and have a time."""
        if not event.enable_timing:
            raise ParamInvalidError(
                f"{argument}: expected an event with enable_timing=True, got one without",
                argument=argument,
                expected="enable_timing=True",
            )
        mark = event.mark
        if mark is None or mark.graph is not None or self._core.driver.time_of(mark) is None:
            raise StreamError(
                f"{argument}: expected an event that was recorded and reached, got one that is "
                + ("pending" if event.recorded else "not recorded"),
                argument=argument,
            )
        return mark

    def _no_capture(self, mark: Mark) -> None:
        if mark.graph is not None:
            raise not_in_a_capture("event", "wait for an event that was recorded inside a capture")

    def _finish(self, mark: Mark) -> None:
        self._core.host_reached(mark)
        if mark.failure is not None:
            self.executor.tell(mark.failure)
            raise failed(mark.failure, f"event recorded on stream {mark.queue.name!r}")
        self._core.raise_races()

    def __repr__(self) -> str:
        if self.mark is None:
            return "Event(not recorded)"
        if self.mark.graph is not None:
            return "Event(in a capture)"
        state = "pending" if self.mark.pending else "failed" if self.mark.failed else "reached"
        return f"Event(on {self.mark.queue.name!r}, {state})"
