# SPDX-License-Identifier: Apache-2.0
"""The double's rules: each is broken once, and must be noticed; and what is right must pass."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest
from double.asking import (
    D2H,
    H2D,
    H2H,
    INT32,
    OUT,
    SYNC,
    TIME_LINE,
    Scatter,
    get,
    in_thread,
    noticed,
)
from double.direct import Double, Refused, pointer

# -- init, devices, threads -----------------------------------------------------------------------


def test_init_counts(double: Double) -> None:
    assert double.rt("aclInit", None) == 100002
    count = c_uint64()
    assert double.rt("aclFinalizeReference", byref(count)) == 0
    assert count.value == 1
    double.malloc(64)


def test_before_init(double: Double) -> None:
    assert double.rt("aclFinalize") == 0
    assert double.rt("aclFinalize") == 100037
    assert double.rt("aclrtSetDevice", 0) == 100001
    noticed(double, "[5.1]", "aclrtSetDevice", "before aclInit")


def test_finalize_of_another_party(double: Double) -> None:
    stream = double.stream()
    double.runtime.kvdouble_foreign_finalize()
    assert double.sync(stream) == 100001
    assert "another party" in (double.message() or "")
    assert double.rt("aclFinalizeReference", None) == 100037
    assert not double.violations()


def test_thread_without_device(double: Double) -> None:
    assert in_thread(lambda: double.rt("aclrtMalloc", byref(c_void_p()), c_size_t(8), 0)) == 107002
    noticed(double, "[5.1]", "no device")
    scatter = Scatter(double)
    size, executor = scatter.one()
    workspace = double.malloc(size)
    assert in_thread(lambda: scatter.two(workspace, size, executor)) == 561000
    noticed(double, "[5.1]", "no device")
    assert double.live("executor") == 0
    with pytest.raises(Refused) as refused:
        in_thread_raising(scatter.one)
    assert refused.value.code == 361001
    double.violations()


def in_thread_raising(function: Callable[[], Any]) -> None:
    def inner() -> Exception | None:
        try:
            function()
        except Exception as error:
            return error
        return None

    error = in_thread(inner)
    if error:
        raise error


@pytest.mark.parametrize(("count", "device", "code"), [(0, 0, 207004), (1, 1, 107001)])
def test_no_such_device(double: Double, count: int, device: int, code: int) -> None:
    double.runtime.kvdouble_devices(count)
    assert double.rt("aclrtSetDevice", device) == code
    assert (double.runtime.aclrtGetSocName() is None) == (count == 0)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("Ascend910B3", 2201),
        ("Ascend910_9391", 2201),
        ("Ascend950PR_9599", 3510),
        ("Ascend910_9589", 3510),
        ("Ascend910B", 1001),
        ("Ascend310P3", 2002),
    ],
)
def test_soc(double: Double, name: str, arch: int) -> None:
    double.soc(name)
    assert double.runtime.aclrtGetSocName() == name.encode()
    assert get(double, "aclrtGetDeviceInfo", c_int64, 0, 601) == arch


def test_context_of_another_device(double: Double) -> None:
    stream = double.stream()
    double.made("aclrtCreateContext", 0)
    assert double.sync(stream) == 107003
    noticed(double, "[5.8]", "another context")


def test_reset_device_takes_streams_along(double: Double) -> None:
    stream = double.stream()
    assert double.rt("aclrtResetDevice", 0) == 0
    double.start()
    assert double.sync(stream) == 107017
    noticed(double, "stream that was destroyed")


# -- errors and texts -----------------------------------------------------------------------------


def test_messages_are_of_a_thread_and_read_once(double: Double) -> None:
    assert double.message() is None
    double.fail("aclrtSetDevice", 1, 107001)
    assert double.rt("aclrtSetDevice", 0) == 107001
    assert in_thread(double.message) is None
    assert "aclrtSetDevice" in (double.message() or "")
    assert double.message() is None
    assert double.rt("aclrtPeekAtLastError", 0) == 107001
    assert double.rt("aclrtGetLastError", 0) == 107001
    assert double.rt("aclrtGetLastError", 0) == 0


def test_calls_are_recorded(double: Double) -> None:
    double.free(double.malloc(96))
    assert double.free(0) != 0
    double.violations()
    calls = double.calls()
    assert "aclrtMalloc(96, 0)" in calls
    assert calls[-1] == "aclrtFree((nil)) -> 100000"
    assert double.num_calls("aclrtFree") == 2


def test_ordered_failures(double: Double) -> None:
    double.fail("aclrtMalloc", 2, 207001)
    double.free(double.malloc(64))
    with pytest.raises(Refused) as refused:
        double.malloc(64)
    assert refused.value.code == 207001
    double.free(double.malloc(64))
    double.fail("aclrtMallocHost", 0, 207001)
    for _ in range(3):
        assert double.rt("aclrtMallocHost", byref(OUT), c_size_t(8)) == 207001
    address = double.malloc(64)
    double.fail("aclrtFree", 1, 507899)
    assert double.free(address) == 507899
    assert double.live("device_memory") == 0


def test_random_failures_repeat(double: Double) -> None:
    def codes() -> list[int]:
        double.runtime.kvdouble_fail_at_random(c_uint64(7), 300_000)
        return [double.rt("aclrtDeviceGetStreamPriorityRange", byref(c_int()), byref(c_int()))
                for _ in range(40)]  # fmt: skip

    first = codes()
    assert 0 < first.count(0) < 40
    assert codes() == first


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("symbol", "more"),
    [("aclrtMalloc", (0,)), ("aclrtMallocAlign32", (0,)), ("aclrtMallocHost", ())],
)
def test_malloc_of_nothing(double: Double, symbol: str, more: tuple[int, ...]) -> None:
    assert double.rt(symbol, byref(OUT), c_size_t(0), *more) == 100000
    noticed(double, "[1.4]", "size is 0")


def test_malloc_policy(double: Double) -> None:
    double.free(double.made("aclrtMalloc", c_size_t(64), 0x1002))
    assert double.rt("aclrtMalloc", byref(OUT), c_size_t(64), 8) == 107000
    noticed(double, "[2]", "policy")


def test_out_of_memory(double: Double) -> None:
    double.runtime.kvdouble_capacity(4096)
    address = double.malloc(2048)
    assert address % 64 == 0
    assert double.rt("aclrtMalloc", byref(OUT), c_size_t(3000), 0) == 207001
    free, total = c_size_t(), c_size_t()
    assert double.rt("aclrtGetMemInfo", 1, byref(free), byref(total)) == 0
    assert (free.value, total.value) == (2048, 4096)
    double.free(address)


class Attribute(ctypes.Structure):
    _pack_ = 4
    _layout_ = "ms"
    _fields_ = (("attr", c_int32), ("value", c_uint64))


class Padded(ctypes.Structure):
    _fields_ = (("attr", c_int32), ("value", c_uint64))


class Config(ctypes.Structure):
    _fields_ = (("attrs", c_void_p), ("count", c_size_t))


def configured(double: Double, attributes: Any) -> int:
    config = Config(ctypes.addressof(attributes), len(attributes))
    return double.rt("aclrtMallocHostWithCfg", byref(OUT), c_uint64(100), byref(config))


def test_malloc_attributes_are_twelve_bytes(double: Double) -> None:
    assert ctypes.sizeof(Attribute) == 12
    assert configured(double, (Attribute * 2)(Attribute(1, 7), Attribute(3, 1))) == 0
    assert OUT.value is not None
    assert OUT.value % 4096 == 0
    assert double.rt("aclrtFreeHost", OUT) == 0
    assert configured(double, (Padded * 1)(Padded(3, 1))) == 107000
    noticed(double, "[1.4]", "12-byte layout")
    assert configured(double, (Padded * 2)(Padded(1, 0), Padded(3, 1))) == 107000
    noticed(double, "[1.4]", "12-byte layout")


def test_frees(double: Double) -> None:
    address = double.malloc(128)
    assert double.free(address + 64) == 107000
    noticed(double, "[1.4]", "not the start")
    assert double.rt("aclrtFreeHost", pointer(address)) == 107000
    noticed(double, "[1.4]", "another kind")
    assert double.free(address) == 0
    assert double.free(address) == 107000
    noticed(double, "[1.4]", "any more")
    assert double.free(0) == 100000
    noticed(double, "[1.4]", "NULL")


def test_memory_freed_before_its_stream_passed(double: Double) -> None:
    address, stream = double.malloc(64), double.stream()
    count = c_size_t(64)
    assert double.rt("aclrtMemsetAsync", pointer(address), count, 1, count, pointer(stream)) == 0
    assert double.free(address) == 0
    noticed(double, "[5.1]", "freed before its stream passed")
    assert double.sync(stream) == 507015
    address = double.malloc(64)
    assert double.rt("aclrtMemsetAsync", pointer(address), count, 1, count, pointer(stream)) == 0
    assert double.rt("aclrtFreeWithDevSync", pointer(address)) == 0
    assert double.sync(stream) == 0


def test_copy_rules(double: Double) -> None:
    address, host = double.malloc(64), (ctypes.c_char * 128)()
    size = c_size_t
    assert double.rt("aclrtMemcpy", pointer(address), size(64), host, size(65), H2D) == 107000
    noticed(double, "[1.4]", "over destMax")
    assert double.rt("aclrtMemcpy", pointer(address), size(65), host, size(64), H2D) == 107000
    noticed(double, "[1.4]", "leave the memory")
    assert double.rt("aclrtMemcpy", host, size(8), pointer(address + 60), size(8), D2H) == 107000
    noticed(double, "[1.4]", "leave the memory")
    assert double.rt("aclrtMemcpy", host, size(8), None, size(8), D2H) == 107000
    noticed(double, "[1.4]", "NULL")
    assert double.rt("aclrtMemcpy", pointer(address), size(64), host, size(64), D2H) == 0
    assert double.rt("aclrtMemset", pointer(address), size(4), 0, size(8)) == 107000
    noticed(double, "[1.4]", "over destMax")
    double.free(address)
    assert double.rt("aclrtMemcpy", host, size(8), pointer(address), size(8), D2H) == 107000
    noticed(double, "[1.4]", "not allocated")


def test_asynchronous_copies(double: Double) -> None:
    address, stream, host = double.malloc(64), double.stream(), (ctypes.c_char * 64)(1, 2, 3)
    pinned = double.made("aclrtMallocHost", c_size_t(64))
    assert double.copy_async(host, pointer(pinned), 64, H2H, stream) == 207000
    noticed(double, "[5.8]", "host to host")
    assert double.copy_async(pointer(address), pointer(pinned), 64, D2H, stream) == 107000
    noticed(double, "kind 2", "addresses say 1")
    assert double.copy_async(pointer(address), host, 64, H2D, stream) == 0  # pageable: done now
    assert double.copy_async(pointer(pinned), pointer(address), 64, D2H, stream) == 0
    assert ctypes.string_at(pinned, 3) != b"\1\2\3"  # as late as may be
    assert double.sync(stream) == 0
    assert ctypes.string_at(pinned, 3) == b"\1\2\3"
    assert double.rt("aclrtFreeHost", pointer(pinned)) == 0
    double.free(address)


def test_copy_2d(double: Double) -> None:
    address = double.malloc(64)
    host = np.arange(12, dtype=np.uint8)
    size = c_size_t
    source = host.ctypes.data_as(c_void_p)
    two = (size(16), source, size(4), size(4), size(3), H2D)
    assert double.rt("aclrtMemcpy2d", pointer(address), *two) == 0
    seen = double.download(address, np.empty(36, np.uint8))
    assert seen[16:20].tolist() == [4, 5, 6, 7]
    bad = (size(3), source, size(4), size(4), size(3), H2D)
    assert double.rt("aclrtMemcpy2d", pointer(address), *bad) == 107000
    noticed(double, "[1.4]", "width")
    wide = (size(5000001), source, size(5000001), size(5000001), size(1), H2D)
    assert double.rt("aclrtMemcpy2d", pointer(address), *wide) == 100000
    noticed(double, "[1.4]", "over the limit")
    double.runtime.kvdouble_quirk(b"no_2d_on_device", True)
    within = (size(16), pointer(address), size(16), size(4), size(1), 3)
    assert double.rt("aclrtMemcpy2d", pointer(address), *within) == 100000
    assert double.rt("aclrtMemcpy2d", pointer(address), *two) == 0
    double.runtime.kvdouble_quirk(b"no_2d_on_device", False)
    double.free(address)


class Batch(ctypes.Structure):
    _fields_ = (("dst_id", c_int32), ("dst", c_int), ("src_id", c_int32), ("src", c_int),
                ("rsv", ctypes.c_uint8 * 16))  # fmt: skip


def test_batch(double: Double) -> None:
    pinned, address = double.made("aclrtMallocHost", c_size_t(64)), double.malloc(64)
    ctypes.memmove(pinned, bytes(range(64)), 64)
    stream, fail = double.stream(), c_size_t()

    def batch(dst_type: int, second: int) -> int:
        return double.rt(
            "aclrtMemcpyBatchAsync", (c_void_p * 2)(address, address + 8), (c_size_t * 2)(8, 8),
            (c_void_p * 2)(pinned + 32, second), (c_size_t * 2)(8, 8), c_size_t(2),
            (Batch * 1)(Batch(0, dst_type, 0, 0)), (c_size_t * 1)(0), c_size_t(1), byref(fail),
            pointer(stream),
        )  # fmt: skip

    assert batch(1, pinned) == 0
    assert double.sync(stream) == 0
    assert double.download(address, np.empty(16, np.uint8)).tolist() == [*range(32, 40), *range(8)]
    assert batch(0, pinned) == 107000
    noticed(double, "[1.4]", "attribute 0")
    assert batch(1, ctypes.addressof((ctypes.c_char * 8)())) == 107000
    noticed(double, "pageable")
    assert fail.value == 1
    assert double.rt("aclrtFreeHost", pointer(pinned)) == 0
    double.free(address)


def test_swapped_memory(double: Double) -> None:
    page = double.made("aclrtMallocHost", c_size_t(3 * 4096))
    aligned = (page + 4095) // 4096 * 4096
    size = c_uint64(4096)
    assert double.rt("aclrtHostRegister", pointer(aligned + 1), size, 0, byref(OUT)) == 107008
    noticed(double, "[5.9]", "4 KB")
    device = get(double, "aclrtHostRegister", c_void_p, pointer(aligned), size, 0)
    assert double.rt("aclrtHostRegister", pointer(aligned), size, 0, byref(OUT)) == 507910
    noticed(double, "[5.9]", "already")
    assert device != aligned
    host = (ctypes.c_char * 8)()
    assert double.copy(host, pointer(device), 8, D2H) == 107016
    noticed(double, "[5.9]", "host pointer")
    assert double.rt("aclrtFreeHost", pointer(page)) == 107000
    noticed(double, "[5.9]", "still registered")
    ctypes.memmove(aligned, np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32).tobytes(), 32)
    tensor = double.tensor(device, [8], INT32)
    assert double.destroy_tensor(tensor) == 0
    seen = np.empty(8, np.int32)
    assert (
        double.runtime.kvdouble_peek(pointer(device), seen.ctypes.data_as(c_void_p), c_size_t(32))
        == 0
    )
    assert seen.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert double.rt("aclrtHostUnregister", pointer(aligned)) == 0
    assert double.rt("aclrtHostUnregister", pointer(aligned)) == 507911
    noticed(double, "[5.9]", "not registered")
    assert double.rt("aclrtFreeHost", pointer(page)) == 0
    assert double.live() == 0


def test_register_v2(double: Double) -> None:
    page = double.made("aclrtMallocHost", c_size_t(2 * 4096))
    aligned = pointer((page + 4095) // 4096 * 4096)
    assert double.rt("aclrtHostRegisterV2", aligned, c_uint64(4096), 0x10000002) == 0
    assert double.rt("aclrtHostGetDevicePointer", aligned, byref(OUT), 0) == 0
    assert double.rt("aclrtHostUnregister", aligned) == 0
    assert double.rt("aclrtHostGetDevicePointer", aligned, byref(OUT), 0) == 507911
    noticed(double, "[5.9]")
    assert double.rt("aclrtFreeHost", pointer(page)) == 0


# -- streams and events ---------------------------------------------------------------------------


def test_handles_have_kinds(double: Double) -> None:
    stream, event = double.stream(), double.made("aclrtCreateEventExWithFlag", SYNC)
    assert double.rt("aclrtRecordEvent", pointer(stream), pointer(event)) == 107017
    noticed(double, "[ABI", "event (the first argument)", "got stream")
    assert double.rt("aclrtStreamWaitEvent", pointer(event), pointer(stream)) == 107017
    noticed(double, "[1.6]", "stream (the first argument)")
    assert double.sync(event) == 107017
    noticed(double, "expected a live stream, got event")
    assert double.sync(0xDEAD) == 107017
    noticed(double, "no handle of any kind")
    assert double.rt("aclrtDestroyEvent", pointer(event)) == 0
    assert double.rt("aclrtDestroyEvent", pointer(event)) == 107017
    noticed(double, "event that was destroyed")
    assert double.rt("aclrtDestroyStream", pointer(stream)) == 0
    assert double.live() == 0


def test_streams_work_late_and_in_order(double: Double) -> None:
    address, stream = double.malloc(64), double.stream()
    size = c_size_t(64)
    for value in (1, 2):
        assert (
            double.rt("aclrtMemsetAsync", pointer(address), size, value, size, pointer(stream)) == 0
        )
    seen = np.empty(64, np.uint8)
    assert double.peek(address, seen)[0] not in (1, 2)
    assert get(double, "aclrtStreamQuery", c_int, pointer(stream)) == 1
    assert double.sync(stream) == 0
    assert get(double, "aclrtStreamQuery", c_int, pointer(stream)) == 0
    assert double.download(address, seen)[0] == 2
    double.free(address)


def test_timeouts(double: Double) -> None:
    stream, event = double.stream(), double.made("aclrtCreateEventExWithFlag", SYNC)
    double.runtime.kvdouble_hold(True)
    assert double.rt("aclrtRecordEvent", pointer(event), pointer(stream)) == 0
    assert double.rt("aclrtSynchronizeStreamWithTimeout", pointer(stream), 1) == 507046
    assert double.rt("aclrtSynchronizeEventWithTimeout", pointer(event), 1) == 507047
    assert double.rt("aclrtSynchronizeStreamWithTimeout", pointer(stream), -2) == 107000
    noticed(double, "[1.5]", "timeout -2")
    double.runtime.kvdouble_hold(False)
    assert double.rt("aclrtSynchronizeStreamWithTimeout", pointer(stream), -1) == 0


def test_event_states_have_two_encodings(double: Double) -> None:
    stream = double.stream()
    event = double.made("aclrtCreateEventWithFlag", SYNC | TIME_LINE)
    double.runtime.kvdouble_hold(True)
    assert double.rt("aclrtRecordEvent", pointer(event), pointer(stream)) == 0
    assert get(double, "aclrtQueryEventStatus", c_int, pointer(event)) == 0
    assert get(double, "aclrtQueryEvent", c_int, pointer(event)) == 1
    double.runtime.kvdouble_hold(False)
    assert double.rt("aclrtSynchronizeEvent", pointer(event)) == 0
    assert get(double, "aclrtQueryEventStatus", c_int, pointer(event)) == 1
    assert get(double, "aclrtQueryEvent", c_int, pointer(event)) == 0
    assert double.rt("aclrtResetEvent", pointer(event), pointer(stream)) == 0
    assert get(double, "aclrtQueryEventStatus", c_int, pointer(event)) == 0


def test_ex_events(double: Double) -> None:
    stream, event = double.stream(), double.made("aclrtCreateEventExWithFlag", TIME_LINE)
    assert get(double, "aclrtQueryEventStatus", c_int, pointer(event)) == 1  # never recorded
    assert double.rt("aclrtResetEvent", pointer(event), pointer(stream)) == 107000
    noticed(double, "[5.8]", "aclrtResetEvent")
    for symbol in ("aclrtQueryEvent", "aclrtQueryEventWaitStatus"):
        assert double.rt(symbol, pointer(event), byref(c_int())) == 107000
        noticed(double, "[5.8]", symbol)
    assert double.rt("aclrtStreamWaitEvent", pointer(stream), pointer(event)) == 107000
    noticed(double, "[5.8]", "SYNC")
    plain = double.made("aclrtCreateEventExWithFlag", SYNC)
    assert (
        double.rt("aclrtEventElapsedTime", byref(c_float()), pointer(plain), pointer(event))
        == 107000
    )
    noticed(double, "[5.8]", "TIME_LINE")
    assert double.rt("aclrtCreateEventExWithFlag", byref(OUT), 0x21) == 107000
    noticed(double, "[2]", "OR-able")


def test_elapsed_time(double: Double) -> None:
    stream = double.stream()
    events = [double.made("aclrtCreateEventExWithFlag", TIME_LINE) for _ in range(2)]
    for event in events:
        assert double.rt("aclrtRecordEvent", pointer(event), pointer(stream)) == 0
    ms = c_float(-1)
    pair = [pointer(event) for event in events]
    assert double.rt("aclrtEventElapsedTime", byref(ms), *pair) == 507006
    assert double.sync(stream) == 0
    assert double.rt("aclrtEventElapsedTime", byref(ms), *pair) == 0
    assert 0 <= ms.value < 60_000


def test_a_wait_binds_to_the_last_record(double: Double) -> None:
    one, two, address = double.stream(), double.stream(), double.malloc(64)
    event = double.made("aclrtCreateEventExWithFlag", SYNC)
    size = c_size_t(64)
    assert double.rt("aclrtMemsetAsync", pointer(address), size, 1, size, pointer(one)) == 0
    assert double.rt("aclrtRecordEvent", pointer(event), pointer(one)) == 0
    assert double.rt("aclrtStreamWaitEvent", pointer(two), pointer(event)) == 0
    assert double.rt("aclrtMemsetAsync", pointer(address), size, 2, size, pointer(one)) == 0
    assert double.rt("aclrtRecordEvent", pointer(event), pointer(one)) == 0
    assert double.sync(two) == 0
    assert double.peek(address, np.empty(64, np.uint8))[0] == 1  # and no further
    assert double.sync(one) == 0
    double.free(address)


def test_asynchronous_failures(double: Double) -> None:
    stream, address = double.stream(), double.malloc(64)
    double.fail_async("aclrtMemsetAsync", 1, 507015)
    size = c_size_t(64)
    assert double.rt("aclrtSetStreamFailureMode", pointer(stream), c_uint64(1)) == 0
    for value in (1, 2):
        assert (
            double.rt("aclrtMemsetAsync", pointer(address), size, value, size, pointer(stream)) == 0
        )
    event = double.made("aclrtCreateEventExWithFlag", SYNC)
    assert double.rt("aclrtRecordEvent", pointer(event), pointer(stream)) == 0
    assert double.rt("aclrtSynchronizeEvent", pointer(event)) == 507015
    assert double.sync(stream) == 507015
    assert double.download(address, np.empty(64, np.uint8))[0] == 0xA5  # neither ran
    assert double.sync(stream) == 0
    double.free(address)


# -- host functions -------------------------------------------------------------------------------

FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)


def test_host_functions_run_in_order(double: Double) -> None:
    stream = double.stream()
    seen: list[int] = []
    function = FUNCTION(lambda data: seen.append(data or 0))
    for i in (1, 2, 3):
        assert double.rt("aclrtLaunchHostFunc", pointer(stream), function, pointer(i)) == 0
    assert double.sync(stream) == 0
    assert seen == [1, 2, 3]


def test_host_functions_may_not_call_back(double: Double) -> None:
    stream = double.stream()
    codes: list[int] = []
    function = FUNCTION(
        lambda _: codes.append(double.rt("aclrtMallocHost", byref(OUT), c_size_t(8)))
    )
    assert double.rt("aclrtLaunchHostFunc", pointer(stream), function, None) == 0
    assert double.sync(stream) == 0
    assert codes == [507000]
    noticed(double, "[1.7]", "host function")


def test_callbacks_need_a_subscribed_thread(double: Double) -> None:
    stream, seen = double.stream(), []
    function = FUNCTION(lambda _: seen.append(threading.get_ident()))
    launch = ("aclrtLaunchCallback", function, None, 1, pointer(stream))
    assert double.rt(*launch) == 107015
    noticed(double, "[1.7]", "not subscribed")
    me = c_uint64(threading.get_ident())
    assert double.rt("aclrtSubscribeReport", me, pointer(stream)) == 0
    assert double.rt("aclrtProcessReport", 1) == 507012
    assert double.rt(*launch) == 0
    assert double.rt("aclrtProcessReport", 10_000) == 0
    assert seen == [threading.get_ident()]
    assert double.rt("aclrtLaunchHostFunc", pointer(stream), function, None) == 107000
    noticed(double, "[1.7]", "not both")
    assert double.rt("aclrtUnSubscribeReport", me, pointer(stream)) == 0


def test_callbacks_may_launch_and_not_wait(double: Double) -> None:
    """Work of another stream; what the callback's own stream waits for cannot be waited for."""
    stream, other = double.stream(), double.stream()
    address = double.malloc(64)
    codes: list[int] = []

    def body(_: object) -> None:
        size = c_size_t(64)
        codes.append(double.rt("aclrtMemsetAsync", pointer(address), size, 7, size, pointer(other)))
        codes.append(double.sync(other))

    function = FUNCTION(body)
    me = c_uint64(threading.get_ident())
    assert double.rt("aclrtSubscribeReport", me, pointer(stream)) == 0
    assert double.rt("aclrtLaunchCallback", function, None, 1, pointer(stream)) == 0
    assert double.rt("aclrtProcessReport", 10_000) == 0
    assert codes == [0, 507000]
    noticed(double, "[1.7]", "a synchronous call in a callback")
    assert double.sync(other) == double.sync(stream) == 0
    seen = np.zeros(64, np.uint8)
    size = c_size_t(64)
    host = c_void_p(seen.ctypes.data)
    assert double.rt("aclrtMemcpy", host, size, pointer(address), size, D2H) == 0
    assert (seen == 7).all()
    assert double.rt("aclrtUnSubscribeReport", me, pointer(stream)) == 0


# -- more of streams ------------------------------------------------------------------------------


def test_streams_end(double: Double) -> None:
    address, size = double.malloc(64), c_size_t(64)
    seen = np.empty(64, np.uint8)
    for symbol, ran in (("aclrtDestroyStreamForce", False), ("aclrtDestroyStream", True)):
        stream = double.stream()
        fill = (pointer(address), size, 3, size, pointer(stream))
        assert double.rt("aclrtMemsetAsync", *fill) == 0
        assert double.rt(symbol, pointer(stream)) == 0
        assert bool(double.download(address, seen)[0] == 3) is ran
    stream = double.stream()
    assert double.rt("aclrtMemsetAsync", pointer(address), size, 4, size, pointer(stream)) == 0
    assert double.rt("aclrtStreamAbort", pointer(stream)) == 0
    assert double.sync(stream) == 0
    assert double.download(address, seen)[0] == 3
    assert double.rt("aclrtDestroyStream", None) == 107000
    noticed(double, "[1.5]", "NULL")
    double.free(address)


def test_limits(double: Double) -> None:
    before = get(double, "aclrtGetStreamAvailableNum", ctypes.c_uint32)
    assert before == 1984
    streams = [double.stream() for _ in range(before)]
    assert double.rt("aclrtCreateStream", byref(OUT)) == 207008
    for stream in streams:
        assert double.rt("aclrtDestroyStream", pointer(stream)) == 0


def test_arguments_of_streams(double: Double) -> None:
    assert double.rt("aclrtCreateStreamWithConfig", byref(OUT), 0, 0x40) == 107000
    noticed(double, "[2]", "flag")
    stream = double.made("aclrtCreateStreamWithConfig", 0, 3)
    assert get(double, "aclrtStreamGetFlags", ctypes.c_uint32, pointer(stream)) == 3
    assert double.rt("aclrtSetStreamFailureMode", pointer(stream), c_uint64(2)) == 107000
    noticed(double, "[2]", "failure mode")
    free, total = c_size_t(), c_size_t()
    assert double.rt("aclrtGetMemInfo", 0, byref(free), byref(total)) == 107000
    noticed(double, "[1.4]", "not HBM")


def test_an_event_of_the_wait_itself(double: Double) -> None:
    one, two = double.stream(), double.stream()
    event = double.made("aclrtCreateEventWithFlag", SYNC)
    assert double.rt("aclrtRecordEvent", pointer(event), pointer(one)) == 0
    assert double.rt("aclrtStreamWaitEvent", pointer(two), pointer(event)) == 0
    double.runtime.kvdouble_hold(True)
    assert get(double, "aclrtQueryEventWaitStatus", c_int, pointer(event)) == 1
    double.runtime.kvdouble_hold(False)
    assert double.sync(two) == 0
    assert get(double, "aclrtQueryEventWaitStatus", c_int, pointer(event)) == 0
