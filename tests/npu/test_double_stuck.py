# SPDX-License-Identifier: Apache-2.0
"""Queues that can never run: found when the host waits, and no wait hangs; and their twins."""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_size_t, c_uint64, c_void_p

import pytest
from double.asking import noticed
from double.direct import Double, pointer

LOST = 507014


def word(double: Double) -> int:
    """Eight bytes of device memory, zero."""
    address, size = double.malloc(64), c_size_t(64)
    double.ok(double.rt("aclrtMemset", pointer(address), size, 0, size))
    return address


def wait(double: Double, address: int, stream: int, value: int = 1) -> None:
    assert double.rt("aclrtValueWait", pointer(address), c_uint64(value), 1, pointer(stream)) == 0


def write(double: Double, address: int, stream: int, value: int = 1) -> None:
    assert double.rt("aclrtValueWrite", pointer(address), c_uint64(value), 0, pointer(stream)) == 0


@pytest.mark.parametrize("stuck", [True, False])
def test_a_word_that_is_written_behind_its_wait(double: Double, stuck: bool) -> None:
    address, stream = word(double), double.stream()
    if not stuck:
        write(double, address, stream)
    wait(double, address, stream)
    if stuck:
        write(double, address, stream)
    assert double.sync(stream) == (LOST if stuck else 0)
    if stuck:
        noticed(double, "[1.6] aclrtValueWait", "comes only behind this wait")
    assert double.sync(stream) == 0


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("stuck", [True, False])
def test_streams_that_wait_in_a_circle(double: Double, count: int, stuck: bool) -> None:
    """Each writes what the next waits for; the first does so behind its wait, or before it."""
    words = [word(double) for _ in range(count)]
    streams = [double.stream() for _ in range(count)]
    for i, stream in enumerate(streams):
        if i == 0 and not stuck:
            write(double, words[1], stream)
        wait(double, words[i], stream)
        write(double, words[(i + 1) % count], stream)
    codes = [double.sync(stream) for stream in streams]
    assert sorted(codes) == ([0] * (count - 1) + [LOST] if stuck else [0] * count)
    if stuck:
        noticed(double, "[1.6] aclrtValueWait", f"{count} of them wait for each other in a circle")


def test_a_word_that_nobody_writes(double: Double) -> None:
    """What waits behind it on another stream fails with it."""
    address, behind = word(double), word(double)
    first, second = double.stream(), double.stream()
    wait(double, address, first)
    write(double, behind, first)
    wait(double, behind, second)
    double.runtime.kvdouble_give_up(c_uint64(0))
    assert double.sync(second) == 0
    noticed(double, "[1.6] aclrtValueWait", "nobody has launched what it waits for")
    assert double.sync(first) == LOST


def test_a_word_that_another_thread_writes(double: Double) -> None:
    address, streams = word(double), [double.stream() for _ in range(2)]
    wait(double, address, streams[0])

    def late() -> None:
        double.ok(double.rt("aclrtSetDevice", 0))
        write(double, address, streams[1])

    thread = threading.Thread(target=late)
    thread.start()
    assert double.sync(streams[0]) == 0
    thread.join()
    assert double.sync(streams[1]) == 0


@pytest.mark.parametrize("replayed", [True, False])
def test_an_event_of_a_replay(double: Double, replayed: bool) -> None:
    """Recorded outside of the capture by each replay, of which there may be none."""
    event, graph = c_void_p(), c_void_p()
    double.ok(double.rt("aclrtCreateEventWithFlag", ctypes.byref(event), 0x20))
    captured, stream = double.stream(), double.stream()
    double.ok(double.rt("aclmdlRICaptureBegin", pointer(captured), 2))
    double.ok(double.rt("aclrtRecordEventWithFlag", event, pointer(captured), 1))
    double.ok(double.rt("aclmdlRICaptureEnd", pointer(captured), ctypes.byref(graph)))
    double.ok(double.rt("aclrtStreamWaitEvent", pointer(stream), event))
    if replayed:
        double.ok(double.rt("aclmdlRIExecuteAsync", graph, pointer(captured)))
    else:
        double.runtime.kvdouble_give_up(c_uint64(0))
    assert double.sync(stream) == (0 if replayed else LOST)
    if not replayed:
        noticed(double, "[1.6] aclrtStreamWaitEvent", "nobody has launched what it waits for")
    double.ok(double.sync(captured))
    double.ok(double.rt("aclmdlRIDestroy", graph))
    double.ok(double.rt("aclrtDestroyEvent", event))


def test_a_replay_behind_which_its_word_is_written(double: Double) -> None:
    address, graph = word(double), c_void_p()
    captured = double.stream()
    double.ok(double.rt("aclmdlRICaptureBegin", pointer(captured), 2))
    wait(double, address, captured)
    double.ok(double.rt("aclmdlRICaptureEnd", pointer(captured), ctypes.byref(graph)))
    double.ok(double.rt("aclmdlRIExecuteAsync", graph, pointer(captured)))
    write(double, address, captured)
    assert double.sync(captured) == LOST
    noticed(double, "[1.6] aclrtValueWait", "comes only behind this wait")
    double.ok(double.rt("aclmdlRIExecuteAsync", graph, pointer(captured)))
    assert double.sync(captured) == 0
    double.ok(double.rt("aclmdlRIDestroy", graph))


def test_a_stuck_stream_can_be_destroyed(double: Double) -> None:
    address, stream = word(double), double.stream()
    wait(double, address, stream)
    write(double, address, stream)
    assert double.rt("aclrtDestroyStream", pointer(stream)) == 0
    noticed(double, "[1.6] aclrtValueWait", "comes only behind this wait")
