# SPDX-License-Identifier: Apache-2.0
"""Graphs: launches recorded once and replayed as one launch.

A capture begins on one stream.  While it lasts, what is launched on that stream is recorded
instead of run.  Another stream that waits for an event recorded inside joins the capture (a
fork) and must be waited for before the end (a join).  What is kept are the calls, plans and
arrays included; contents are read when the graph is replayed, since that is when plans read.

A replay puts the origin's operations on the stream it is given and each fork's operations on a
hidden stream of that stream's own, ordered by marks where the capture had events.  So the race
check, both clocks, failures and the order of a seed treat a replay as what it is: these
operations, in this order.  A driver may make a program of its own of a capture instead, which is
then one operation.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvcore.errors import CaptureError, ParamInvalidError
from kvcore.runtime._storage import BufferCore, Storage
from kvcore.runtime.abc import External, Launch, Record, Step, Wait
from kvcore.runtime.arguments import PAGEABLE, host_memory, space_of
from kvcore.runtime.failures import not_in_a_capture
from kvcore.runtime.queues._marks import KIND_CALL, Mark
from kvcore.runtime.watching._observe import call_site

if TYPE_CHECKING:
    from kvcore.runtime.abc import Program
    from kvcore.runtime.core import Core
    from kvcore.runtime.external import Round
    from kvcore.runtime.queues._queue import Queue, StreamCore
    from kvcore.runtime.streams import Streams

__all__ = ["Capture", "CaptureState", "Graph"]


class CaptureState:
    """What is recorded while a capture is open: the queues that take part, and their steps."""

    def __init__(self, core: Core, origin: Queue) -> None:
        self.core = core
        self.queues: list[Queue] = [origin]
        self.steps: list[Step] = []
        self.storages: dict[int, Storage] = {}
        self._num_marks = 0
        self.ready: bool = False
        self.program: Program | None = None
        # what each branch has reached of each branch: branch -> number of its last step
        self._reached: list[dict[int, int]] = [{}]
        self._last: list[int] = [-1]

    @property
    def is_open(self) -> bool:
        """Whether the block that captures has not ended."""
        return self in self.core.captures

    # -- recording; called by the streams that are part of the capture

    def add(self, queue: Queue, kind: int, target: Any, args: Any, us: float) -> None:
        """Record one launch as a step of the capture."""
        branch = self.queues.index(queue)
        if kind != KIND_CALL:
            for access in (*getattr(target, "reads", ()), *getattr(target, "writes", ())):
                owner = access.owner
                if isinstance(owner, BufferCore):
                    self.storages[id(owner.storage)] = owner.storage
                elif (
                    self.core.profile is not None
                    and space_of(owner) == PAGEABLE
                    and host_memory(owner) is not None  # else it is another owner's device memory
                ):
                    raise not_in_a_capture(
                        access.argument, "copy pageable memory, which the device cannot capture"
                    )
        self._last[branch] = self._reached[branch][branch] = len(self.steps)
        self.steps.append(Launch(branch, kind, target, args, us, call_site()))

    def record(self, queue: Queue) -> Mark:
        """Add the record of an event to the capture; returns a mark of the capture."""
        branch = self.queues.index(queue)
        mark = Mark()
        mark.graph = self
        mark.note = self._num_marks
        mark.position = dict(self._reached[branch])
        self._num_marks += 1
        self.steps.append(Record(branch, mark.note))
        return mark

    def wait(self, queue: Queue, mark: Mark) -> None:
        """Add a wait to the capture, which a stream that was not part of it joins."""
        if queue not in self.queues:
            self.queues.append(queue)
            self._reached.append({})
            self._last.append(-1)
            queue.capture = self
        branch = self.queues.index(queue)
        reached = self._reached[branch]
        for other, step in mark.position.items():
            if step > reached.get(other, -1):
                reached[other] = step
        self.steps.append(Wait(branch, mark.note))

    def external(self, queue: Queue, event: Round, verb: str) -> None:
        """Add a verb of an external event to the capture, a node of the graph like any other."""
        if queue.lane is not None:
            queue.lane.check_external(verb)
        branch = self.queues.index(queue)
        self._last[branch] = self._reached[branch][branch] = len(self.steps)
        self.steps.append(External(branch, verb, event))

    def end(self, *, whole: bool) -> None:
        """Give the streams back.

        Raises CaptureError when nothing can be replayed, as with a fork that was not joined.
        """
        for queue in self.queues:
            queue.capture = None
        if not whole:
            return
        reached = self._reached[0]
        for branch, queue in enumerate(self.queues):
            if branch and self._last[branch] > reached.get(branch, -1):
                raise CaptureError(
                    f"stream {queue.name!r}: expected a fork that the captured stream "
                    f"{self.queues[0].name!r} waits for, got work that nothing joins",
                    argument="stream",
                    seen=queue.name,
                )
        self.program = self.core.driver.capture(self.steps, self.queues)
        self.ready = True


class Graph:
    """Recorded launches; ``replay`` runs them.  Made by ``Device.capture``."""

    def __init__(self, recording: CaptureState, streams: Streams, device: Any) -> None:
        self.device = device
        self._recording = recording
        self._streams = streams

    @property
    def ready(self) -> bool:
        """True once its capture has ended without an error."""
        return self._recording.ready

    @property
    def num_operations(self) -> int:
        """The number of operations that one replay launches."""
        return sum(isinstance(step, Launch) for step in self._recording.steps)

    def replay(self, stream: StreamCore | None = None) -> None:
        """Launch the graph on a stream (the current one by default); returns at once.

        Raises StreamError (device closed), CaptureError (inside a capture, or the capture of
        this graph failed), ParamInvalidError (a buffer of the graph was freed, or a stream of
        another device).
        """
        recording = self._recording
        core = recording.core
        core.check()
        own = self.device.current_stream() if stream is None else core.own(stream)
        core.refuse_in_capture("replay a graph", "stream")
        if not self.ready:
            raise CaptureError(
                "graph: expected a graph whose capture ended well, got "
                + (
                    "one that is being captured"
                    if recording.queues[0].capture is recording
                    else "one whose capture failed"
                ),
                argument="graph",
            )
        for storage in recording.storages.values():
            if storage.freed:
                raise ParamInvalidError(
                    "graph: expected live memory, got a graph that uses a buffer that was freed",
                    argument="graph",
                    seen="freed",
                )
        with core.lock, core.one_launch():
            if recording.program is not None:
                recording.program.replay(own.queue)
            else:
                self._launch(own.queue)

    def _launch(self, queue: Queue) -> None:
        recording = self._recording
        queues = [queue]
        if len(recording.queues) > 1:
            queues += self._streams.sides(queue, len(recording.queues) - 1)
            start = queue.mark()
            for side in queues[1:]:
                # A failure here reached the stream that was given, which reports it to the host.
                side.told(None)
                side.wait_mark(start)
        marks: dict[int, Mark] = {}
        for step in recording.steps:
            queue = queues[step.branch]
            if isinstance(step, Launch):
                queue.again(step.kind, step.target, step.args, step.us, step.site)
            elif isinstance(step, Record):
                marks[step.number] = queue.mark()
            elif isinstance(step, External):
                step.event.act(queue, step.verb, replayed=True)
            else:
                queue.wait_mark(marks[step.number])

    def __repr__(self) -> str:
        return f"Graph({self.num_operations} operations{'' if self.ready else ', not usable'})"


class Capture:
    """The block in which launches on a stream are recorded; see ``Device.capture``."""

    def __init__(self, core: Core, stream: StreamCore, streams: Streams, device: Any) -> None:
        self._core = core
        self._queue = stream.queue
        self._recording = CaptureState(core, stream.queue)
        self.graph: Graph = Graph(self._recording, streams, device)
        self._entered = False

    def __enter__(self) -> Graph:
        core = self._core
        core.driver.begin_capture()
        core.check()
        if self._queue.capture is not None or self._entered:
            raise not_in_a_capture(f"stream {self._queue.name!r}", "begin another capture")
        self._entered = True
        self._queue.capture = self._recording
        core.captures.append(self._recording)
        return self.graph

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._recording.is_open:
            raise not_in_a_capture(
                f"stream {self._queue.name!r}", "end a capture that is not under way"
            )
        self._core.captures.remove(self._recording)
        self._recording.end(whole=kind is None)

    async def __aenter__(self) -> Graph:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)


def join_or_refuse(queue: Queue, mark: Mark) -> bool:
    """A wait with a capture on one side or both; True when it was recorded."""
    capture: CaptureState | None = mark.graph
    if capture is not None and capture.is_open and queue.capture in (None, capture):
        capture.wait(queue, mark)
        return True
    name = f"stream {queue.name!r}"
    if queue.capture is None:
        raise CaptureError(
            f"{name}: expected an event recorded outside of captures, got one recorded inside a "
            "capture that has ended; record it again",
            argument="event",
        )
    raise CaptureError(
        f"{name}: expected an event recorded inside this capture, got one recorded outside; "
        "wait for it before the capture begins",
        argument="event",
    )
