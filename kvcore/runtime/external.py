# SPDX-License-Identifier: Apache-2.0
"""External events: a stream may wait for one before it is recorded.

An ordinary event that was never recorded holds nothing back.  An external one holds back the
streams that wait until it is recorded, which is how a graph waits for work outside of it.  ACL has
them as a flag in memory that a record sets, a wait looks at and a reset clears, and asks for one of
two orders of calls: wait, reset, record; or record, wait, reset.  Both are rounds of one record
each.  So here an event goes from round to round: a round is over once it was recorded and reset,
and a wait means the record of the round it was made in, whether that comes before it or after.
What waits for what is thereby settled by the order of the host's calls, as for ordinary events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.runtime.failures import behind_its_wait, failed
from kvcore.runtime.queues._marks import Failure, Mark

if TYPE_CHECKING:
    from kvcore.runtime.core import Core
    from kvcore.runtime.queues._queue import Queue, StreamCore

__all__ = ["ExternalEvent", "Round"]


class Round:
    """What an external event is made of: the mark of this round, and what was done with it.

    A graph keeps it, and does what was captured with ``act`` at each replay.
    """

    recorded: bool

    def __init__(self, core: Core) -> None:
        self._core = core
        self._begin()

    def _begin(self) -> None:
        self.mark: Mark = Mark()
        self.recorded = self._awaited = self._reset = False

    def act(self, queue: Queue, verb: str, *, replayed: bool = False) -> None:
        """Record, wait or reset on a stream, now; the device's lock is held.

        A record behind its own wait is refused.  In a replay half of the graph may be launched by
        then, so there the wait fails instead, as it does when the event is never recorded.
        """
        core = self._core
        if verb == "wait":
            self._awaited = True
            if not self.recorded:
                core.promises.made(self.mark)
            queue.wait_mark(self.mark)
        elif verb == "record":
            if self.recorded:
                return
            if queue.comes_behind(self.mark):
                error = behind_its_wait(queue.name)
                if not replayed:
                    raise error
                if core.promises.kept(self.mark):
                    core.break_promise(self.mark, Failure(error, queue.name, "record"))
                self._begin()
                return
            core.promises.kept(self.mark)
            queue.record_mark(self.mark)
            self.recorded = True
            if self._reset:
                self._begin()
        elif self.recorded:
            self._begin()
        else:
            self._reset = self._awaited


class ExternalEvent:
    """An event that streams may wait for before it is recorded.  Made by ``external_event``.

    Inside a capture all three calls become part of the graph: each replay waits, records and
    resets anew.  They do not join streams to the capture.
    """

    def __init__(self, core: Core, device: Any) -> None:
        self._core = core
        self.device = device
        self._round = Round(core)

    @property
    def recorded(self) -> bool:
        """True once it was recorded, until it is reset."""
        return self._round.recorded

    def query(self) -> bool:
        """True when the round's record was made and reached.

        As for an event, the host's work from then on comes after it, the model clock decides
        when that is, and a failure before the record raises StreamError.
        """
        core, mark = self._core, self._round.mark
        core.check()
        if not self._round.recorded or not core.driver.look(mark):
            return False
        core.host_reached(mark)
        if mark.failure is not None:
            core.executor.tell(mark.failure)
            raise failed(mark.failure, "external event")
        core.raise_races()
        return True

    def record(self, stream: StreamCore | None = None) -> None:
        """Record behind what the stream (the current one by default) has.

        A second record before a reset adds nothing: the event is set by the first.  Raises
        ParamInvalidError, and records nothing, when what the stream has waits for this very
        record, there or by way of other streams and events: it could never be reached.
        """
        self._call("record", stream)

    def wait(self, stream: StreamCore | None = None) -> None:
        """Hold back what is launched on the stream from here on until the event is recorded.

        Returns at once.  Leaving the device before it is recorded fails the wait.
        """
        self._call("wait", stream)

    def reset(self, stream: StreamCore | None = None) -> None:
        """Begin a new round once this one was recorded; who waits from then on waits for that.

        An event that is neither recorded nor waited for has nothing to reset.
        """
        self._call("reset", stream)

    def _call(self, verb: str, stream: StreamCore | None) -> None:
        core = self._core
        core.check()
        own = self.device.current_stream() if stream is None else core.own(stream)
        queue: Queue = own.queue
        with core.lock:
            if queue.capture is not None:
                queue.capture.external(queue, self._round, verb)
            else:
                core.event_call()
                self._round.act(queue, verb)

    def __repr__(self) -> str:
        return f"ExternalEvent({'recorded' if self.recorded else 'not recorded'})"
