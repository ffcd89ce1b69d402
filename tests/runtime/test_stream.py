# SPDX-License-Identifier: Apache-2.0
"""Launching, order, waiting: what a stream promises when nothing fails."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from fakes import FakePlan, Gate, Scatter, device

import kvcore
from kvcore.runtime.current import current_stream


async def test_work_runs_in_launch_order(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream("s")
        ran: list[int] = []
        for i in range(500):
            stream.call(ran.append, i)
        await stream.synchronize()
        assert ran == list(range(500))
        assert stream.query()


async def test_launching_returns_before_the_work_runs(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        plan = FakePlan()
        stream.launch(plan)
        assert not stream.query()
        assert plan.runs == 0
        gate.open()
        await stream.synchronize()
        assert plan.runs == 1


async def test_streams_run_side_by_side(clock: str) -> None:
    """Each host function waits for the other: a single file would never end."""
    async with device(clock, workers=2) as dev:
        barrier = threading.Barrier(2)
        for name in ("a", "b"):
            dev.stream(name).call(barrier.wait, 50)
        await dev.synchronize()


async def test_copy_moves_bytes_between_spaces(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        host = dev.empty_host((64, 16), "bfloat16")
        back = dev.empty_host((64, 16), "bfloat16")
        there = dev.empty((64, 16), "bfloat16")
        with host.host("w") as a:
            a[:] = np.arange(1024).reshape(64, 16) % 256
        stream.copy(there, host)
        stream.copy(back, there)
        await stream.synchronize()
        with back.host("r") as b:
            assert (b == host.numpy()).all()


async def test_strided_and_batched_copies(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        cache = dev.empty((8, 10, 4), "float32")
        rows = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
        stream.fill(cache, -1)
        stream.copy(cache[:, 3], rows)
        back = [np.zeros(4, np.float32) for _ in range(8)]
        stream.copy_batch(back, [cache[i, 3] for i in range(8)])
        await stream.synchronize()
        assert np.array_equal(np.stack(back), rows)
        with cache.host("r") as a:
            assert (a[:, 4] == -1).all()


async def test_overlapping_copy_is_as_if_read_first(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        buffer = dev.empty(100, "int32")
        stream.copy(buffer, np.arange(100, dtype=np.int32))
        stream.copy(buffer[10:], buffer[:-10])
        await stream.synchronize()
        with buffer.host("r") as a:
            assert a.tolist() == [*range(10), *range(90)]


async def test_a_source_dropped_while_its_copy_is_queued(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        destination = dev.empty((1000,), "int32")
        source = dev.empty_host((1000,), "int32")
        with source.host("w") as a:
            a[:] = np.arange(1000)
        del a
        stream.copy(destination, source)
        gone = weakref.ref(source.storage)
        del source
        gc.collect()
        assert gone() is not None
        assert dev.memory("host").used == 4000
        gate.open()
        await stream.synchronize()
        gc.collect()
        assert gone() is None
        assert dev.memory("host").used == 0
        with destination.host("r") as b:
            assert np.array_equal(b, np.arange(1000))


async def test_plain_arrays_live_until_their_copy_is_done(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        destination = dev.empty((1000,), "int64")
        source = np.arange(1000)
        gone = weakref.ref(source)
        stream.copy(destination, source)
        del source
        assert gone() is not None
        gate.open()
        await stream.synchronize()
        assert gone() is None
        with destination.host("r") as b:
            assert np.array_equal(b, np.arange(1000))


async def test_thousand_streams_on_two_workers(clock: str) -> None:
    async with device(clock, workers=2) as dev:
        first = dev.stream("first")
        gate = Gate(first)
        ready = dev.event()
        order: list[int] = []
        for i in range(1000):
            stream = dev.stream(f"s{i}")
            if i == 0:
                ready.record(first)
            stream.wait_event(ready)
            stream.call(order.append, i)
        workers = [t for t in threading.enumerate() if t.name.startswith("kvcore-worker")]
        assert len(workers) == 2
        assert order == []
        gate.open()
        await dev.synchronize()
        assert sorted(order) == list(range(1000))


async def test_chain_through_a_thousand_streams(clock: str) -> None:
    async with device(clock, workers=2) as dev:
        order: list[int] = []
        streams = [dev.stream() for _ in range(1000)]
        for i, stream in enumerate(streams):
            if i:
                stream.wait_stream(streams[i - 1])
            stream.call(order.append, i)
        await streams[-1].synchronize()
        assert order == list(range(1000))


async def test_an_event_hop_stays_on_its_worker(clock: str) -> None:
    """Two streams hand over to each other 200 times; one worker carries both."""
    async with device(clock, workers=2) as dev:
        a, b = dev.stream("a"), dev.stream("b")
        gate = Gate(a)
        threads: list[int] = []
        for _ in range(100):
            a.call(lambda: threads.append(threading.get_ident()))
            b.wait_stream(a)
            b.call(lambda: threads.append(threading.get_ident()))
            a.wait_stream(b)
        # b's first wait must be reached before the gate opens, or both workers may be awake
        while b.idle:
            await checkpoint()
        gate.open()
        await dev.synchronize()
        assert len(threads) == 200
        hops = sum(x != y for x, y in itertools.pairwise(threads))
        assert hops <= 1


async def test_run_launches_and_waits(clock: str) -> None:
    async with device(clock) as dev:
        plan = FakePlan()
        await dev.stream().run(plan)
        assert plan.runs == 1


async def test_current_stream_is_per_task() -> None:
    async with device() as dev:
        streams = {name: dev.stream(name) for name in "abc"}
        seen: dict[str, str] = {}
        entered = [anyio.Event() for _ in range(2)]

        async def task(name: str, mine: anyio.Event, other: anyio.Event) -> None:
            with dev.use(streams[name]):
                mine.set()
                await other.wait()
                seen[name] = kvcore.current_stream().name

        with dev.use(streams["c"]):
            async with anyio.create_task_group() as group:
                group.start_soon(task, "a", entered[0], entered[1])
                group.start_soon(task, "b", entered[1], entered[0])
            assert kvcore.current_stream() is streams["c"]
        assert seen == {"a": "a", "b": "b"}
        assert dev.current_stream() is dev.default_stream
        with pytest.raises(kvcore.StreamError, match=r"^stream: expected a stream in use"):
            kvcore.current_stream()


async def test_nested_use_and_two_devices() -> None:
    async with device() as one, device() as two:
        a, b, c = one.stream("a"), one.stream("b"), two.stream("c")
        with one.use(a), two.use(c):
            assert one.current_stream() is a
            assert current_stream() is c
            with one.use(b):
                assert one.current_stream() is b
                assert two.current_stream() is c
            assert one.current_stream() is a


async def test_synchronize_waits_only_for_what_came_before(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        first = Gate(stream)
        done = anyio.Event()

        async def wait() -> None:
            await stream.synchronize()
            done.set()

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            second = Gate(stream)
            first.open()
            with anyio.fail_after(50):
                await done.wait()
        assert not stream.query()
        second.open()


async def test_many_tasks_wait_at_once(clock: str) -> None:
    async with device(clock) as dev:
        streams = [dev.stream() for _ in range(20)]
        gates = [Gate(stream) if i < 2 else None for i, stream in enumerate(streams)]
        for stream in streams[2:]:
            stream.wait_stream(streams[0])
        told: list[int] = []

        async def wait(i: int) -> None:
            await streams[i].synchronize()
            told.append(i)

        async with anyio.create_task_group() as group:
            for i in range(20):
                group.start_soon(wait, i)
            await anyio.wait_all_tasks_blocked()
            assert told == []
            for gate in gates:
                if gate is not None:
                    gate.open()
        assert sorted(told) == list(range(20))


async def test_a_leading_waiter_that_is_cancelled_hands_over(clock: str) -> None:
    """The first task to wait watches the socket for all; cancelling it must not strand them."""
    async with device(clock) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        told = []

        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                await stream.synchronize()
                told.append(1)

        scopes = [anyio.CancelScope() for _ in range(4)]
        async with anyio.create_task_group() as group:
            for scope in scopes:
                group.start_soon(wait, scope)
            await anyio.wait_all_tasks_blocked()
            scopes[0].cancel()
            await anyio.wait_all_tasks_blocked()
            scopes[1].cancel()
            await anyio.wait_all_tasks_blocked()
            gate.open()
        assert told == [1, 1]


async def test_cancelling_in_the_middle_of_a_copy(clock: str) -> None:
    """The copy goes on to its end, and its destination is whole."""
    async with device(clock) as dev:
        stream = dev.stream()
        source, destination = np.arange(1000), np.zeros(1000, np.int64)
        half, go_on = threading.Event(), threading.Event()

        class SlowCopy:
            def run(self) -> None:
                destination[:500] = source[:500]
                half.set()
                assert go_on.wait(50)
                destination[500:] = source[500:]

        stream.launch(SlowCopy())
        async with anyio.create_task_group() as group:
            group.start_soon(stream.synchronize)
            await anyio.to_thread.run_sync(half.wait)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert destination[999] == 0
        go_on.set()
        await stream.synchronize()
        assert np.array_equal(destination, source)


async def test_blocking_on_the_loop_s_own_thread(clock: str) -> None:
    async with device(clock) as dev:
        stream, other = dev.stream(), dev.stream()
        plan = FakePlan()
        event = dev.event()
        for _ in range(100):
            stream.launch(plan)
            event.record(stream)
            other.wait_event(event)
            other.launch(plan)
            stream.wait_stream(other)
        stream.synchronize_blocking()
        assert plan.runs == 200
        dev.synchronize_blocking()
        event.synchronize_blocking()


async def test_blocking_while_tasks_of_the_same_loop_wait(clock: str) -> None:
    """The loop's thread is held, and the workers finish what its tasks wait for all the same."""
    async with device(clock) as dev:
        stream, other = dev.stream(), dev.stream()
        gate = Gate(stream)
        told = anyio.Event()

        async def wait() -> None:
            await stream.synchronize()
            told.set()

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            other.wait_stream(stream)
            gate.open()
            other.synchronize_blocking()
            assert not told.is_set()
            await told.wait()


def test_one_device_under_several_loops(clock: str, anyio_backend: str) -> None:
    """A loop that has ended leaves nothing that the next one trips over."""
    with device(clock) as dev:
        stream = dev.stream()
        plan = FakePlan()

        async def main() -> None:
            gate = Gate(stream)
            stream.launch(plan)
            async with anyio.create_task_group() as group:
                group.start_soon(stream.synchronize)
                await anyio.wait_all_tasks_blocked()
                gate.open()

        for _ in range(3):
            anyio.run(main, backend=anyio_backend)
        assert plan.runs == 3


async def test_seeds_change_the_order_and_keep_the_promises() -> None:
    """Same seed, same order; other seeds, other orders; a stream's own order always holds."""

    def order(seed: int | None) -> list[int]:
        with device(seed=seed, workers=1) as dev:
            first = dev.stream("gate")
            gate = Gate(first)
            assert gate.entered.wait(50)
            ran: list[int] = []
            for i in range(8):
                stream = dev.stream()
                for _ in range(3):
                    stream.call(ran.append, i)
            gate.open()
            dev.synchronize_blocking()
        return ran

    assert order(None) == [i for i in range(8) for _ in range(3)]
    seen = {tuple(order(seed)) for seed in range(10)}
    assert len(seen) > 8
    assert order(7) == order(7)
    assert all(sorted(o) == sorted(order(None)) for o in seen)


async def test_scatter_reads_its_slots_when_it_runs() -> None:
    async with device() as dev:
        stream = dev.stream()
        slots = np.array([0, 1])
        cache = np.zeros((4, 2))
        gate = Gate(stream)
        stream.launch(Scatter(np.ones((2, 2)), cache, slots))
        slots[:] = [2, -1]
        gate.open()
        await stream.synchronize()
        assert cache.sum(axis=1).tolist() == [0, 0, 2, 0]


async def test_compute_takes_time_and_no_worker() -> None:
    """Twenty streams sleep at once on one worker."""
    async with device(workers=1) as dev:
        start = time.monotonic()
        for _ in range(20):
            stream = dev.stream()
            stream.compute(20_000)
            stream.compute(10_000)
        await dev.synchronize()
        assert time.monotonic() - start >= 0.03
        assert dev.now >= 30_000


async def test_layer_ids_need_not_be_dense(clock: str) -> None:
    """One event a layer, layers {0, 2, 6}: each layer's work waits for its own load alone."""
    async with device(clock) as dev:
        load, compute = dev.stream("load"), dev.stream("compute")
        events = {layer: dev.event() for layer in (0, 2, 6)}
        loaded: list[int] = []
        used: list[tuple[int, bool]] = []
        for layer, event in events.items():
            load.call(loaded.append, layer)
            event.record(load)
        for layer, event in events.items():
            compute.wait_event(event)
            compute.call(lambda n=layer: used.append((n, n in loaded)))
        await compute.synchronize()
        assert used == [(0, True), (2, True), (6, True)]


def test_names_of_streams_are_told_apart() -> None:
    with device() as dev:
        assert [dev.stream("x").name, dev.stream("x").name, dev.stream().name] == [
            "x",
            "x#2",
            "stream",
        ]
        assert len(dev.streams) == 3
