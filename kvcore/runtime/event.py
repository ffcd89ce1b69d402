# SPDX-License-Identifier: Apache-2.0
"""Events: points on streams that other streams and hosts can wait for.

An event can be recorded again.  Each record is a mark of its own; a wait, a query or a
synchronise means the last record made before it, as in CUDA and as for ACL's Ex events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.errors import ParamInvalidError, StreamError
from kvcore.runtime._queue import EventCore, Queue

if TYPE_CHECKING:
    from kvcore.errors import RaceError
    from kvcore.runtime._marks import Failure, Mark
    from kvcore.runtime.device import Device
    from kvcore.runtime.stream import Stream

__all__ = ["Event"]


class Event(EventCore):
    """A point on a stream.

    blocking:      accepted and kept for programs that pass it; waiting never spins here.
    enable_timing: whether ``elapsed_time`` may be asked (True unless said otherwise).
    """

    def __init__(
        self, device: Device, *, blocking: bool = False, enable_timing: bool = True
    ) -> None:
        self._bind(device._executor)
        self.device = device
        self.blocking = blocking
        self.enable_timing = enable_timing

    @property
    def recorded(self) -> bool:
        """True once it was recorded."""
        return self.mark is not None

    def record(self, stream: Stream | None = None) -> None:
        """Record behind everything launched on the stream (the current one by default)."""
        self._stream(stream)._record(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Make the stream (the current one by default) wait for the last record."""
        self._stream(stream)._wait(self)

    def _stream(self, stream: Stream | None) -> Stream:
        # (a stream of another device says itself that this event is not its own)
        if stream is None:
            return self.device.current_stream()
        return stream if isinstance(stream, Queue) else self.device._own(stream)

    def query(self) -> bool:
        """True when the last record was reached, or when there is none.

        Raises StreamError when the work before it failed.  On the model clock each query takes
        some of the host's time, and may have to wait for the real work that the model needs.
        """
        self.device._executor.check()
        mark = self.mark
        if mark is None:
            return True
        self._no_capture(mark)
        if not self.device._host.finds(mark):
            return False
        self._finish(mark)
        return True

    async def synchronize(self) -> None:
        """Wait until the last record is reached; at once when there is none.

        Cancelling stops the waiting, not the work.  Raises StreamError, from the first cause,
        each time while the event is failed (recording it again ends that), and RaceError.
        """
        self.device._executor.check()
        mark = self.mark
        if mark is not None:
            self._no_capture(mark)
        await self.device._host.wait(mark)
        if mark is not None:
            self._finish(mark)

    def synchronize_blocking(self) -> None:
        """The same, holding this thread; works on an event loop's thread and without a loop."""
        self.device._executor.check()
        mark = self.mark
        if mark is not None:
            self._no_capture(mark)
            self.device._host.wait_blocking(mark)
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
        if self.device._executor.is_forked:
            self.device._executor.check()
        start = self._time("event")
        return (other._time("other") - start) / 1e3

    def _time(self, argument: str) -> float:
        if not self.enable_timing:
            raise ParamInvalidError(
                f"{argument}: expected an event with enable_timing=True, got one without",
                argument=argument,
                expected="enable_timing=True",
            )
        time = None if self.mark is None else self.device._time_of(self.mark)
        if time is None:
            raise StreamError(
                f"{argument}: expected an event that was recorded and reached, got one that is "
                + ("pending" if self.recorded else "not recorded"),
                argument=argument,
            )
        return time

    def _no_capture(self, mark: Mark) -> None:
        if mark.graph is not None:
            raise self.device._capture_error(
                "event", "wait for an event that was recorded inside a capture"
            )

    def _finish(self, mark: Mark) -> None:
        self.device._host_reached(mark)
        if mark.failure is not None:
            self.executor.tell(mark.failure)
            raise failed(mark.failure, f"event recorded on stream {mark.queue.name!r}")
        self.device._raise_races()

    def __repr__(self) -> str:
        if self.mark is None:
            return "Event(not recorded)"
        if self.mark.graph is not None:
            return "Event(in a capture)"
        state = "pending" if self.mark.pending else "failed" if self.mark.failed else "reached"
        return f"Event(on {self.mark.queue.name!r}, {state})"


def _text(failure: Failure) -> str:
    # Telling of a failure must not fail: what was raised may have no text.
    kind = type(failure.cause).__name__
    try:
        return f"{kind}: {failure.cause}"
    except Exception:
        return kind


def failed(failure: Failure, what: str) -> StreamError:
    """What a host is told of a failure, caused by the first exception."""
    error = StreamError(
        f"{what}: {failure.operation} on stream {failure.stream!r} failed: {_text(failure)}",
        argument="stream",
        seen=failure.operation,
    )
    error.__cause__ = failure.cause
    return error


def unseen(failures: Sequence[Failure], race: RaceError | None) -> StreamError:
    """What is raised when a device is left with failures that no host was told of."""
    first = failures[0]
    error = StreamError(
        f"stream {first.stream!r}: {first.operation} failed and nobody was told: {_text(first)}",
        argument="stream",
        seen=first.operation,
    )
    for failure in failures[1:10]:
        error.add_note(f"stream {failure.stream!r}: {failure.operation}: {_text(failure)}")
    if race is not None:
        error.add_note(str(race))
    error.__cause__ = first.cause
    return error
