# SPDX-License-Identifier: Apache-2.0
"""More rules of ACL's runtime, each broken in the backend for the programs it matters to."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from double.direct import Double
from mutating import Break, Patch, instead, never, seen_under, twice, wrap
from npu_fixtures import clean as clean

import kvcore
from kvcore.errors import KVCoreError
from kvcore.npu.call import launch
from kvcore.npu.call import memory as pools
from kvcore.npu.cann import constants, library
from kvcore.npu.driver import heap, lane, records, transfers
from kvcore.npu.driver.device import AclDriver
from kvcore.npu.driver.handles import Handles
from kvcore.runtime.arguments import space_of
from kvcore.runtime.leaving import Life

Program = Callable[[Double, kvcore.Device], Iterator[str]]

# ---------------------------------------------------------------- programs


def polling(double: Double, dev: kvcore.Device) -> Iterator[str]:
    """Work is looked at, not waited for: a stream of the double starts when it is asked."""
    one, there, here = dev.stream(), dev.empty(64), dev.empty_host(64)
    there_too = dev.empty(64)
    one.fill(there, 3)
    one.copy(here, there)
    done = one.record_event()
    one.queue.lane._next_look = float("inf")  # a look for failures would wait a little
    before, first = double.num_calls("aclrtQueryEventStatus"), None
    while double.num_calls("aclrtQueryEventStatus") == before and not first:
        first = done.query()
    if first:
        yield "the first look waited"
    for _ in range(10**6):
        if done.query():
            break
    else:
        yield "it never ends"
    if not (here.numpy() == 3).all():
        yield "done too soon"
    one.fill(there_too, 1)


def copying(double: Double, dev: kvcore.Device) -> Iterator[str]:
    """Every pair of spaces, patterns, and pieces that go as one batch."""
    one, two = dev.stream(), dev.stream()
    there, here = dev.empty((8, 64)), dev.empty_host((8, 64))
    plain, back = np.arange(512, dtype=np.float32).reshape(8, 64), np.zeros((8, 64), np.float32)
    one.copy(there, plain)
    one.copy(back, there)
    one.synchronize_blocking(20)
    if not (plain == back).all():
        yield "wrong bytes of pageable copies"
    one.fill(there, 1.25)
    one.copy(here[:, :32], there[:, 32:])
    one.copy(here[:, 32:], there[:, 32:])
    one.copy(there[:, :16], here[:, 16:32])
    two.wait_event(one.record_event())
    two.copy(back, there)
    two.synchronize_blocking(20)
    if not (here.numpy() == 1.25).all() or not (back == 1.25).all():
        yield "wrong bytes of batches"


def failing(double: Double, dev: kvcore.Device) -> Iterator[str]:
    """What lies behind a fault does not run."""
    one, there, here = dev.stream(), dev.empty(64), dev.empty_host(64)
    ran: list[int] = []
    double.fail_async("aclrtMemcpyAsync", 1, 507015)
    one.copy(there, here)
    one.call(ran.append, 1)
    try:
        one.synchronize_blocking(20)
        yield "no failure"
    except kvcore.StreamError:
        pass
    if ran:
        yield "a host function ran behind a fault"


def holding(double: Double, dev: kvcore.Device) -> Iterator[str]:
    """A wait that takes too long, and goes on."""
    one, there, here = dev.stream(), dev.empty(64), dev.empty_host(64)
    one.fill(there, 3)
    one.copy(here, there)
    double.runtime.kvdouble_hold(True)
    waiting = "aclrtSynchronizeEventWithTimeout"
    before, failure = double.num_calls(waiting), None
    while double.num_calls(waiting) == before and failure is None:
        try:
            one.synchronize_blocking(0.001)
            yield "no timeout"
        except kvcore.StreamError as error:
            if error.code != 507046:
                failure = error
    if failure is not None:
        yield f"another failure than a timeout: {failure}"
    double.runtime.kvdouble_hold(False)
    one.synchronize_blocking(20)
    if not (here.numpy() == 3).all():
        yield "the work has not gone on"


def _scatter(dev: kvcore.Device, cache: kvcore.Buffer) -> kvcore.Plan:
    key, slots = dev.empty((2, 2, 16), "float16"), dev.empty(2, "int32")
    one = dev.default_stream
    one.fill(key, 1)
    one.fill(slots, 5)
    one.fill(cache, 0)
    one.synchronize_blocking(20)
    return kvcore.plan_scatter_pa_kv_cache(key, cache, slots)


def capturing(double: Double, dev: kvcore.Device) -> Iterator[str]:
    """A fork and a join in a graph."""
    one, two = dev.stream(), dev.stream()
    cache, out = dev.empty((2, 4, 2, 16), "float16"), dev.empty_host((2, 4, 2, 16), "float16")
    other, there = dev.empty_host(64), dev.empty(64)
    plan = _scatter(dev, cache)
    with dev.capture(one) as graph:
        fork = one.record_event()
        two.wait_event(fork)
        two.fill(there, 7)
        two.copy(other, there)
        one.launch(plan)
        one.wait_event(two.record_event())
        one.copy(out, cache)
    graph.replay(one)
    one.synchronize_blocking(20)
    if not (other.numpy() == 7).all() or not (out.numpy().reshape(8, 32)[5] == 1).all():
        yield "wrong bytes of a replay"


def two_queues(double: Double, dev: kvcore.Device) -> Iterator[str]:
    """Kernels of two streams that nothing orders; nobody waits for what comes last."""
    streams = [dev.stream(), dev.stream()]
    plans = [_scatter(dev, dev.empty((2, 4, 2, 16), "float16")) for _ in streams]
    for one, plan in zip(streams, plans, strict=True):
        one.launch(plan)
    with dev.capture(streams[0]) as graph:
        streams[0].launch(plans[0])
    graph.replay(streams[1])
    yield from ()


def swapping(double: Double, dev: kvcore.Device) -> Iterator[str]:
    """Kernels read memory of the host."""
    one = dev.stream()
    cache = dev.empty((2, 4, 2, 16), "float16")
    key, slots = dev.empty_swapped((2, 2, 16), "float16"), dev.empty(2, "int32")
    key.numpy()[...] = 2
    one.fill(slots, 5)
    one.fill(cache, 0)
    one.launch(kvcore.plan_scatter_pa_kv_cache(key, cache, slots))
    out = dev.empty_host((2, 4, 2, 16), "float16")
    one.copy(out, cache)
    one.synchronize_blocking(20)
    if not (out.numpy().reshape(8, 32)[5] == 2).all():
        yield "wrong bytes"


PROGRAMS = (polling, copying, failing, holding, capturing, two_queues, swapping)


def amiss(double: Double, *programs: Program) -> list[str]:
    """Run them on a device each; what went wrong, by whoever noticed."""
    found: list[str] = []
    double.num_blocking()
    for program in programs:
        try:
            with kvcore.Device(backend="aclnn") as dev:
                found += program(double, dev)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        double.runtime.kvdouble_hold(False)
    gc.collect()
    with contextlib.suppress(KVCoreError):
        launch.release(None, 0)
    found += double.violations()
    if double.live():
        found.append(f"left behind: {double.live_text()}")
    blocking = double.num_blocking()
    if blocking:
        found.append(f"{blocking} copies of pageable memory held a thread up")
    return found


# ---------------------------------------------------------------- mutations

MUTATIONS: dict[str, tuple[Break, Program]] = {
    "a stream goes on behind a failure": (
        lambda patch: patch.setattr(constants, "ACL_STOP_ON_FAILURE", 0),
        failing,
    ),
    "a stream's failure mode is never set": (never("aclrtSetStreamFailureMode"), failing),
    "memory is registered twice": (twice("aclrtHostRegister"), swapping),
    "memory is registered with the other function's flag": (
        lambda patch: patch.setattr(constants, "ACL_HOST_REGISTER_MAPPED", 2),
        swapping,
    ),
    "timeouts are failures": (lambda patch: patch.setattr(records, "TIMEOUTS", ()), holding),
}


def mutation(program: Program) -> Callable[[Break], Break]:
    def add(function: Break) -> Break:
        MUTATIONS[function.__name__] = function, program
        return function

    return add


@mutation(polling)
def events_are_read_in_the_older_encoding(patch: Patch) -> None:
    patch.setattr(constants, "ACL_EVENT_RECORDED_STATUS_COMPLETE", 0)


@mutation(polling)
def events_are_asked_by_the_older_function(patch: Patch) -> None:
    instead(patch, "aclrtQueryEventStatus", lambda cann, _, *given: cann.aclrtQueryEvent(*given))


@mutation(polling)
def a_glance_of_less_than_for_ever(patch: Patch) -> None:
    patch.setattr(lane, "GLANCE_MS", -2)


@mutation(copying)
def events_cannot_be_waited_for(patch: Patch) -> None:
    instead(
        patch,
        "aclrtCreateEventExWithFlag",
        lambda _, original, event, flag: original(event, constants.ACL_EVENT_TIME_LINE),
    )


# ---------------------------------------------------------------- 1.4, 5.8: copies


@mutation(copying)
def pageable_memory_is_copied_as_pinned(patch: Patch) -> None:
    def space(buffer: object) -> str:
        found = space_of(buffer)
        return "host" if found == transfers.PAGEABLE else found

    patch.setattr(transfers, "space_of", space)


@mutation(copying)
def staging_memory_is_not_pinned(patch: Patch) -> None:
    wrap(
        patch,
        AclDriver,
        "scratch",
        lambda original, self, space, nbytes: (
            np.empty(nbytes, np.uint8) if space == "host" else original(self, space, nbytes)
        ),
    )


@mutation(copying)
def a_batch_goes_the_other_way(patch: Patch) -> None:
    host, device = "ACL_MEM_LOCATION_TYPE_HOST", "ACL_MEM_LOCATION_TYPE_DEVICE"
    patch.setattr(constants, host, constants.ACL_MEM_LOCATION_TYPE_DEVICE)
    patch.setattr(constants, device, 0)


@mutation(copying)
def a_batch_begins_at_its_second_piece(patch: Patch) -> None:
    def act(_: Any, original: Any, *given: Any) -> Any:
        given[6]._obj.value = 1
        return original(*given)

    instead(patch, "aclrtMemcpyBatchAsync", act)


@mutation(copying)
def free_memory_is_asked_of_another_kind(patch: Patch) -> None:
    patch.setattr(constants, "ACL_HBM_MEM", 0)


# ---------------------------------------------------------------- 1.7: host functions


@mutation(copying)
def host_functions_are_launched_as_callbacks(patch: Patch) -> None:
    def act(cann: Any, _: Any, handle: int, function: Any, number: int) -> Any:
        return cann.aclrtLaunchCallback(function, number, 1, handle)

    instead(patch, "aclrtLaunchHostFunc", act)


@mutation(copying)
def both_kinds_of_host_functions_on_a_stream(patch: Patch) -> None:
    def act(cann: Any, original: Any, handle: int, *rest: Any) -> Any:
        code = original(handle, *rest)
        cann.aclrtSubscribeReport(1, handle)
        return code

    instead(patch, "aclrtLaunchHostFunc", act)


# ---------------------------------------------------------------- 1.8: graphs


@mutation(capturing)
def a_fork_is_not_joined(patch: Patch) -> None:
    waits = 0

    def act(cann: Any, original: Any, handle: int, event: int) -> Any:
        nonlocal waits
        status, model = ctypes.c_int32(), ctypes.c_void_p()
        info = cann.aclmdlRICaptureGetInfo
        info(handle, ctypes.byref(status), ctypes.byref(model))
        waits += status.value == 1
        return original(handle, event) if status.value == 0 else 0

    instead(patch, "aclrtStreamWaitEvent", act)


@mutation(capturing)
def the_default_stream_is_captured(patch: Patch) -> None:
    instead(patch, "aclmdlRICaptureBegin", lambda _, original, handle, mode: original(0, mode))


@mutation(capturing)
def a_stream_is_captured_while_it_is(patch: Patch) -> None:
    instead(
        patch,
        "aclmdlRICaptureBegin",
        lambda _, original, handle, mode: (original(handle, mode), original(handle, mode))[0],
    )


@mutation(two_queues)
def a_graph_goes_while_it_runs(patch: Patch) -> None:
    def act(cann: Any, original: Any, model: int, handle: int) -> Any:
        original(model, handle)
        return cann.aclmdlRIDestroy(model)

    instead(patch, "aclmdlRIExecuteAsync", act)


# ---------------------------------------------------------------- 5.3, 5.8: streams, contexts


@mutation(two_queues)
def streams_share_a_workspace(patch: Patch) -> None:
    wrap(patch, pools, "pool_of", lambda original, cann, device_id, _: original(cann, device_id, 1))


@mutation(two_queues)
def leaving_waits_for_nothing(patch: Patch) -> None:
    """Each stream's mark, and each stream: either alone would do."""
    patch.setattr(Life, "marks", lambda self: [])
    patch.setattr(Handles, "settle", lambda self: [])
    wrap(patch, Life, "_close", lambda original, self: (_handed_over(self), original(self)))


def _handed_over(life: Life) -> None:
    for queue in life._core.queues:
        record: records.HardwareRecord = queue.mark().position
        while record.ready.pending:
            pass


@mutation(copying)
def every_thread_has_a_context_of_its_own(patch: Patch) -> None:
    made: dict[int, int] = {}

    def around(self: Any, device_id: int) -> None:
        number = threading.get_ident()
        if number not in made:
            context = ctypes.c_void_p()
            self.aclrtCreateContext(ctypes.byref(context), device_id)
            made[number] = context.value or 0
        self.aclrtSetCurrentContext(made[number])

    patch.setattr(library.Cann, "set_device", around)


# ---------------------------------------------------------------- 5.9: swapped memory


@mutation(swapping)
def kernels_get_the_host_s_address(patch: Patch) -> None:
    wrap(
        patch,
        heap.Heap,
        "_register",
        lambda original, self, address, size: (original(self, address, size), address)[1],
    )


@mutation(swapping)
def no_whole_pages_are_registered(patch: Patch) -> None:
    wrap(
        patch,
        heap.Heap,
        "_register",
        lambda original, self, address, size: original(self, address, size - 8),
    )


def _refused(*_: Any) -> Any:
    raise kvcore.BackendUnavailableError("not here", code=207000)


@mutation(swapping)
def plain_pinned_memory_is_taken_to_begin_with_a_page(patch: Patch) -> None:
    instead(patch, "aclrtMallocHostWithCfg", _refused)
    wrap(
        patch,
        heap.Heap,
        "_pinned",
        lambda original, self, size: original(self, size - heap.PAGE),
    )


@mutation(swapping)
def the_second_function_gets_the_first_one_s_flag(patch: Patch) -> None:
    instead(patch, "aclrtHostRegister", _refused)
    patch.setattr(constants, "ACL_HOST_REG_MAPPED", 0)


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_amiss_without_a_mutation(clean: Double, program: Program) -> None:
    assert amiss(clean, program) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_noticed(clean: Double, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    act, program = MUTATIONS[name]
    found = seen_under(monkeypatch, act, lambda: amiss(clean, program))
    assert found, f"{name} went unnoticed"
