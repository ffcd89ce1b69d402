# SPDX-License-Identifier: Apache-2.0
"""Streams: in-order queues of work.  The launch path itself is in ``queues/_queue.pyx``."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, overload

from kvcore.errors import ParamInvalidError
from kvcore.runtime.copies import Copy, Fill, Timed
from kvcore.runtime.event import Event
from kvcore.runtime.external import ExternalEvent
from kvcore.runtime.failures import failed, not_in_a_capture
from kvcore.runtime.queues._queue import Queue, StreamCore
from kvcore.runtime.statistics import StreamStatistics, of_stream

if TYPE_CHECKING:
    from kvcore.runtime.core import Core
    from kvcore.runtime.queues._marks import Mark

__all__ = ["Stream"]

MAX_COMPUTE_US = 1e12  # eleven days
_NOTHING: tuple[object, ...] = ()
_RUNS_LATER = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Stream(StreamCore):
    """Work in launch order, one operation at a time; different streams run side by side.

    Launching never blocks and never awaits.  Everything launched keeps its arrays alive until it
    is done.  Made by ``Device.stream``.  ``queue`` is for the runtime's own modules.
    """

    def __init__(self, core: Core, device: Any, queue: Queue) -> None:
        self._bind(queue)
        self._core = core
        self.device = device

    # -- work (``launch`` is in the compiled half)

    def copy(self, dst: object, src: object) -> None:
        """Copy src over dst: buffers or arrays of one shape and dtype; dst is written.

        Raises ParamInvalidError at once for shapes or dtypes that differ, a read-only dst,
        memory freed or of another device.
        """
        if not self.queue.executor.is_open:
            self.queue.executor.check()
        self.queue.move(Copy(self._core, dst, src))

    def copy_batch(self, dsts: Sequence[object], srcs: Sequence[object]) -> None:
        """Copy srcs[i] over dsts[i] for all i, in order, as one operation."""
        if not self.queue.executor.is_open:
            self.queue.executor.check()
        try:
            sizes = (len(dsts), len(srcs))
        except TypeError:
            sizes = (0, -1)
        if sizes[0] != sizes[1]:
            raise ParamInvalidError(
                f"srcs: expected a sequence of {sizes[0]} sources as dsts, "
                f"got {'no sequence' if sizes[1] < 0 else sizes[1]}",
                argument="srcs",
                seen=sizes[1],
                expected=sizes[0],
            )
        self.queue.move(Copy.batch(self._core, dsts, srcs))

    def fill(self, dst: object, value: Any) -> None:
        """Set every element of dst to one value of its type."""
        if not self.queue.executor.is_open:
            self.queue.executor.check()
        self.queue.move(Fill(self._core, dst, value))

    def call(self, fn: Callable[..., object], *args: object) -> None:
        """Run fn(*args) in stream order, on a worker.

        It must not launch, wait, allocate or free on this device (nor may a host function on
        the hardware), and what it raises is a failure of the stream.
        """
        if not callable(fn):
            raise ParamInvalidError(
                f"fn: expected a callable, got {type(fn).__name__}",
                argument="fn",
                seen=type(fn).__name__,
            )
        code = getattr(fn, "__code__", None)
        if getattr(code, "co_flags", 0) & _RUNS_LATER:
            raise ParamInvalidError(
                f"fn: expected a function that runs when it is called, got {fn!r}, which gives "
                "a coroutine or a generator that nobody would run",
                argument="fn",
                seen=type(fn).__name__,
            )
        self.queue.call(fn, args)

    def compute(
        self,
        us: Any,
        name: str = "compute",
        *,
        reads: object = _NOTHING,
        writes: object = _NOTHING,
    ) -> None:
        """Work that only takes time: ``us`` microseconds, in place of a kernel that is not there.

        reads, writes: buffers or arrays (one, or a sequence of them) that the kernel would read
        and write whole: accesses for the race check, and kept alive until the time is over; no
        byte of them moves.  They are admitted as those of a plan are (see ``launch``).

        On the model clock it holds the compute resource; on the wall clock no thread.
        """
        if not self.queue.executor.is_open:
            self.queue.executor.check()
        good = isinstance(us, int | float) and not isinstance(us, bool)
        if not good or not 0 <= us <= MAX_COMPUTE_US:
            raise ParamInvalidError(
                f"us: expected microseconds from 0 to {MAX_COMPUTE_US:.0e}, got {us!r}",
                argument="us",
                seen=us,
            )
        target: object = str(name)
        if reads is not _NOTHING or writes is not _NOTHING:
            target = Timed(self._core, str(name), reads, writes)
            self.queue.executor.admission.check(target)
        self.queue.timer(us, target)

    async def run(self, plan: Any) -> None:
        """Launch a plan and wait until it is done.

        Cancelling stops the waiting, not the work.  Raises StreamError when it did not run.
        """
        self._may_wait("wait for work")
        self.launch(plan)
        mark = self.queue.mark()
        await self._core.waiting.until((mark,))
        self._finish(mark, always=True)

    # -- order

    @overload
    def record_event(self, event: Event | None = None) -> Event: ...
    @overload
    def record_event(self, event: ExternalEvent) -> ExternalEvent: ...
    def record_event(self, event: Event | ExternalEvent | None = None) -> Event | ExternalEvent:
        """Record an event (a new one by default) behind everything launched here."""
        if event is None:
            event = Event(self._core, self.device)
        elif isinstance(event, ExternalEvent):
            event.record(self)
            return event
        self.queue.record(_event(event))
        return event

    def wait_event(self, event: Event | ExternalEvent) -> None:
        """Hold back what is launched from here on until the event's last record is reached.

        Returns at once and holds no thread.  An event never recorded, or recorded on this
        stream, holds nothing back; an ExternalEvent does until it is recorded.
        """
        if isinstance(event, ExternalEvent):
            event.wait(self)
        else:
            self.queue.wait(_event(event))

    def wait_stream(self, stream: Stream) -> None:
        """Hold back what is launched from here on until all that the other stream has is done."""
        if not isinstance(stream, Stream):
            raise ParamInvalidError(
                f"stream: expected a Stream, got {type(stream).__name__}",
                argument="stream",
                seen=type(stream).__name__,
            )
        event = Event(self._core, self.device)
        stream.queue.record(event)
        self.queue.wait(event)

    def query(self) -> bool:
        """True when everything launched here is done.

        Raises StreamError as ``synchronize`` would when the stream has failed.  On the model
        clock each query takes some of the host's time.
        """
        self._may_wait("query a stream")
        mark = self.queue.mark()
        if not self._core.driver.look(mark):
            return False
        self._finish(mark, always=False)
        return True

    async def synchronize(self) -> None:
        """Wait until everything launched here before this call is done.

        Cancelling stops the waiting, not the work.  Raises StreamError from the first cause
        when the stream has failed, once; then the stream is usable again.  What was launched
        before that moment does not run.  Raises RaceError (``race_check="raise"``).
        """
        self._may_wait("synchronise")
        mark = self.queue.mark()
        await self._core.waiting.until((mark,))
        self._finish(mark, always=False)

    def synchronize_blocking(self, timeout_s: float | None = None) -> None:
        """Do what ``synchronize`` does, holding this thread.

        Works on an event loop's own thread (workers never need the loop) and without a loop.
        timeout_s: seconds after which to wait no longer; StreamError then (with code 507046 on an
        NPU), and the work goes on.  ParamInvalidError for what are no seconds.
        """
        seconds = None if timeout_s is None else _seconds(timeout_s)
        self._may_wait("synchronise")
        mark = self.queue.mark()
        self._core.driver.wait_for(mark, seconds)
        self._finish(mark, always=False)

    async def drain(self) -> None:
        """Wait until nothing that was launched here before this call runs any more.

        For a caller that lent memory to the work and wants it back.  Unlike ``synchronize`` it
        reports no failure, returns also when the work failed or was dropped, and may be called
        while the device is being left or a graph is captured.  Cancelling stops the waiting, not
        the work.  Raises StreamError inside a host function of the device.
        """
        while (mark := self._last_mark()) is not None:
            await self._core.waiting.until((mark,), timed=False)
            if not mark.dropped:  # what runs while the device is being left is not
                return

    def drain_blocking(self) -> None:
        """Do what ``drain`` does, holding this thread."""
        while (mark := self._last_mark()) is not None:
            self._core.driver.wait_for(mark, timed=False)
            if not mark.dropped:
                return

    def _last_mark(self) -> Mark | None:
        """A mark behind what was launched; None when this process has nothing left to run."""
        executor = self.queue.executor
        if self._core.closed or executor.is_forked:
            return None
        if executor.inside():
            executor.check()  # a host function would wait for itself: an error
        return self.queue.mark()

    def statistics(self) -> StreamStatistics:
        """What the stream is doing, in numbers; for logs and for debugging.  Never raises."""
        return of_stream(self.queue)

    @property
    def is_capturing(self) -> bool:
        """True while launches are recorded into a graph."""
        return self.queue.capture is not None

    def _may_wait(self, what: str) -> None:
        self.queue.executor.check()
        if self.queue.capture is not None:
            raise not_in_a_capture(f"stream {self.name!r}", what)

    def _finish(self, mark: Mark, *, always: bool) -> None:
        self._core.host_reached(mark)
        failure = mark.failure
        if failure is not None and (self.queue.told(failure) or always):
            self._core.executor.tell(failure)
            raise failed(failure, f"stream {self.name!r}")
        self._core.raise_races()

    def __repr__(self) -> str:
        state = "failed" if self.failure is not None else "idle" if self.idle else "busy"
        return f"Stream({self.name!r}, {state})"


def _event(event: object) -> Event:
    if not isinstance(event, Event):
        raise ParamInvalidError(
            f"event: expected an Event, got {type(event).__name__}",
            argument="event",
            seen=type(event).__name__,
        )
    return event


def _seconds(timeout_s: object) -> float | None:
    """A time to wait; None for ever."""
    seconds = math.nan
    if isinstance(timeout_s, Real) and not isinstance(timeout_s, bool):
        with contextlib.suppress(OverflowError):  # an int that no float can be
            seconds = float(timeout_s)
    if not seconds >= 0:
        raise ParamInvalidError(
            f"timeout_s: expected seconds that are not negative, or None, got {timeout_s!r}",
            argument="timeout_s",
            seen=timeout_s,
            expected="seconds that are not negative, or None",
        )
    return None if seconds == math.inf else seconds
