# SPDX-License-Identifier: Apache-2.0
"""Graphs of the NPU: launches recorded by the runtime, captured by CANN when the block ends.

While a block captures, launches are recorded as on any device: forks and joins are checked,
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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcore.errors import CaptureError, KVCoreError
from kvcore.npu.cann import constants
from kvcore.npu.cann.status import bare
from kvcore.npu.driver.handles import Handles
from kvcore.npu.driver.work import Handover, work_of
from kvcore.runtime.abc import KIND_WORK, Launch, Record, Step, Wait

if TYPE_CHECKING:
    from kvcore.npu.driver.parts import Hardware, OnHardware
    from kvcore.npu.driver.records import Events
    from kvcore.runtime.queues._queue import Queue

__all__ = ["NEEDED", "AclProgram", "Models"]

NEEDED = (
    "aclmdlRICaptureBegin",
    "aclmdlRICaptureEnd",
    "aclmdlRIExecuteAsync",
    "aclmdlRIDestroy",
)


class Models:
    """The captured graphs of one device, and what they own."""

    def __init__(self, cann: Any, events: Events) -> None:
        self._cann = cann
        self._events = events
        self._live: dict[int, tuple[list[Any], list[int]]] = {}
        self._gone: deque[int] = deque()

    def add(self, graph: AclProgram, model: int, owned: list[Any], events: list[int]) -> None:
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


class AclProgram:
    """Recorded launches that CANN has captured; a replay runs them as one operation.

    reads, writes: all that the launches may touch.  event: recorded behind each replay.
    turn: held while a replay is handed over: to wait for the last one and to be it is one step.
    """

    def __init__(self, driver: Hardware, steps: Sequence[Step], queues: Sequence[Queue]) -> None:
        """Capture; the device is set on this thread.  CaptureError when CANN cannot."""
        self._driver = driver
        self.turn: threading.Lock = threading.Lock()
        launches = [step for step in steps if isinstance(step, Launch)]
        self.num_operations: int = len(launches)
        self.reads: tuple[Any, ...] = tuple(
            [access for step in launches for access in step.target.reads]
        )
        self.writes: tuple[Any, ...] = tuple(
            [access for step in launches for access in step.target.writes]
        )
        driver.complaints += driver.models.collect()
        owned: list[Any] = []
        events: list[int] = []
        try:
            self.event: Any = driver.events.make(timing=False)
            events.append(self.event)
            self.model: int = self._capture(steps, queues, owned, events)
        except BaseException as error:
            driver.models.give_back(owned, events, driver.complaints)
            if not isinstance(error, KVCoreError) or isinstance(error, CaptureError):
                raise
            raise CaptureError(
                f"graph: expected launches that CANN can capture, got: {error}",
                argument="graph",
                seen=str(error),
                code=error.code,
            ) from error
        driver.models.add(self, self.model, owned, events)

    def _capture(
        self, steps: Sequence[Step], queues: Sequence[Queue], owned: list[Any], made: list[int]
    ) -> int:
        driver = self._driver
        cann = driver.cann
        streams = Handles(cann, driver.device_id)
        events: dict[int, int] = {}
        model = ctypes.c_void_p()
        joined: list[int] = []
        begun = False
        try:
            handles = [streams.make() for _ in queues]
            cann.aclmdlRICaptureBegin(handles[0], constants.ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL)
            begun = True
            for step in steps:
                handle = handles[step.branch]
                if isinstance(step, Launch):
                    work = work_of(queues[step.branch].lane, step.target)
                    assert work is not None, "the lane refuses host functions in a capture"
                    work.hand_over(handle, owned.append)
                elif isinstance(step, Record):
                    event = events[step.number] = driver.events.make(timing=False)
                    made.append(event)
                    cann.aclrtRecordEvent(event, handle)
                elif isinstance(step, Wait):
                    cann.aclrtStreamWaitEvent(handle, events[step.number])
                    joined.append(handle)
            begun = False
            cann.aclmdlRICaptureEnd(handles[0], ctypes.byref(model))
        except BaseException:
            if begun:
                self._end_badly(handles[0], set(joined) - {handles[0]}, made)
            driver.complaints += streams.close(forced=True)
            raise
        driver.complaints += streams.close()
        return model.value or 0

    def _end_badly(self, handle: int, forks: set[int], made: list[int]) -> None:
        """An operation could not be captured: join the forks, end the capture, throw it away."""
        driver, cann = self._driver, self._driver.cann
        for fork in forks:
            with contextlib.suppress(KVCoreError):  # the end fails, but it ends
                event = driver.events.make(timing=False)
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
                driver.complaints.append(bare(error))

    def replay(self, queue: Queue) -> None:
        """Queue one replay of the captured graph, and return at once."""
        queue.again(KIND_WORK, _Replay(self, queue.lane), None, 0.0, None)


class _Replay(Handover):
    """One replay on a lane."""

    __slots__ = ("_lane", "_losses", "_program", "num_descriptors", "reads", "writes")
    name = "replay"

    def __init__(self, program: AclProgram, lane: OnHardware) -> None:
        self._program = program
        self._lane = lane
        self._losses = lane.flight.losses
        self.reads = program.reads
        self.writes = program.writes
        self.num_descriptors = program.num_operations

    def touched(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """All that the graph's launches may touch: which rows, only the device knows."""
        return self.reads, self.writes

    def run(self) -> None:
        """Hand the replay over to the hardware."""
        program, lane = self._program, self._lane
        cann = lane.npu.cann
        with lane.npu.bind(), lane.flight.using(self._losses) as handle:
            if not handle or not lane.flight.took(self, self._losses):
                return  # there was a failure that the queue does not have yet
            with program.turn:
                cann.aclrtStreamWaitEvent(handle, program.event)
                cann.aclmdlRIExecuteAsync(program.model, handle)
                cann.aclrtRecordEvent(program.event, handle)
