# SPDX-License-Identifier: Apache-2.0
"""A thread of the caller's is on the device that it was on, whatever it asks of kvcore."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from device_fixtures import npu
from double.direct import Double

import kvcore
from kvcore.npu.call import launch
from kvcore.npu.call.memory import allocate
from kvcore.npu.cann import library
from npu import Placed

__all__ = ["npu"]


def device_of_this_thread() -> int | None:
    found = ctypes.c_int32(-1)
    code = library.current().status("aclrtGetDevice")(ctypes.byref(found))
    return None if code else found.value


def arrays() -> dict[str, Any]:
    return {
        "key": np.ones((2, 2, 16), np.float16),
        "key_cache": np.zeros((2, 4, 2, 16), np.float16),
        "slot_mapping": np.array([0, 3], np.int32),
    }


def an_operator() -> None:
    placed = Placed(**arrays())
    kvcore.scatter_pa_kv_cache(**placed.arrays)
    assert placed.host("key_cache").any()
    placed.free()
    launch.release(None, 0)


def an_operator_that_is_refused() -> None:
    placed = Placed(**arrays())
    bad = placed.arrays | {"slot_mapping": np.array([0, 99], np.int32)}
    with pytest.raises(kvcore.KVCoreError):
        kvcore.scatter_pa_kv_cache(**bad, backend="aclnn")
    placed.free()
    launch.release(None, 0)


def memory_given_back() -> None:
    allocate(library.current(), 0, 64).free()


def a_device() -> None:
    with kvcore.Device(backend="aclnn") as dev:
        one, two = dev.stream(), dev.stream()
        begin, end = dev.event(enable_timing=True), dev.event(enable_timing=True)
        there, here, swapped = dev.empty(64), dev.empty_host(64), dev.empty_swapped(64)
        assert device_of_this_thread() == 1
        one.record_event(begin)
        one.fill(there, 1)
        one.call(lambda: None)
        one.record_event(end)
        two.wait_event(end)
        two.copy(here, there)
        two.copy(swapped, there)
        assert device_of_this_thread() == 1
        two.query()
        assert device_of_this_thread() == 1
        two.synchronize_blocking()
        one.synchronize_blocking()
        begin.elapsed_time(end)
        assert device_of_this_thread() == 1
        with dev.capture(one) as graph:
            one.fill(there, 2)
        graph.replay(one)
        one.synchronize_blocking()
        assert device_of_this_thread() == 1
        kept = here.numpy()
        del there, graph
        gc.collect()
    assert device_of_this_thread() == 1
    del here, kept


def awaits() -> None:
    async def main() -> None:
        async with kvcore.Device(backend="aclnn") as dev:
            stream, buffer = dev.stream(), dev.empty(64)
            for _ in range(3):
                stream.fill(buffer, 1)
                await stream.synchronize()
                assert device_of_this_thread() == 1

    anyio.run(main)


def a_device_that_fails() -> None:
    CURRENT[0].fail_async("aclrtMemsetAsync", 1, 507015)
    with kvcore.Device(backend="aclnn") as dev:
        stream, buffer = dev.stream(), dev.empty(64)
        stream.fill(buffer, 0)
        with pytest.raises(kvcore.StreamError):
            stream.synchronize_blocking()
        assert device_of_this_thread() == 1


CURRENT: list[Double] = []
USES: list[Callable[[], None]] = [
    an_operator,
    an_operator_that_is_refused,
    memory_given_back,
    a_device,
    awaits,
    a_device_that_fails,
]


@pytest.fixture
def two(npu: Double) -> Double:
    npu.runtime.kvdouble_devices(2)
    library.forget()
    CURRENT[:] = [npu]
    return npu


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_thread_stays_on_its_device(two: Double, use: Callable[[], None]) -> None:
    cann = library.current()
    cann.set_device(1)
    before = cann.context()
    try:
        use()
        assert device_of_this_thread() == 1
        assert cann.context() == before
    finally:
        cann.set_device(0)


def test_a_context_of_the_thread_s_own_stays_too(two: Double) -> None:
    cann = library.current()
    own = ctypes.c_void_p()
    cann.aclrtCreateContext(ctypes.byref(own), 0)
    try:
        memory_given_back()
        assert cann.context() == own.value
    finally:
        cann.set_device(0)
        cann.aclrtDestroyContext(own)


def test_a_thread_without_a_device_has_nothing_to_go_back_to(two: Double) -> None:
    seen: list[Any] = []

    def work() -> None:
        seen.append(library.current().context())
        memory_given_back()
        seen.append(device_of_this_thread())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 0]
    assert two.num_calls("aclrtSetCurrentContext") == 0
