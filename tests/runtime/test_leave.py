# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT012  (a whole device block is what raises here)
"""Leaving the device block: normally, by an exception, by a cancel."""

from __future__ import annotations

import gc
import threading

import anyio
import numpy as np
import pytest
from fakes import FakePlan, Gate, Hold, device

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
    queued = FakePlan()
    dev = device(clock)
    with pytest.raises(ZeroDivisionError):
        async with dev:
            a, b = dev.stream("a"), dev.stream("b")
            gate = Hold(a)
            a.launch(queued)
            b.wait_stream(a)
            b.launch(queued)
            buffers = [dev.empty(100), dev.empty_host(100), dev.empty_swapped(100)]
            a.copy(buffers[0], buffers[1])
            assert await anyio.to_thread.run_sync(gate.entered.wait, 50)
            gate.until_dropped()
            raise ZeroDivisionError
    assert not gate.held
    assert queued.runs == 0
    for space in ("device", "host", "swapped"):
        memory = dev.memory(space)
        assert (memory.used, memory.allocations, memory.frees) == (0, 1, 1)
    assert all(buffer.freed for buffer in buffers)
    del buffers
    gc.collect()
    assert dev.memory().frees == 1


async def test_leaving_by_a_cancel(clock: str) -> None:
    queued = FakePlan()
    inside = anyio.Event()
    gates: list[Hold] = []

    async def use() -> None:
        async with device(clock) as dev:
            stream = dev.stream()
            gate = Hold(stream)
            assert await anyio.to_thread.run_sync(gate.entered.wait, 50)
            stream.launch(queued)
            gate.until_dropped()
            gates.append(gate)
            inside.set()
            await stream.synchronize()

    async with anyio.create_task_group() as group:
        group.start_soon(use)
        await inside.wait()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert not gates[0].held
    assert queued.runs == 0


async def test_a_cancel_while_leaving_normally(clock: str) -> None:
    queued = FakePlan()
    leaving = anyio.Event()

    async def use() -> None:
        async with device(clock) as dev:
            stream = dev.stream()
            gate = Hold(stream)
            assert await anyio.to_thread.run_sync(gate.entered.wait, 50)
            stream.launch(queued)
            gate.until_dropped()
            gates.append(gate)
            leaving.set()

    gates: list[Hold] = []
    async with anyio.create_task_group() as group:
        group.start_soon(use)
        await leaving.wait()
        await anyio.wait_all_tasks_blocked()
        assert gates[0].held
        group.cancel_scope.cancel()
    assert not gates[0].held
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
                gate = Hold(a)
                a.launch(FakePlan())
                b.wait_stream(a)
                b.launch(FakePlan())
                for stream in (a, b, b):
                    group.start_soon(wait, stream)
                await anyio.wait_all_tasks_blocked()
                gate.until_dropped()
                raise ZeroDivisionError
    assert len(told) == 3
    assert all("dropped because the device was left" in str(error) for error in told)


def test_leaving_a_plain_block_by_an_exception(clock: str) -> None:
    queued = FakePlan()
    dev = device(clock)
    with pytest.raises(ZeroDivisionError), dev:
        stream = dev.stream()
        gate = Hold(stream)
        stream.launch(queued)
        buffer = dev.empty(10)
        assert gate.entered.wait(50)
        gate.until_dropped()
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
            gate = Hold(stream)
            assert await anyio.to_thread.run_sync(gate.entered.wait, 50)
            for i in range(20_000):
                stream.call(ran.append, i)
            gate.until_dropped()
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
