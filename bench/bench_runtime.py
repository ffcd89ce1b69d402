# SPDX-License-Identifier: Apache-2.0
"""What launching, finishing, handing over, checking and modelling cost.

    python -m pytest bench/bench_runtime.py --benchmark-columns=median,ops

Ratios are taken within one run, on one machine; the comparison tests measure both sides in turn
and print the ratio.
"""

from __future__ import annotations

import gc
import queue
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import kvcore

BURST = 10_000
ROUNDS = 15


class NoOp:
    """A plan that does nothing and touches nothing."""

    reads: tuple[Any, ...] = ()
    writes: tuple[Any, ...] = ()
    bytes_moved = 0
    num_descriptors = 0
    workspace_size = 0

    def run(self) -> None:
        pass

    def touched(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (), ()


class Access:
    argument = "x"

    def __init__(self, owner: Any, ranges: np.ndarray) -> None:
        self.owner = owner
        self.ranges = ranges


class Touching(NoOp):
    """Reads one buffer and writes rows of another."""

    def __init__(self, source: Any, target: Any, rows: int, seed: int) -> None:
        s, t = source.__kvcore_array__, target.__kvcore_array__
        start = s.ctypes.data
        self.reads = (Access(source, np.array([[start, start + s.nbytes]], np.int64)),)
        slots = np.random.default_rng(seed).choice(len(t) // 2, rows, replace=False) * 2
        starts = np.sort(t.ctypes.data + slots * t[0].nbytes)
        self.writes = (Access(target, np.stack([starts, starts + t[0].nbytes], 1)),)
        self.num_descriptors = rows

    def touched(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return self.reads, self.writes


@contextmanager
def quiet() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


async def test_launch_in_bursts() -> None:
    """Target: at most 2 us a launch, the median of bursts of 10,000, on asyncio."""
    plan = NoOp()
    async with kvcore.Device() as dev:
        stream = dev.stream()
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(BURST):
                stream.launch(plan)
            times.append((time.perf_counter() - start) / BURST)
            await stream.synchronize()
    median = statistics.median(times) * 1e6
    report("launch of a no-op in bursts of 10,000", f"{median:.2f} us", "<= 2 us", median <= 2)


async def test_throughput_against_to_thread() -> None:
    """Target: at least 50 times awaiting anyio.to_thread.run_sync once an operation."""
    plan = NoOp()
    ours, theirs = [], []
    async with kvcore.Device() as dev:
        stream = dev.stream()
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(BURST):
                stream.launch(plan)
            await stream.synchronize()
            ours.append((time.perf_counter() - start) / BURST)
            start = time.perf_counter()
            for _ in range(200):
                await anyio.to_thread.run_sync(plan.run)
            theirs.append((time.perf_counter() - start) / 200)
    a, b = statistics.median(ours), statistics.median(theirs)
    report(
        "launch to done on one stream",
        f"{a * 1e6:.2f} us against {b * 1e6:.1f} us of to_thread.run_sync: {b / a:.0f}x",
        ">= 50x",
        b / a >= 50,
    )


async def test_ping_pong_against_threads() -> None:
    """Target: at most half of two threads that hand over through queue.SimpleQueue."""
    hops = 2000
    ours, theirs = [], []

    def threads() -> None:
        to, fro = queue.SimpleQueue[int](), queue.SimpleQueue[int]()

        def echo() -> None:
            for _ in range(hops):
                fro.put(to.get())

        thread = threading.Thread(target=echo)
        thread.start()
        for i in range(hops):
            to.put(i)
            fro.get()
        thread.join()

    async with kvcore.Device() as dev:
        a, b = dev.stream("a"), dev.stream("b")
        ping, pong = dev.event(), dev.event()
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(hops):
                a.wait_event(pong)
                ping.record(a)
                b.wait_event(ping)
                pong.record(b)
            await b.synchronize()
            ours.append((time.perf_counter() - start) / hops)
            theirs.append(seconds(threads) / hops)
    x, y = statistics.median(ours), statistics.median(theirs)
    report(
        "record/wait there and back between two streams",
        f"{x * 1e6:.2f} us against {y * 1e6:.1f} us of two threads: {x / y:.2f}x",
        "<= 0.5x",
        x / y <= 0.5,
    )


async def test_ping_pong_launched_ahead() -> None:
    """The same with an operation a hop, all launched before the first runs: the hop itself."""
    hops = 2000
    times = []
    plan = NoOp()
    async with kvcore.Device() as dev:
        a, b = dev.stream("a"), dev.stream("b")
        for _ in range(ROUNDS):
            gate = threading.Event()
            a.call(gate.wait)
            ping, pong = dev.event(), dev.event()
            for _ in range(hops):
                a.wait_event(pong)
                a.launch(plan)
                ping.record(a)
                b.wait_event(ping)
                b.launch(plan)
                pong.record(b)
            start = time.perf_counter()
            gate.set()
            await b.synchronize()
            times.append((time.perf_counter() - start) / hops)
    report("two operations and two hops, launched ahead", us(times), "", True)


@pytest.mark.parametrize("rows", [1, 1000])
async def test_race_check(rows: int) -> None:
    """Target: at most 10 us a launch, and 0.2 us a range, more than without."""
    results = {}
    launches = 2000 if rows == 1 else 100
    for mode in ("off", "record"):
        times = []
        async with kvcore.Device(race_check=mode) as dev:
            a, b = dev.stream("a"), dev.stream("b")
            source = dev.empty((64, 64))
            target = dev.empty((100_000, 16))
            plans = [Touching(source, target, rows, seed) for seed in range(50)]
            for _ in range(ROUNDS):
                start = time.perf_counter()
                for i in range(launches):
                    a.launch(plans[i % 50])
                    if i % 10 == 0:
                        b.wait_stream(a)
                        a.wait_stream(b)
                await a.synchronize()
                times.append((time.perf_counter() - start) / launches)
        assert not dev.races
        results[mode] = statistics.median(times) * 1e6
    cost = results["record"] - results["off"]
    allowed = 10 + 0.2 * (rows + 1)
    report(
        f"race check, {rows + 1} ranges a launch",
        f"{cost:.1f} us a launch (off {results['off']:.1f}, on {results['record']:.1f})",
        f"<= {allowed:.0f} us",
        cost <= allowed,
    )


@pytest.mark.parametrize("kind", ["no-op", "copy", "compute"])
async def test_model_clock(kind: str) -> None:
    """Target: at least 50,000 operations a second."""
    rates = []
    async with kvcore.Device("A3", clock="model") as dev:
        a, b = dev.stream("a"), dev.stream("b")
        host, there = dev.empty_host((8, 64)), dev.empty((8, 64))
        plan = NoOp()
        act: Callable[[Any], object] = {
            "no-op": lambda s: s.launch(plan),
            "copy": lambda s: s.copy(there, host),
            "compute": lambda s: s.compute(3),
        }[kind]
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(1000):
                act(a)
                act(b)
            await dev.synchronize()
            rates.append(2000 / (time.perf_counter() - start))
    rate = statistics.median(rates)
    report(f"model clock, {kind}", f"{rate:,.0f} operations/s", ">= 50,000", rate >= 50_000)


async def test_memory_is_flat_over_a_million_launches() -> None:
    plan = NoOp()
    async with kvcore.Device() as dev:
        a, b = dev.stream("a"), dev.stream("b")
        event = dev.event()
        peaks = []
        for _ in range(100):
            for _ in range(5000):
                a.launch(plan)
                event.record(a)
                b.wait_event(event)
                b.launch(plan)
            await dev.synchronize()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    grown = peaks[-1] - peaks[10]
    report("10^6 launches, growth after the first tenth", f"{grown} KiB", "flat", grown < 4096)


def test_launch_by_pytest_benchmark(benchmark: Any) -> None:
    plan = NoOp()
    with kvcore.Device() as dev:
        stream = dev.stream()

        def burst() -> None:
            for _ in range(BURST):
                stream.launch(plan)
            stream.synchronize_blocking()

        benchmark.pedantic(burst, rounds=ROUNDS)


def us(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e6:.2f} us"


def report(what: str, seen: str, target: str, met: bool) -> None:
    verdict = "" if not target else f"   [{target}: {'met' if met else 'MISSED'}]"
    print(f"\n  {what}: {seen}{verdict}", end="")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
