# SPDX-License-Identifier: Apache-2.0
"""What the vendor's own client does, which the double must take for what it is."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_size_t, c_uint64, c_void_p

from double.asking import OUT, Scatter, in_thread, noticed
from double.direct import Double, pointer

FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)


def test_pinned_memory_is_page_aligned(double: Double) -> None:
    for size in (1, 64, 4096, 5000):
        address = double.made("aclrtMallocHost", c_size_t(size))
        assert address % 4096 == 0
        assert double.rt("aclrtFreeHost", pointer(address)) == 0


def test_reports_are_asked_for_before_anybody_subscribed(double: Double) -> None:
    assert double.rt("aclrtProcessReport", 1) == 107015


def test_a_thread_without_a_device_may_ask_for_it(double: Double) -> None:
    assert in_thread(lambda: double.rt("aclrtGetDevice", byref(OUT))) == 107002


def test_no_tensor_is_destroyed(double: Double) -> None:
    assert double.base.aclDestroyTensor(None) == 0


def test_a_callback_in_a_capture_runs_at_every_replay(double: Double) -> None:
    stream, seen = double.stream(), []
    function = FUNCTION(lambda _: seen.append(threading.get_ident()))
    me = c_uint64(threading.get_ident())
    double.ok(double.rt("aclrtSubscribeReport", me, pointer(stream)))
    double.ok(double.rt("aclmdlRICaptureBegin", pointer(stream), 2))
    double.ok(double.rt("aclrtLaunchCallback", function, None, 1, pointer(stream)))
    double.ok(double.rt("aclmdlRICaptureEnd", pointer(stream), byref(OUT)))
    graph = c_void_p(OUT.value)
    assert seen == []
    for n in (1, 2):
        double.ok(double.rt("aclmdlRIExecuteAsync", graph, pointer(stream)))
        assert double.rt("aclrtStreamQuery", pointer(stream), byref(OUT)) == 0
        double.ok(double.rt("aclrtProcessReport", 10_000))
        double.ok(double.sync(stream))
        assert seen == [threading.get_ident()] * n
    double.ok(double.rt("aclmdlRIDestroy", graph))
    double.ok(double.rt("aclrtUnSubscribeReport", me, pointer(stream)))


def test_a_device_is_not_waited_for_in_a_capture(double: Double) -> None:
    stream = double.stream()
    for symbol, arguments in (
        ("aclrtSynchronizeDevice", ()),
        ("aclrtSynchronizeDeviceWithTimeout", (-1,)),
    ):
        double.ok(double.rt("aclmdlRICaptureBegin", pointer(stream), 0))
        assert double.rt(symbol, *arguments) == 107030
        noticed(double, "[1.8]", "a synchronous call during a capture")
        assert double.rt("aclmdlRICaptureEnd", pointer(stream), byref(OUT)) == 507903
        assert double.rt(symbol, *arguments) == 0


def test_a_mode_s_text_may_be_gone_where_that_is_allowed(double: Double) -> None:
    call = Scatter(double)
    for lenient in (True, False):
        double.runtime.kvdouble_lenient_texts(lenient)
        size, executor = call.one()
        workspace = double.malloc(size)
        call.mode.value = b"None"
        code = call.two(workspace, size, executor)
        assert (code == 0) is lenient
        double.sync()
        if lenient:
            assert (double.download(call.memory[1], call.cache) == call.expected()).all()
        else:
            noticed(double, "[5.3]", "freed or changed before phase two")
        call.mode.value = b"Norm"
        double.free(workspace)
    call.destroy()
    call.free()


def test_addresses_apart_from_memory(double: Double) -> None:
    """What expandable segments are made of: a copy over two pieces that are mapped side by side."""
    piece = 2 << 20
    rt = double.rt
    double.ok(rt("aclrtReserveMemAddress", byref(OUT), c_size_t(4 * piece), c_size_t(0), None, 0))
    base = OUT.value
    assert base is not None
    properties = (ctypes.c_byte * 64)()
    handles = []
    for i in range(2):
        double.ok(rt("aclrtMallocPhysical", byref(OUT), c_size_t(piece), properties, c_uint64(0)))
        handles.append(c_void_p(OUT.value))
        at = pointer(base + i * piece)
        double.ok(rt("aclrtMapMem", at, c_size_t(piece), c_size_t(0), handles[i], c_uint64(0)))
    host = (ctypes.c_char * 4096)(*b"kv" * 2048)
    back = (ctypes.c_char * 4096)()
    double.ok(double.copy(pointer(base + piece - 100), host, 4096, 1))
    double.ok(double.copy(back, pointer(base + piece - 100), 4096, 2))
    assert back.raw == host.raw
    # The third piece has no memory.
    assert double.copy(pointer(base + 2 * piece - 100), host, 4096, 1) == 107000
    noticed(double, "[1.4]", "leave the memory")
    assert rt("aclrtReleaseMemAddress", pointer(base)) == 107000
    noticed(double, "still mapped")
    for i in (1, 0):
        double.ok(rt("aclrtUnmapMem", pointer(base + i * piece)))
        double.ok(rt("aclrtFreePhysical", handles[i]))
    double.ok(rt("aclrtReleaseMemAddress", pointer(base)))
    assert double.live() == 0
