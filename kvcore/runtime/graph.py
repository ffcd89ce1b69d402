# SPDX-License-Identifier: Apache-2.0
"""Graphs: launches recorded once and replayed as one launch.

A capture begins on one stream.  While it lasts, what is launched on that stream is recorded
instead of run.  Another stream that waits for an event recorded inside joins the capture (a
fork) and must be waited for before the end (a join).  What is kept are the calls, plans and
arrays included; contents are read when the graph is replayed, since that is when plans read.

A replay puts the origin's operations on the stream it is given and each fork's operations on a
hidden stream of that stream's own, ordered by marks where the capture had events.  So the race
check, both clocks, failures and the order of a seed treat a replay as what it is: these
operations, in this order.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvcore.errors import CaptureError, ParamInvalidError
from kvcore.runtime._marks import KIND_CALL, Mark
from kvcore.runtime._observe import call_site
from kvcore.runtime._storage import BufferCore, Storage
from kvcore.runtime.memory import PAGEABLE, host_memory, space_of

if TYPE_CHECKING:
    from kvcore.runtime._queue import Queue
    from kvcore.runtime.device import Device
    from kvcore.runtime.external import ExternalEvent
    from kvcore.runtime.stream import Stream

__all__ = ["Capture", "Graph"]

_OP, _RECORD, _WAIT, _EXTERNAL = range(4)


class Graph:
    """Recorded launches; ``replay`` runs them.

    Usable once its capture has ended without an error.
    """

    def __init__(self, device: Device, origin: Stream) -> None:
        self.device = device
        self.ready = False
        self._queues: list[Queue] = [origin]
        self._steps: list[tuple[Any, ...]] = []
        self._storages: dict[int, Storage] = {}
        self._num_marks = 0
        # what each branch has reached of each branch: branch -> number of its last step
        self._reached: list[dict[int, int]] = [{}]
        self._last: list[int] = [-1]

    @property
    def num_operations(self) -> int:
        """Operations of one replay."""
        return sum(step[0] == _OP for step in self._steps)

    # -- recording; called by the streams that are part of the capture

    def add(self, queue: Queue, kind: int, target: Any, args: Any, us: float) -> None:
        """Record one launch."""
        branch = self._queues.index(queue)
        if kind != KIND_CALL:
            for access in (*getattr(target, "reads", ()), *getattr(target, "writes", ())):
                owner = access.owner
                if isinstance(owner, BufferCore):
                    self._storages[id(owner.storage)] = owner.storage
                elif (
                    self.device.profile is not None
                    and space_of(owner) == PAGEABLE
                    and host_memory(owner) is not None  # else it is another owner's device memory
                ):
                    raise self.device._capture_error(
                        access.argument, "copy pageable memory, which the device cannot capture"
                    )
        self._last[branch] = self._reached[branch][branch] = len(self._steps)
        self._steps.append((_OP, branch, kind, target, args, us, call_site()))

    def record(self, queue: Queue) -> Mark:
        """Record an event's record: a mark of this graph."""
        branch = self._queues.index(queue)
        mark = Mark()
        mark.graph = self
        mark.note = self._num_marks
        mark.position = dict(self._reached[branch])
        self._num_marks += 1
        self._steps.append((_RECORD, branch, mark.note))
        return mark

    def wait(self, queue: Queue, mark: Mark) -> None:
        """Record a wait; a stream that is not part of the capture joins it."""
        if queue not in self._queues:
            self._queues.append(queue)
            self._reached.append({})
            self._last.append(-1)
            queue.capture = self
        branch = self._queues.index(queue)
        reached = self._reached[branch]
        for other, step in mark.position.items():
            if step > reached.get(other, -1):
                reached[other] = step
        self._steps.append((_WAIT, branch, mark.note))

    def external(self, queue: Queue, event: ExternalEvent, verb: str) -> None:
        """Record what is done with an external event: a node of the graph like any other."""
        branch = self._queues.index(queue)
        self._last[branch] = self._reached[branch][branch] = len(self._steps)
        self._steps.append((_EXTERNAL, branch, verb, event))

    def end(self, *, whole: bool) -> None:
        """Give the streams back; CaptureError when a fork was not joined."""
        for queue in self._queues:
            queue.capture = None
        if not whole:
            return
        reached = self._reached[0]
        for branch, queue in enumerate(self._queues):
            if branch and self._last[branch] > reached.get(branch, -1):
                raise CaptureError(
                    f"stream {queue.name!r}: expected a fork that the captured stream "
                    f"{self._queues[0].name!r} waits for, got work that nothing joins",
                    argument="stream",
                    seen=queue.name,
                )
        self.ready = True

    # -- replaying

    def replay(self, stream: Stream | None = None) -> None:
        """Launch the graph on a stream (the current one by default); returns at once.

        Raises StreamError (device closed), CaptureError (inside a capture, or the capture of
        this graph failed), ParamInvalidError (a buffer of the graph was freed, or a stream of
        another device).
        """
        device = self.device
        device._executor.check()
        stream = device.current_stream() if stream is None else device._own(stream)
        device._refuse_in_capture("replay a graph", stream)
        if not self.ready:
            raise CaptureError(
                "graph: expected a graph whose capture ended well, got "
                + (
                    "one that is being captured"
                    if self._queues[0].capture is self
                    else "one whose capture failed"
                ),
                argument="graph",
            )
        for storage in self._storages.values():
            if storage.freed:
                raise ParamInvalidError(
                    "graph: expected live memory, got a graph that uses a buffer that was freed",
                    argument="graph",
                    seen="freed",
                )
        with device._lock, device._one_launch():
            self._launch(stream)

    def _launch(self, stream: Stream) -> None:
        queues: list[Queue] = [stream]
        if len(self._queues) > 1:
            queues += self.device._side_streams(stream, len(self._queues) - 1)
            start = stream.mark()
            for queue in queues[1:]:
                # A failure here reached the stream that was given, which tells the host of it.
                queue._told(None)
                queue._wait_mark(start)
        marks: dict[int, Mark] = {}
        for step in self._steps:
            queue = queues[step[1]]
            if step[0] == _OP:
                queue._again(*step[2:])
            elif step[0] == _RECORD:
                marks[step[2]] = queue.mark()
            elif step[0] == _EXTERNAL:
                step[3]._do(queue, step[2], replayed=True)
            else:
                queue._wait_mark(marks[step[2]])

    def __repr__(self) -> str:
        return f"Graph({self.num_operations} operations{'' if self.ready else ', not usable'})"


class Capture:
    """The block in which launches on a stream are recorded; see ``Device.capture``."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        self.graph = Graph(device, stream)
        self._entered = False

    def __enter__(self) -> Graph:
        self._device._executor.check()
        if self._stream.capture is not None or self._entered:
            raise self._device._capture_error(
                f"stream {self._stream.name!r}", "begin another capture"
            )
        self._entered = True
        self._stream.capture = self.graph
        self._device._captures.append(self.graph)
        return self.graph

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.graph not in self._device._captures:
            raise self._device._capture_error(
                f"stream {self._stream.name!r}", "end a capture that is not under way"
            )
        self._device._captures.remove(self.graph)
        self.graph.end(whole=kind is None)

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
    graph: Graph | None = mark.graph
    if graph is not None and graph in graph.device._captures and queue.capture in (None, graph):
        graph.wait(queue, mark)
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
