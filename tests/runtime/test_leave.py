# SPDX-License-Identifier: Apache-2.0
"""Leaving the device block: normally, by an exception, by a cancel."""

from __future__ import annotations

import gc
import threading

import anyio
import numpy as np
import pytest
from fakes import FakePlan, Gate, device

import kvcore


async def test_leaving_normally_waits_for_everything(clock: str) -> None:
    ran: list[int] = []
    async with device(clock) as dev:
        a, b = dev.stream(), dev.stream()
        for i in range(50):
            a.call(ran.append, i)
            b.wait_stream(a)
            b.call(ran.append, i)
    assert len(ran) == 100


async def test_leaving_by_an_exception_drops_what_has_not_started(clock: str) -> None:
    running, queued = FakePlan(), FakePlan()
    ended = threading.Event()
    dev = device(clock)
    with pytest.raises(ZeroDivisionError):
        async with dev:
            a, b = dev.stream("a"), dev.stream("b")
            gate = Gate(a)
            a.launch(queued)
            b.wait_stream(a)
            b.launch(queued)
            buffers = [dev.empty(100), dev.empty_host(100), dev.empty_swapped(100)]
            a.copy(buffers[0], buffers[1])
            assert await anyio.to_thread.run_sync(gate.entered.wait, 50)
            # opened while the device is being left: the block must wait for it, and no more
            threading.Timer(0.05, lambda: (ended.set(), gate.open())).start()
            raise ZeroDivisionError
    assert ended.is_set()
    assert queued.runs == running.runs == 0
    for space in ("device", "host", "swapped"):
        memory = dev.memory(space)
        assert (memory.used, memory.allocations, memory.frees) == (0, 1, 1)
    assert all(buffer.freed for buffer in buffers)
    del buffers
    gc.collect()
    assert dev.memory().frees == 1


async def test_leaving_by_a_cancel(clock: str) -> None:
    queued = FakePlan()
    ended = threading.Event()
    inside = anyio.Event()

    async def use() -> None:
        async with device(clock) as dev:
            stream = dev.stream()
            gate = Gate(stream)
            assert await anyio.to_thread.run_sync(gate.entered.wait, 50)
            stream.launch(queued)
            threading.Timer(0.05, lambda: (ended.set(), gate.open())).start()
            inside.set()
            await stream.synchronize()

    async with anyio.create_task_group() as group:
        group.start_soon(use)
        await inside.wait()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert ended.is_set()
    assert queued.runs == 0


async def test_a_cancel_while_leaving_normally(clock: str) -> None:
    queued = FakePlan()
    leaving = anyio.Event()
    ended = threading.Event()

    async def use() -> None:
        async with device(clock) as dev:
            stream = dev.stream()
            gate = Gate(stream)
            assert await anyio.to_thread.run_sync(gate.entered.wait, 50)
            stream.launch(queued)
            gates.append(gate)
            leaving.set()

    gates: list[Gate] = []
    async with anyio.create_task_group() as group:
        group.start_soon(use)
        await leaving.wait()
        await anyio.wait_all_tasks_blocked()
        threading.Timer(0.05, lambda: (ended.set(), gates[0].open())).start()
        group.cancel_scope.cancel()
    assert ended.is_set()
    assert queued.runs == 0


async def test_tasks_that_wait_while_the_device_is_left(clock: str) -> None:
    """Their work is dropped, so they are told, and do not wait for ever."""
    told: list[BaseException] = []

    async def wait(stream: kvcore.Stream) -> None:
        try:
            await stream.synchronize()
        except kvcore.StreamError as error:
            told.append(error)

    async with anyio.create_task_group() as group:
        with pytest.raises(ZeroDivisionError):
            async with device(clock) as dev:
                a, b = dev.stream("a"), dev.stream("b")
                gate = Gate(a)
                a.launch(FakePlan())
                b.wait_stream(a)
                b.launch(FakePlan())
                for stream in (a, b, b):
                    group.start_soon(wait, stream)
                await anyio.wait_all_tasks_blocked()
                threading.Timer(0.05, gate.open).start()
                raise ZeroDivisionError
    assert len(told) == 3
    assert all("dropped because the device was left" in str(error) for error in told)


def test_leaving_a_plain_block_by_an_exception(clock: str) -> None:
    queued = FakePlan()
    dev = device(clock)
    with pytest.raises(ZeroDivisionError), dev:
        stream = dev.stream()
        gate = Gate(stream)
        stream.launch(queued)
        buffer = dev.empty(10)
        threading.Timer(0.05, gate.open).start()
        assert gate.entered.wait(50)
        raise ZeroDivisionError
    assert queued.runs == 0
    assert buffer.freed
    assert dev.memory().used == 0


async def test_an_exception_hides_no_failure_and_is_not_hidden(clock: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with device(clock) as dev:
            stream = dev.stream()
            stream.call(int, "no number")
            event = stream.record_event()
            with pytest.raises(kvcore.StreamError):
                await event.synchronize()
            raise ZeroDivisionError


async def test_a_long_queue_is_dropped_whole(clock: str) -> None:
    ran: list[int] = []
    with pytest.raises(ZeroDivisionError):
        async with device(clock) as dev:
            stream = dev.stream()
            gate = Gate(stream)
            assert await anyio.to_thread.run_sync(gate.entered.wait, 50)
            for i in range(20_000):
                stream.call(ran.append, i)
            threading.Timer(0.05, gate.open).start()
            raise ZeroDivisionError
    assert ran == []


async def test_a_closed_device_says_so(clock: str) -> None:
    async with device(clock) as dev:
        stream, event = dev.stream(), dev.event()
        buffer = dev.empty((4,), "int32")
        async with dev.capture(stream) as graph:
            stream.fill(buffer, 1)
    match = r"closed"
    for act in (
        lambda: stream.launch(FakePlan()),
        lambda: stream.copy(buffer, np.zeros(4, np.int32)),
        lambda: stream.call(print),
        lambda: stream.compute(1),
        lambda: stream.record_event(event),
        lambda: stream.wait_event(event),
        lambda: stream.wait_stream(stream),
        stream.query,
        stream.synchronize_blocking,
        lambda: graph.replay(stream),
        lambda: dev.empty(3),
        dev.stream,
        dev.event,
        dev.synchronize_blocking,
        event.query,
        lambda: dev.capture(stream),
        buffer.free,
    ):
        with pytest.raises(kvcore.StreamError, match=match):
            act()
    for wait in (stream.synchronize, dev.synchronize, event.synchronize):
        with pytest.raises(kvcore.StreamError, match=match):
            await wait()
    with pytest.raises(kvcore.ParamInvalidError, match="freed"):
        buffer.numpy()
    with pytest.raises(kvcore.StreamError, match="make a new one"):
        async with dev:
            pass


def test_a_device_that_was_not_entered_says_so() -> None:
    dev = device()
    with pytest.raises(kvcore.StreamError, match=r"^device: the device is not open"):
        dev.stream()


async def test_a_hundred_devices_leave_nothing(clock: str) -> None:
    for _ in range(100):
        async with device(clock) as dev:
            stream = dev.stream()
            gate = Gate(stream)
            async with anyio.create_task_group() as group:
                group.start_soon(stream.synchronize)
                await anyio.wait_all_tasks_blocked()
                gate.open()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvcore-worker")]
