# SPDX-License-Identifier: Apache-2.0
"""Waking tasks: no worker waits for a loop, and many wake-ups are one byte."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from fakes import FakePlan, Gate, device

from kvcore.runtime.bell import Bell
from kvcore.runtime.queues._marks import Waiter


class Thing:
    """Something to wait for that a test makes happen."""

    def __init__(self) -> None:
        self.happened = False
        self.waiters: list[Waiter] = []

    def add(self, waiter: Waiter) -> bool:
        if not self.happened:
            self.waiters.append(waiter)
        return not self.happened

    def discard(self, waiter: Waiter) -> None:
        if waiter in self.waiters:
            self.waiters.remove(waiter)

    def happen(self) -> None:
        self.happened = True
        for waiter in list(self.waiters):
            waiter.notify()


class CountingBell(Bell):
    """Counts the bytes it reads."""

    seen = 0

    def _look(self) -> None:
        self.seen += len(self._reader.recv(4096))
        super()._look()


async def test_ringing_is_coalesced() -> None:
    bell = CountingBell()
    things = [Thing() for _ in range(100)]
    async with anyio.create_task_group() as group:
        for thing in things:
            group.start_soon(bell.wait, thing)
        await anyio.wait_all_tasks_blocked()
        for thing in things:
            thing.happen()
    assert bell.seen == 1
    bell.close()


async def test_what_has_happened_is_not_waited_for() -> None:
    bell, thing = Bell(), Thing()
    thing.happen()
    await bell.wait(thing)
    bell.close()


async def test_rings_from_threads_while_tasks_come_and_go() -> None:
    bell = Bell()

    async def one() -> None:
        for _ in range(30):
            thing = Thing()
            thread = threading.Thread(target=thing.happen)
            thread.start()
            await bell.wait(thing)
            thread.join()

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(one)
    bell.close()


async def test_waiting_is_a_checkpoint_even_when_there_is_nothing_to_wait_for() -> None:
    async with device() as dev:
        stream = dev.stream()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await stream.synchronize()
        assert scope.cancelled_caught
        with anyio.CancelScope() as scope:
            scope.cancel()
            await dev.synchronize()
        assert scope.cancelled_caught
        with anyio.CancelScope() as scope:
            scope.cancel()
            await dev.event().synchronize()
        assert scope.cancelled_caught


async def test_cancelled_waiters_leave_nothing_behind() -> None:
    bell, thing = Bell(), Thing()
    for _ in range(5):
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(bell.wait, thing)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert thing.waiters == []
        assert bell._seats == {}
    bell.close()


async def test_closing_waits_for_the_last_to_leave() -> None:
    bell, thing = Bell(), Thing()
    async with anyio.create_task_group() as group:
        group.start_soon(bell.wait, thing)
        await anyio.wait_all_tasks_blocked()
        bell.close()
        assert bell._reader.fileno() >= 0
        thing.happen()
    assert bell._reader.fileno() == -1


async def test_a_deaf_loop_holds_no_worker(clock: str) -> None:
    """A thousand tasks wait, their loop's thread is held, and all the work gets done."""
    async with device(clock, workers=1) as dev:
        streams = [dev.stream() for _ in range(1000)]
        first = dev.stream()
        gate = Gate(first)
        plan = FakePlan()
        last = dev.stream()
        for stream in streams:
            stream.wait_stream(first)
            stream.launch(plan)
            last.wait_stream(stream)
        async with anyio.create_task_group() as group:
            for stream in streams:
                group.start_soon(stream.synchronize)
            await anyio.wait_all_tasks_blocked()
            gate.open()
            last.synchronize_blocking()
            assert plan.runs == 1000


@pytest.mark.parametrize("n", [1, 20])
async def test_waits_in_two_loops_at_once(n: int, anyio_backend: Any) -> None:
    """Each loop has its own bell; a device serves both."""
    async with device() as dev:
        stream = dev.stream()
        gate = Gate(stream)
        waiting = threading.Semaphore(0)
        told: list[int] = []

        async def other_loop() -> None:
            async with anyio.create_task_group() as group:
                for _ in range(n):
                    group.start_soon(stream.synchronize)
                await anyio.wait_all_tasks_blocked()
                waiting.release()
            told.append(1)

        thread = threading.Thread(target=anyio.run, args=(other_loop,),
                                  kwargs={"backend": anyio_backend})  # fmt: skip
        thread.start()
        async with anyio.create_task_group() as group:
            for _ in range(n):
                group.start_soon(stream.synchronize)
            await anyio.wait_all_tasks_blocked()
            while not waiting.acquire(blocking=False):
                await checkpoint()
            gate.open()
        await anyio.to_thread.run_sync(thread.join)
        assert told == [1]
