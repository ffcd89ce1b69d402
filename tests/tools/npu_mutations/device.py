# SPDX-License-Identifier: Apache-2.0
"""Each rule of ACL's runtime, broken in the backend: the double or the bytes must tell."""

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
from mutating import Break, Patch, instead, never, reordered, seen_under, twice
from npu_fixtures import clean as clean

import kvcore
from kvcore.npu.call import launch
from kvcore.npu.cann import constants, library
from kvcore.npu.driver import flight, graph, handles, heap, hostcalls, records

MUTATIONS: dict[str, Break] = {}


def mutation(function: Break) -> Break:
    MUTATIONS[function.__name__] = function
    return function


for _name, _order in {
    "aclrtRecordEvent": (1, 0),
    "aclrtStreamWaitEvent": (1, 0),
    "aclmdlRIExecuteAsync": (1, 0),
    "aclrtEventElapsedTime": (0, 2, 1),
    "aclrtMemsetAsync": (0, 2, 1, 3, 4),
    "aclrtMemcpyAsync": (2, 1, 0, 3, 4, 5),
}.items():
    MUTATIONS[f"{_name}, arguments in another order"] = reordered(_name, *_order)
for _name in (
    "aclrtFree",
    "aclrtFreeHost",
    "aclrtHostUnregister",
    "aclrtDestroyEvent",
    "aclrtDestroyStream",
    "aclmdlRIDestroy",
    "aclmdlRICaptureBegin",
    "aclmdlRICaptureEnd",
):
    MUTATIONS[f"{_name} twice"] = twice(_name)
    MUTATIONS[f"{_name} never"] = never(_name)
MUTATIONS["aclrtStreamWaitEvent never"] = never("aclrtStreamWaitEvent")


@mutation
def threads_without_a_device(patch: Patch) -> None:
    patch.setattr(library.Cann, "set_device", lambda self, device_id: None)


@mutation
def memory_goes_before_the_stream_has_passed(patch: Patch) -> None:
    took = flight.Flight.took
    kept = (records.HardwareRecord, records.Dependency, hostcalls.HostCall)
    patch.setattr(
        flight.Flight,
        "took",
        lambda self, item, losses=None: (
            took(self, item, losses) if isinstance(item, kept) else None
        ),
    )


@mutation
def a_host_function_calls_acl(patch: Patch) -> None:
    original = hostcalls.launch

    def around(cann: Any, handle: int, run: Callable[[], object]) -> Any:
        return original(cann, handle, lambda: (cann.status("aclrtSetDevice")(0), run()))

    patch.setattr(hostcalls, "launch", around)


class Wide(ctypes.Structure):
    _fields_ = (("attr", ctypes.c_int32), ("value", ctypes.c_uint64))


class WideConfig(ctypes.Structure):
    _fields_ = (("attrs", ctypes.POINTER(Wide)), ("numAttrs", ctypes.c_size_t))


@mutation
def an_attribute_of_16_bytes(patch: Patch) -> None:
    def act(_: Any, original: Any, found: Any, size: int, config: Any) -> Any:
        attribute = Wide(constants.ACL_RT_MEM_ATTR_VA_FLAG, 1)
        wide = WideConfig(ctypes.pointer(attribute), 1)
        kind = type(config._obj)
        return original(found, size, ctypes.cast(ctypes.byref(wide), ctypes.POINTER(kind)))

    instead(patch, "aclrtMallocHostWithCfg", act)


def copying(change: Callable[..., tuple[Any, ...]]) -> Callable[[Patch], None]:
    return lambda patch: instead(
        patch, "aclrtMemcpyAsync", lambda _, original, *given: original(*change(*given))
    )


MUTATIONS["kinds of copies the other way"] = copying(
    lambda to, most, source, n, kind, s: (to, most, source, n, {1: 2, 2: 1}.get(kind, kind), s)
)
MUTATIONS["destMax less than count"] = copying(
    lambda to, most, source, n, kind, s: (to, most - 1, source, n, kind, s)
)
MUTATIONS["count in elements"] = copying(
    lambda to, most, source, n, kind, s: (to, most, source, n // 4, kind, s)
)
MUTATIONS["everything on the default stream"] = copying(
    lambda to, most, source, n, kind, s: (to, most, source, n, kind, 0)
)


@mutation
def pinned_memory_freed_as_the_device_s(patch: Patch) -> None:
    instead(patch, "aclrtFreeHost", lambda cann, _, address: cann.aclrtFree(address))


@mutation
def registered_memory_that_begins_within_a_page(patch: Patch) -> None:
    def act(_: Any, original: Any, address: int, *rest: Any) -> Any:
        return original(address + 64, *rest)

    instead(patch, "aclrtHostRegister", act)


@mutation
def swapped_memory_is_freed_before_it_is_unregistered(patch: Patch) -> None:
    def act(cann: Any, original: Any, address: int) -> Any:
        cann.aclrtFreeHost(address)
        return original(address)

    instead(patch, "aclrtHostUnregister", act)


@mutation
def copies_use_the_device_s_address_of_swapped_memory(patch: Patch) -> None:
    show = heap.Heap._show

    def around(self: Any, piece: heap.Piece) -> Any:
        if piece.space == "swapped":
            piece = heap.Piece("swapped", piece.got, piece.seen_at, piece.nbytes, piece.seen_at)
        return show(self, piece)

    patch.setattr(heap.Heap, "_show", around)


@mutation
def events_without_timing(patch: Patch) -> None:
    patch.setattr(constants, "ACL_EVENT_TIME_LINE", 0)


@mutation
def events_are_destroyed_before_anything(patch: Patch) -> None:
    def around(self: Any) -> Any:
        self._cann.aclrtDestroyEvent(EVENTS[-1]._all[0])
        return []

    made = records.Events.make

    def make(self: Any, timing: bool) -> int:
        EVENTS.append(self)
        return made(self, timing)

    patch.setattr(records.Events, "make", make)
    patch.setattr(handles.Handles, "settle", around)


EVENTS: list[Any] = []


@mutation
def a_capture_ends_in_another_thread(patch: Patch) -> None:
    def act(cann: Any, original: Any, *given: Any) -> Any:
        errors: list[Exception] = []

        def end() -> None:
            try:
                cann.set_device(0)
                original(*given)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return 0

    instead(patch, "aclmdlRICaptureEnd", act)


@mutation
def a_capture_waits_for_its_stream(patch: Patch) -> None:
    def act(cann: Any, original: Any, handle: int, *rest: Any) -> Any:
        cann.aclrtSynchronizeStream(handle)
        return original(handle, *rest)

    instead(patch, "aclmdlRICaptureEnd", act)


@mutation
def a_graph_s_memory_goes_at_once(patch: Patch) -> None:
    add = graph.Models.add

    def around(self: Any, one: Any, model: int, owned: list[Any], events: list[int]) -> None:
        graph._release(owned, [])
        add(self, one, model, owned, events)

    patch.setattr(graph.Models, "add", around)


# ---------------------------------------------------------------- the test


def program() -> Iterator[str]:
    """What a program does with an NPU; says what comes out wrong."""
    with kvcore.Device(backend="aclnn") as dev:
        one, two = dev.stream(), dev.stream()
        begin, end = dev.event(enable_timing=True), dev.event(enable_timing=True)
        there, here, swapped = dev.empty(64), dev.empty_host(64), dev.empty_swapped(64)
        cache = dev.empty((2, 4, 2, 16), "float16")
        key, slots = dev.empty((2, 2, 16), "float16"), dev.empty(2, "int32")
        host_slots = dev.empty_host(2, "int32")
        host_slots.numpy()[:] = [1, 6]
        out = dev.empty_host((2, 4, 2, 16), "float16")

        one.fill(there, 3)
        filled = one.record_event()
        two.wait_event(filled)
        two.copy(here, there)
        two.synchronize_blocking(20)
        if not (here.numpy() == 3).all():
            yield "a copy has not waited"
        one.record_event(begin)
        one.copy(slots, host_slots)
        one.fill(key, 1)
        one.fill(cache, 0)
        one.fill(there, 0)
        short = dev.empty(64)
        one.copy(short, there)
        short.free()
        del short
        dev.empty(64).free()
        gc.collect()
        dev.empty(64).free()
        here.numpy()[:] = 5
        one.copy(there, here)
        called: list[int] = []
        one.call(called.append, 1)
        one.record_event(end)
        two.wait_event(end)
        two.copy(swapped, there)
        plain = np.zeros(64, np.float32)
        two.copy(plain, there)
        two.synchronize_blocking(20)
        if not (swapped.numpy() == 5).all() or not (plain == 5).all():
            yield "wrong bytes of copies"
        if called != [1]:
            yield "the host function has not run once"
        if begin.elapsed_time(end) < 0:
            yield "time goes back"
        if not end.query():
            yield "an event is not reached"

        plan = kvcore.plan_scatter_pa_kv_cache(key, cache, slots)
        with dev.capture(one) as captured:
            one.launch(plan)
            one.copy(out, cache)
        captured.replay(one)
        one.synchronize_blocking(20)
        rows = out.numpy().reshape(8, 32)
        if not (rows[[1, 6]] == 1).all() or rows[[0, 2, 3, 4, 5, 7]].any():
            yield "wrong bytes of a replay"
        captured.replay(two)
        one.fill(there, 0)  # nobody waits for either


def amiss(double: Double) -> list[str]:
    found: list[str] = []
    try:
        found += program()
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    gc.collect()
    with contextlib.suppress(kvcore.KVCoreError):
        launch.release(None, 0)
    found += double.violations()
    if double.live():
        found.append(f"left behind: {double.live_text()}")
    return found


def test_nothing_is_amiss_without_a_mutation(clean: Double) -> None:
    assert amiss(clean) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_noticed(clean: Double, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = seen_under(monkeypatch, MUTATIONS[name], lambda: amiss(clean))
    assert found, f"{name} went unnoticed"
