# SPDX-License-Identifier: Apache-2.0
"""Programs that do their worst: threads, loops, cancels, collections and exits at bad moments."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from fakes import FakePlan, Gate, device

import kvcore


@pytest.mark.parametrize("at", range(12))
async def test_a_cancel_at_every_await(clock: str, at: int) -> None:
    """The n-th await of a program is cancelled; what was launched runs, and nothing is lost."""
    async with device(clock) as dev:
        a, b = dev.stream("a"), dev.stream("b")
        event = dev.event()
        plans = [FakePlan() for _ in range(3)]
        count = 0
        scope = anyio.CancelScope()

        def step() -> None:
            nonlocal count
            if count == at:
                scope.cancel()
            count += 1

        with scope:
            a.launch(plans[0])
            event.record(a)
            for wait in (
                a.synchronize,
                event.synchronize,
                dev.synchronize,
                lambda: b.run(plans[1]),
                b.synchronize,
                anyio.lowlevel.checkpoint,
            ) * 2:
                step()
                await wait()
        assert scope.cancelled_caught
        assert count == at + 1
        b.wait_event(event)
        b.launch(plans[2])
        await dev.synchronize()
        assert plans[0].runs == plans[2].runs == 1


async def test_a_cancelled_waiter_among_many(clock: str) -> None:
    draw = random.Random(5)
    async with device(clock) as dev:
        streams = [dev.stream() for _ in range(8)]
        gates = [Gate(stream) for stream in streams]
        scopes = [anyio.CancelScope() for _ in range(64)]
        ended: list[int] = []

        async def wait(i: int) -> None:
            with scopes[i]:
                await streams[i % 8].synchronize()
                ended.append(i)

        async with anyio.create_task_group() as group:
            for i in range(64):
                group.start_soon(wait, i)
            await anyio.wait_all_tasks_blocked()
            order = list(range(64))
            draw.shuffle(order)
            for i in order[:32]:
                scopes[i].cancel()
            for gate in gates:
                gate.open()
        assert sorted(ended) == sorted(order[32:])


def together(*actions: Callable[[], object]) -> list[BaseException]:
    """Run all at once, each in a thread; the errors."""
    barrier = threading.Barrier(len(actions))
    errors: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        barrier.wait(50)
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(55)
        assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("race_check", ["off", "record"])
def test_a_storm_of_threads(clock: str, race_check: str) -> None:
    """Eight hosts launch, wait, record, allocate and free on common streams."""
    ran = itertools.count()
    with device(clock, race_check=race_check, workers=3) as dev:
        streams = [dev.stream() for _ in range(3)]
        events = [dev.event() for _ in range(3)]
        external = dev.external_event()

        def host(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(150):
                stream, event = draw.choice(streams), draw.choice(events)
                match draw.randrange(8):
                    case 0:
                        event.record(stream)
                    case 1:
                        event.wait(stream)
                    case 2:
                        event.query()
                    case 3:
                        stream.synchronize_blocking()
                    case 4:
                        buffer = dev.empty(64)
                        stream.fill(buffer, 1)
                        stream.synchronize_blocking()
                        buffer.free()
                    case 5:
                        external.record(stream)
                        external.wait(draw.choice(streams))
                        external.reset(stream)
                    case _:
                        stream.call(lambda: next(ran))

        assert together(*(lambda i=i: host(i) for i in range(8))) == []
        external.record(streams[0])
        dev.synchronize_blocking()
        assert dev.memory().used == 0
    assert next(ran) > 100


def test_two_loops_in_two_threads_share_a_device(clock: str) -> None:
    done: list[str] = []
    with device(clock) as dev:

        async def use(name: str) -> None:
            stream, other = dev.stream(name), dev.stream()
            for _ in range(50):
                event = other.record_event()
                stream.wait_event(event)
                stream.call(int)
                async with anyio.create_task_group() as group:
                    group.start_soon(stream.synchronize)
                    group.start_soon(event.synchronize)
                    group.start_soon(dev.synchronize)
            done.append(name)

        loops = ["asyncio", "trio", "asyncio", "trio"]
        errors = together(
            *(
                lambda i=i, loop=loop: anyio.run(use, f"{loop}{i}", backend=loop)
                for i, loop in enumerate(loops)
            )
        )
        assert errors == []
    assert len(done) == 4


@pytest.mark.parametrize("by", ["exception", "normally"])
def test_threads_that_use_a_device_while_it_is_left(clock: str, by: str) -> None:
    """They are told by a typed error, sooner or later, and nobody hangs."""
    for _ in range(10):
        dev = device(clock)
        entered, told = threading.Semaphore(0), []

        def use(dev: kvcore.Device = dev, entered: Any = entered, told: Any = told) -> None:
            stream = dev.stream()
            entered.release()
            try:
                while True:
                    stream.launch(FakePlan())
                    stream.record_event().synchronize_blocking()
            except kvcore.StreamError as error:
                told.append(error)

        threads = [threading.Thread(target=use) for _ in range(3)]
        try:
            with dev:
                for thread in threads:
                    thread.start()
                for _ in threads:
                    assert entered.acquire(timeout=50)
                if by == "exception":
                    raise KeyError
        except KeyError:
            pass
        for thread in threads:
            thread.join(50)
            assert not thread.is_alive()
        assert len(told) == 3


def test_a_hundred_thousand_events(clock: str) -> None:
    with device(clock) as dev:
        a, b = dev.stream("a"), dev.stream("b")
        gate = Gate(a)
        events = [a.record_event() for _ in range(100_000)]
        for event in events[::100]:
            b.wait_event(event)
        plan = FakePlan()
        b.launch(plan)
        assert not events[0].query()
        assert plan.runs == 0
        gate.open()
        b.synchronize_blocking()
        assert plan.runs == 1
        assert events[-101].query()


async def test_collections_while_work_is_queued(clock: str) -> None:
    """Cycles through streams, events, buffers and their waiters, collected at every step."""
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        async with device(clock, race_check="record") as dev:
            a, b = dev.stream(), dev.stream()
            gate = Gate(a)
            for _ in range(20):
                ring: list[Any] = [dev.event(), dev.empty(16), dev.external_event()]
                ring.append(ring)
                ring[0].record(a)
                ring[0].wait(b)
                a.call(lambda ring=ring: len(ring))
                a.fill(ring[1], 1)
            del ring
            gc.collect()
            gate.open()
            await dev.synchronize()
            gc.collect()
            assert dev.memory().used == 0
    finally:
        gc.set_threshold(*threshold)


async def test_nested_devices(clock: str) -> None:
    """Each in the other's block; one's host function may use the other."""
    async with device(clock) as outer:
        outside = outer.stream()
        async with device(clock) as inner:
            stream = inner.stream()
            plan = FakePlan()
            outside.call(lambda: stream.launch(plan))
            await outside.synchronize()
            await stream.synchronize()
            assert plan.runs == 1
        with pytest.raises(kvcore.StreamError, match="closed"):
            stream.launch(plan)
        outside.call(int)
        await outside.synchronize()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
async def test_any_exception_of_a_host_function(clock: str, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    async with device(clock) as dev:
        stream, plan = dev.stream(), FakePlan()
        stream.call(fail)
        with pytest.raises(kvcore.StreamError) as caught:
            await stream.synchronize()
        assert type(caught.value.__cause__) is error
        stream.launch(plan)
        await stream.synchronize()
        assert plan.runs == 1


def test_an_interrupt_while_a_thread_waits(clock: str) -> None:
    """Ctrl-C in ``synchronize_blocking`` raises there; the work goes on."""
    with device(clock) as dev:
        stream, plan = dev.stream(), FakePlan()
        gate = Gate(stream)
        stream.launch(plan)
        assert gate.entered.wait(50)
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:
            signal.pthread_kill(main, signal.SIGINT)

        waits = threading.Thread(target=interrupt)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                _wait_while(stream, waits)
        finally:
            signal.signal(signal.SIGINT, before)
        waits.join()
        gate.open()
        stream.synchronize_blocking()
        assert plan.runs == 1


def _wait_while(stream: kvcore.Stream, thread: threading.Thread) -> None:
    thread.start()
    stream.synchronize_blocking()


PROGRAM = """
import sys, threading, kvcore
how = sys.argv[1]
dev = kvcore.Device()
dev.__enter__()
stream = dev.stream()
held = threading.Event()
stream.call(held.wait)
buffer = dev.empty(1000)
for _ in range(1000):
    stream.fill(buffer, 1)
    stream.record_event()
dev.external_event().wait(dev.stream())
print("queued", flush=True)
if how == "raise":
    raise KeyError("on purpose")
if how == "exit":
    sys.exit(3)
if how == "thread":
    threading.Thread(target=lambda: None).start()
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1), ("exit", 3), ("thread", 0)])
def test_the_interpreter_ends_with_work_queued(how: str, code: int) -> None:
    """A device that nobody left does not keep the process, and does not crash it."""
    found = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM, how],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.stdout == "queued\n"
    assert found.returncode == code, found.stderr
    assert "Fatal" not in found.stderr


async def test_two_plans_may_share_an_array_that_is_gone_for_everybody_else(clock: str) -> None:
    async with device(clock, race_check="raise") as dev:
        a = dev.stream()
        gate = Gate(a)
        there = dev.empty(64)
        source = np.ones(64, np.float32)
        a.copy(there, source)
        a.copy(source, there)
        del source
        gc.collect()
        gate.open()
        await a.synchronize()
        with there.host("r") as seen:
            assert seen.tolist() == [1.0] * 64
