# SPDX-License-Identifier: Apache-2.0
"""Graphs of the NPU: launches recorded by the runtime, captured by CANN when the block ends.

While a block captures, launches are written down as on any device: forks and joins are checked,
nothing reaches the hardware, and whatever is refused leaves streams and capture usable.  At the
end all of it is handed over at once, in this thread, to streams made for it and captured by
aclmdlRICaptureBegin and End.  So no program can disturb a capture, and one that fails leaves
nothing behind.  The mode is THREAD_LOCAL: a synchronous copy in the middle, which would freeze
contents, is refused by CANN.

A replay is aclmdlRIExecuteAsync on the stream it is given.  The captured addresses are used
again, so the graph keeps its buffers and its operators' workspace.  Replays of one graph do not
overlap: each waits for the one before.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from kvcore.errors import CaptureError, KVCoreError
from kvcore.npu.cann import constants
from kvcore.npu.driver.handles import Handles, bare
from kvcore.runtime._marks import KIND_WORK
from kvcore.runtime.graph import Capture, Graph

if TYPE_CHECKING:
    from kvcore.npu.driver.device import AclDevice
    from kvcore.npu.driver.records import Events
    from kvcore.npu.driver.stream import AclStream
    from kvcore.runtime._queue import Queue
    from kvcore.runtime.external import ExternalEvent

__all__ = ["AclCapture", "AclGraph", "Models"]

NEEDED = (
    "aclmdlRICaptureBegin",
    "aclmdlRICaptureEnd",
    "aclmdlRIExecuteAsync",
    "aclmdlRIDestroy",
)
_OP, _RECORD, _WAIT = range(3)


class Models:
    """The captured graphs of one device, and what they own."""

    def __init__(self, cann: Any, events: Events) -> None:
        self._cann = cann
        self._events = events
        self._live: dict[int, tuple[list[Any], list[int]]] = {}
        self._gone: deque[int] = deque()

    def add(self, graph: AclGraph, model: int, owned: list[Any], events: list[int]) -> None:
        """Keep a model, the memory and the events it uses, until its graph has gone."""
        self._live[model] = owned, events
        weakref.finalize(graph, self._gone.append, model).atexit = False

    def collect(self) -> list[KVCoreError]:
        """Destroy the models whose graphs have gone; the device is set on this thread."""
        errors: list[KVCoreError] = []
        while self._gone:
            self._destroy(self._gone.popleft(), errors)
        return errors

    def close(self) -> list[KVCoreError]:
        """Destroy every model; what went wrong."""
        errors: list[KVCoreError] = []
        self._gone.clear()
        for model in list(self._live):
            self._destroy(model, errors)
        return errors

    def _destroy(self, model: int, errors: list[KVCoreError]) -> None:
        found = self._live.pop(model, None)
        if found is None:
            return
        try:
            self._cann.aclmdlRIDestroy(model)
        except KVCoreError as error:
            errors.append(bare(error))
        self.give_back(*found, errors)

    def give_back(self, owned: list[Any], events: list[int], errors: list[KVCoreError]) -> None:
        """Free what a model that is no more has used."""
        _release(owned, errors)
        errors += self._events.drop(events)


def _release(owned: list[Any], errors: list[KVCoreError]) -> None:
    """Free the operators' memory among what was kept; arrays go by themselves."""
    for item in owned:
        if hasattr(item, "address") and callable(getattr(item, "free", None)):
            try:
                item.free()
            except KVCoreError as error:
                errors.append(bare(error))
    owned.clear()


class AclGraph(Graph):
    """Recorded launches that CANN has captured; ``replay`` runs them as one launch."""

    device: AclDevice

    def __init__(self, device: AclDevice, origin: AclStream) -> None:
        super().__init__(device, origin)
        self._model = 0
        self._event = 0
        #: Held while a replay is handed over: to wait for the last one and to be it is one step.
        self.turn = threading.Lock()
        self.reads: tuple[Any, ...] = ()
        self.writes: tuple[Any, ...] = ()

    def external(self, queue: Queue, event: ExternalEvent, verb: str) -> None:
        """Refused: what CANN captures are ordinary events."""
        raise self.device._capture_error(
            f"stream {queue.name!r}", f"{verb} an external event, which this backend cannot capture"
        )

    def end(self, *, whole: bool) -> None:
        """Give the streams back and capture; CaptureError when either cannot be."""
        super().end(whole=whole)
        if not whole:
            return
        self.ready = False
        plans = [step[3] for step in self._steps if step[0] == _OP]
        self.reads = tuple([access for plan in plans for access in plan.reads])
        self.writes = tuple([access for plan in plans for access in plan.writes])
        device = self.device
        with device._bind():
            device._close_errors += device._models.collect()
            owned: list[Any] = []
            events: list[int] = []
            try:
                self._event = device._events.make(timing=False)
                events.append(self._event)
                self._model = self._capture(owned, events)
            except BaseException as error:
                device._models.give_back(owned, events, device._close_errors)
                if not isinstance(error, KVCoreError) or isinstance(error, CaptureError):
                    raise
                raise CaptureError(
                    f"graph: expected launches that CANN can capture, got: {error}",
                    argument="graph",
                    seen=str(error),
                    code=error.code,
                ) from error
            device._models.add(self, self._model, owned, events)
            self.ready = True

    def _capture(self, owned: list[Any], made: list[int]) -> int:
        device = self.device
        cann = device._cann
        streams = Handles(cann, device.device_id)
        events: dict[int, int] = {}
        model = ctypes.c_void_p()
        joined: list[int] = []
        begun = False
        try:
            handles = [streams.make() for _ in self._queues]
            cann.aclmdlRICaptureBegin(handles[0], constants.ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL)
            begun = True
            for step in self._steps:
                handle = handles[step[1]]
                if step[0] == _OP:
                    step[3].hand_over(handle, owned.append)
                elif step[0] == _RECORD:
                    event = events[step[2]] = device._events.make(timing=False)
                    made.append(event)
                    cann.aclrtRecordEvent(event, handle)
                else:
                    cann.aclrtStreamWaitEvent(handle, events[step[2]])
                    joined.append(handle)
            begun = False
            cann.aclmdlRICaptureEnd(handles[0], ctypes.byref(model))
        except BaseException:
            if begun:
                self._end_badly(handles[0], set(joined) - {handles[0]}, made)
            device._close_errors += streams.close(forced=True)
            raise
        device._close_errors += streams.close()
        return model.value or 0

    def _end_badly(self, handle: int, forks: set[int], made: list[int]) -> None:
        """An operation could not be captured: join the forks, end the capture, throw it away."""
        device, cann = self.device, self.device._cann
        for fork in forks:
            with contextlib.suppress(KVCoreError):  # the end will fail, but end it will
                event = device._events.make(timing=False)
                made.append(event)
                cann.aclrtRecordEvent(event, fork)
                cann.aclrtStreamWaitEvent(handle, event)
        model = ctypes.c_void_p()
        with contextlib.suppress(KVCoreError):
            cann.aclmdlRICaptureEnd(handle, ctypes.byref(model))
        if model.value:
            try:
                cann.aclmdlRIDestroy(model.value)
            except KVCoreError as error:
                device._close_errors.append(bare(error))

    def _launch(self, stream: Any) -> None:
        stream._again(KIND_WORK, _Replay(self, stream), None, 0.0, None)


class _Replay:
    """One replay on a stream."""

    __slots__ = ("_graph", "_losses", "_stream", "num_descriptors", "reads", "writes")
    name = "replay"

    def __init__(self, graph: AclGraph, stream: AclStream) -> None:
        self._graph = graph
        self._stream = stream
        self._losses = stream.losses
        self.reads = graph.reads
        self.writes = graph.writes
        self.num_descriptors = graph.num_operations

    def touched(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """All that the graph's launches may touch: which rows, only the device knows."""
        return self.reads, self.writes

    def run(self) -> None:
        """Hand over."""
        graph, stream = self._graph, self._stream
        device = stream.device
        cann = device._cann
        with device._bind(), stream._using(self._losses) as handle:
            if not handle or not stream._took(self, self._losses):
                return  # behind a failure that the queue has not heard of yet
            with graph.turn:
                cann.aclrtStreamWaitEvent(handle, graph._event)
                cann.aclmdlRIExecuteAsync(graph._model, handle)
                cann.aclrtRecordEvent(graph._event, handle)


class AclCapture(Capture):
    """The block in which launches on a stream are recorded; see ``Device.capture``."""

    def __init__(self, device: AclDevice, stream: Any) -> None:
        super().__init__(device, stream)
        self._cann = device._cann
        self.graph: AclGraph = AclGraph(device, stream)

    def __enter__(self) -> Graph:
        for name in NEEDED:
            if not self._cann.has(name):
                getattr(self._cann, name)  # raises: it is not in this CANN
        return super().__enter__()
