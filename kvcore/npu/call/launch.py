# SPDX-License-Identifier: Apache-2.0
"""The two phases of a call, on a stream.

Phase one checks and sizes, phase two queues.  The executor that links them is used up by phase
two whether it succeeds or not, and is destroyed here only when phase two was never reached.
Tensors are destroyed as soon as phase two is back; workspace and copies live until the stream has
passed.  Nothing waits for the device, but for what options.check asks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from kvcore._core.plan import Plan
from kvcore.errors import KVCoreError, ParamInvalidError, fail
from kvcore.npu import options
from kvcore.npu.call import copies, memory
from kvcore.npu.call.arrays import Argument, describe, place
from kvcore.npu.call.call import OperatorCall
from kvcore.npu.call.gather import GatherCall
from kvcore.npu.call.memory import Keep, Room
from kvcore.npu.call.owners import Owner, owner_of
from kvcore.npu.call.scatter import KeyScatterCall, ScatterCall
from kvcore.npu.call.selection import SelectionCall
from kvcore.npu.call.tensors import TensorHandles
from kvcore.npu.call.update import UpdateCall
from kvcore.npu.call.values import Values
from kvcore.npu.cann import library
from kvcore.npu.cann.library import PHASE_ONE, Cann

__all__ = ["CALLS", "PreparedCall", "memory", "onto", "prepare", "release"]

#: By kvcore's name of the operator.
CALLS: dict[str, type[OperatorCall]] = {
    "scatter_pa_kv_cache": ScatterCall,
    "scatter_pa_cache": KeyScatterCall,
    "kv_cache_update": UpdateCall,
    "gather_pa_kv_cache": GatherCall,
    "gather_selection_kv_cache": SelectionCall,
}


#: Sets of host values that a form keeps for reuse; each run in progress takes one.
MOST_SPARE = 4


@dataclass(frozen=True, slots=True)
class Target:
    """Where a task's launches go."""

    stream: int
    device_id: int
    keep: Keep | None


_target: ContextVar[Target | None] = ContextVar("kvcore_aclnn_target", default=None)


@contextmanager
def onto(*, stream: int, device_id: int, keep: Keep | None = None) -> Iterator[None]:
    """Send the launches of the block to that stream.

    keep: called with every piece of device memory a launch took, which is the caller's to free
    once the stream has passed; None: this module sees to it.
    """
    token = _target.set(Target(stream, device_id, keep))
    try:
        yield
    finally:
        _target.reset(token)


def release(stream: int | None, device_id: int) -> None:
    """Free what is held for a stream that has been synchronised; None: all of the device's."""
    memory.release(library.current(), device_id, stream)


class Form:
    """All that calls of one Spec have in common on this machine, checked once, held by the Spec.

    described: the arguments without their arrays; spare: values that no run uses just now.
    """

    def __init__(self, plan: Plan, cann: Cann, described: list[Argument | None]) -> None:
        self.cann = cann
        self.call: OperatorCall = CALLS[plan.operator.name](plan, described, cann.soc())
        self.described: list[Argument | None] = [
            one and one.described() for one in self.call.arguments
        ]
        self.owner: type[Owner] = owner_of(plan)
        self._spare: list[Values] = []

    def take_values(self) -> Values:
        """Take values for one run; ``give_back`` returns them after it."""
        try:
            return self._spare.pop()
        except IndexError:
            return Values(self.call)

    def give_values(self, values: Values) -> None:
        """Return the values of a run, for another run to use."""
        if len(self._spare) < MOST_SPARE:
            self._spare.append(values)


def prepare(plan: Plan) -> PreparedCall:
    """Make what plan.run() calls; raises for what this machine cannot be given."""
    cann = library.current()
    form = plan.spec.form
    known = form is not None and form.cann is cann
    described = form.described if known else describe(plan)
    placed = place(described, plan)
    if not known:
        form = Form(plan, cann, described)
        placed = place(form.described, plan)
        # An argument that the call leaves out belongs to it all the same.
        plan.spec.form = form
    if plan.extra is not None:
        fail("stats", "None on an NPU (its kernels count nothing)", "a dict")
    if form.call.harm is not None:
        form.call.refuse_harm()
    return PreparedCall(form, form.call.bound(placed))


class PreparedCall:
    """One plan's call: queue it, any number of times, one at a time."""

    def __init__(self, form: Form, call: OperatorCall) -> None:
        self._cann = form.cann
        self._form = form
        self._call = call
        # Look the functions up now, so that one which is missing is reported before any launch.
        self._phase_one = getattr(form.cann, call.function + PHASE_ONE)
        self._phase_two = getattr(form.cann, call.function)
        first = strange = None
        for one in call.arguments:
            if one is not None and one.on_device:
                first = first or one
                if (one.key is None) != (first.key is None):
                    # Its owner has other streams than the first one's: a stream must be named.
                    strange = strange or one
        assert first is not None
        self._strange: Argument | None = strange
        self._owner = form.owner(first)

    def __call__(self) -> Any:
        """Queue the call; returns what the operator returns, which the device fills in later."""
        cann, call = self._cann, self._call
        stream, keep = self._where()
        values = self._form.take_values()
        try:
            with cann.on_device(self._owner.device_id):
                values.read_host(call.arguments)
                with self._owner.room(cann, stream, keep) as room:
                    return self._queue(values, room, stream)
        finally:
            self._form.give_values(values)

    def _queue(self, values: Values, room: Room, stream: int) -> Any:
        cann, call = self._cann, self._call
        if room.keep is None:  # a runtime's queue keeps what its launches use
            for one in call.arguments:
                if one is not None and one.on_device:
                    room.hold(self._owner.keeper(one))
        result, answer = self._answer(stream)
        room.hold(result)
        placed: list[Argument | None] = list(call.arguments)
        if call.copied:
            self._place_copies(placed, values, room, index_only=True)
        self._check(values, placed, stream)
        if call.is_empty():
            call.leave_empty(cann, stream)
        else:
            if call.copied:
                self._place_copies(placed, values, room, index_only=False)
            self._place_uploads(placed, values, room)
            with TensorHandles(cann) as handles:
                words = call.phase_one(handles, placed, room, answer)
                self._run(words, room, stream)
        return call.returned() if answer is None else result

    def check_values(self) -> None:
        """Check the values, whatever check= says, and queue nothing.

        Waits for the stream where values are on the device.
        """
        stream, keep = self._where()
        values = self._form.take_values()
        try:
            with self._cann.on_device(self._owner.device_id):
                values.read_host(self._call.arguments)
                with self._owner.room(self._cann, stream, keep) as room:
                    placed: list[Argument | None] = list(self._call.arguments)
                    self._place_copies(placed, values, room, index_only=True)
                    self._check(values, placed, stream, whole=True)
        finally:
            self._form.give_values(values)

    def _where(self) -> tuple[int, Keep | None]:
        target = _target.get()
        if target is None:
            if self._strange is not None:
                first, name = self._owner.like, self._strange.name
                fail(
                    name,
                    f"memory of the same owner as {first.name}, or stream.launch of a plan",
                    "a Device's buffer and an array of none, which share no stream",
                )
            return self._owner.stream(), None
        if target.device_id != self._owner.device_id:
            raise ParamInvalidError(
                f"stream: expected one of device {self._owner.device_id}, where the arrays are, "
                f"got one of device {target.device_id}",
                argument="stream",
                seen=target.device_id,
                expected=self._owner.device_id,
            )
        return target.stream, target.keep

    def _answer(self, stream: int) -> tuple[Any, Argument | None]:
        rows = self._call.answer_rows()
        if rows is None:
            return None, None
        result, answer = self._owner.empty(rows)
        if answer.nbytes:
            # The kernel writes the rows of the call; those past them are 0.
            self._cann.aclrtMemsetAsync(answer.address, answer.nbytes, 0, answer.nbytes, stream)
        return result, answer

    def _place_copies(
        self, placed: list[Argument | None], values: Values, room: Room, index_only: bool
    ) -> None:
        for i in self._call.copied:
            one = self._call.arguments[i]
            assert one is not None
            if one.on_device and (i in values.copies) == index_only:
                address = room.take(f"copy of {one.name}", one.nbytes)
                copies.gather(self._cann, one, address, room.stream)
                placed[i] = one.placed(address)

    def _place_uploads(self, placed: list[Argument | None], values: Values, room: Room) -> None:
        for i in values.on_host:
            one = self._call.arguments[i]
            assert one is not None
            if one.name not in self._call.host_values:
                placed[i] = one.placed(room.put(values.copies[i]))

    def _check(
        self, values: Values, placed: list[Argument | None], stream: int, whole: bool = False
    ) -> None:
        """Check the values when all of them are at hand; whole: fetch those on the device too."""
        wanted = self._call.host_values
        if not values.copies:
            return
        complete = len(values.on_host) == len(values.copies)
        if not complete and (whole or wanted or options.check() == "device"):
            values.read_device(self._cann, stream, placed)
            complete = True
        if complete:
            values.check()
        if wanted:
            self._call.values(values.by_name())

    def _run(self, words: list[Any], room: Room, stream: int) -> None:
        size, executor = ctypes.c_uint64(0), ctypes.c_void_p()
        sized = reached = False
        try:
            self._phase_one(*words, ctypes.byref(size), ctypes.byref(executor))
            sized = True
            workspace = room.take("workspace", size.value) if size.value else None
            reached = True
            self._phase_two(workspace, size.value, executor, stream)
        except BaseException as error:
            # Phase two was not reached, so the executor is still ours to destroy.
            made = sized or not isinstance(error, KVCoreError)
            if made and executor.value and not reached:
                self._cann.status("aclDestroyAclOpExecutor")(executor)
            raise
