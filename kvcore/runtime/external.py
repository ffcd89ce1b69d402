# SPDX-License-Identifier: Apache-2.0
"""External events: a stream may wait for one before it is recorded.

An ordinary event that was never recorded holds nothing back.  An external one holds back whoever
waits until somebody records it, which is how a graph waits for work outside of it.  ACL has them
as a flag in memory that a record sets, a wait looks at and a reset clears, and asks for one of two
orders of calls: wait, reset, record; or record, wait, reset.  Both are rounds of one record each.
So here an event goes from round to round: a round is over once it was recorded and reset, and a
wait means the record of the round it was made in, whether that comes before it or after.  What
waits for what is thereby settled by the order of the host's calls, as for ordinary events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.errors import ParamInvalidError
from kvcore.runtime._marks import Failure, Mark
from kvcore.runtime.event import failed

if TYPE_CHECKING:
    from kvcore.runtime._queue import Queue
    from kvcore.runtime.device import Device
    from kvcore.runtime.stream import Stream

__all__ = ["ExternalEvent", "Promises"]


class ExternalEvent:
    """An event that streams may wait for before it is recorded.  Made by ``external_event``.

    Inside a capture all three calls become part of the graph: each replay waits, records and
    resets anew.  They do not join streams to the capture.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._begin()

    def _begin(self) -> None:
        self._mark = Mark()
        self._recorded = self._awaited = self._reset = False

    @property
    def recorded(self) -> bool:
        """True once it was recorded, until it is reset."""
        return self._recorded

    def query(self) -> bool:
        """True when the round's record was made and reached.

        As for an event, the host's work from then on comes after it, the model clock decides
        when that is, and a failure before the record raises StreamError.
        """
        device, mark = self.device, self._mark
        device._executor.check()
        if not self._recorded or not device._host.finds(mark):
            return False
        device._host_reached(mark)
        if mark.failure is not None:
            device._executor.tell(mark.failure)
            raise failed(mark.failure, "external event")
        device._raise_races()
        return True

    def record(self, stream: Stream | None = None) -> None:
        """Record behind what the stream (the current one by default) has.

        A second record before a reset adds nothing: the event is set by the first.  Raises
        ParamInvalidError, and records nothing, when what the stream has waits for this very
        record, there or by way of other streams and events: it could never be reached.
        """
        self._call("record", stream)

    def wait(self, stream: Stream | None = None) -> None:
        """Hold back what is launched on the stream from here on until the event is recorded.

        Returns at once.  A device that is left with nobody having recorded it fails the wait.
        """
        self._call("wait", stream)

    def reset(self, stream: Stream | None = None) -> None:
        """Begin a new round once this one was recorded; who waits from then on waits for that.

        An event that nobody recorded or waits for has nothing to reset.
        """
        self._call("reset", stream)

    def _call(self, verb: str, stream: Stream | None) -> None:
        device = self.device
        device._executor.check()
        stream = device.current_stream() if stream is None else device._own(stream)
        with device._lock:
            if stream.capture is not None:
                stream.capture.external(stream, self, verb)
            else:
                device._event_call()
                self._do(stream, verb)

    def _do(self, queue: Queue, verb: str, *, replayed: bool = False) -> None:
        """Record, wait or reset on a stream, now; the device's lock is held.

        A record behind its own wait is refused.  In a replay half of the graph may be launched by
        then, so there the wait fails instead, as it does when nobody ever records.
        """
        if verb == "wait":
            self._awaited = True
            if not self._recorded:
                self.device._promises.made(self._mark)
            queue._wait_mark(self._mark)
        elif verb == "record":
            if self._recorded:
                return
            if queue._comes_behind(self._mark):
                error = behind_its_wait(queue.name)
                if not replayed:
                    raise error
                if self.device._promises.kept(self._mark):
                    self.device._break_promise(self._mark, Failure(error, queue.name, "record"))
                self._begin()
                return
            self.device._promises.kept(self._mark)
            queue._record_mark(self._mark)
            self._recorded = True
            if self._reset:
                self._begin()
        elif self._recorded:
            self._begin()
        else:
            self._reset = self._awaited

    def __repr__(self) -> str:
        return f"ExternalEvent({'recorded' if self._recorded else 'not recorded'})"


class Promises:
    """Marks that streams wait for and that nobody has recorded yet; the device's lock is held."""

    def __init__(self) -> None:
        self._marks: dict[int, Mark] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def made(self, mark: Mark) -> None:
        """A stream waits for it."""
        self._marks[id(mark)] = mark

    def kept(self, mark: Mark) -> bool:
        """It is being recorded; whether a stream waits for it."""
        return self._marks.pop(id(mark), None) is not None

    def take(self) -> list[Mark]:
        """All of them, to be broken."""
        marks = list(self._marks.values())
        self._marks.clear()
        return marks


def behind_its_wait(stream: str) -> ParamInvalidError:
    """Why an external event cannot be recorded on that stream."""
    return ParamInvalidError(
        "event: expected an external event that is recorded on a stream that does not wait for "
        f"that record, got stream {stream!r}, whose work waits for it",
        argument="event",
        seen=stream,
        expected="a stream that does not wait for the record",
    )


def never_recorded() -> ParamInvalidError:
    """Why a stream that waits for an external event cannot go on."""
    return ParamInvalidError(
        "event: expected an external event that is recorded, got one that nobody recorded before "
        "the device was left",
        argument="event",
        seen="not recorded",
    )
