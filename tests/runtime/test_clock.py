# SPDX-License-Identifier: Apache-2.0
"""The model clock, against arithmetic done by hand and against its own repetition."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fakes import FakePlan, Gate, device

import kvcore
from kvcore.runtime import DeviceProfile

#: Round numbers: 1 us a launch, links of 1 GB/s (1000 bytes a us), no other cost.
PLAIN = DeviceProfile.named("A3").replace(
    launch_cost=1, event_cost=0, query_cost=1, call_time=7, host_copy_bandwidth=1,
    pageable_share=0.5, compute_latency=0, compute_descriptor=0,
    hbm_bandwidth=1, hbm_latency=0, hbm_descriptor=0,
    h2d_bandwidth=1, h2d_latency=0, h2d_descriptor=0,
    d2h_bandwidth=1, d2h_latency=0, d2h_descriptor=0,
)  # fmt: skip


def plain(**values: Any) -> kvcore.Device:
    return kvcore.Device(PLAIN.replace(**values) if values else PLAIN, clock="model")


async def test_compute_on_one_stream_adds_up() -> None:
    async with plain() as dev:
        stream = dev.stream()
        stream.compute(100)
        stream.compute(50)
        assert dev.now == 2
        await stream.synchronize()
        assert dev.now == 1 + 150


async def test_compute_on_two_streams_takes_turns() -> None:
    async with plain() as dev:
        a, b = dev.stream(), dev.stream()
        a.compute(100)
        b.compute(50)
        await b.synchronize()
        assert dev.now == 151
        await a.synchronize()
        assert dev.now == 151


async def test_copies_use_their_link_and_overlap_compute() -> None:
    async with plain(hbm_bandwidth=1000) as dev:
        up, down, compute = dev.stream("up"), dev.stream("down"), dev.stream("compute")
        host, there = dev.empty_host(100_000, "uint8"), dev.empty(100_000, "uint8")
        back, out = dev.empty_host(100_000, "uint8"), dev.empty(100_000, "uint8")
        up.copy(there, host)  # from 1 to 101
        down.copy(back, out)  # from 2, its memory free at 1.1, to 102
        compute.compute(100)  # from 3
        await up.synchronize()
        assert dev.now == 101
        await down.synchronize()
        assert dev.now == 102
        await compute.synchronize()
        assert dev.now == 103
        assert dev.busy == pytest.approx({"compute": 100, "hbm": 0.2, "h2d": 100, "d2h": 100})


async def test_one_link_serves_one_copy_at_a_time() -> None:
    async with plain(hbm_bandwidth=1000) as dev:
        a, b = dev.stream(), dev.stream()
        host, there = dev.empty_host(2000, "uint8"), dev.empty(2000, "uint8")
        a.copy(there[:1000], host[:1000])
        b.copy(there[1000:], host[1000:])
        await dev.synchronize()
        assert dev.now == 1 + 2


async def test_events_order_the_model() -> None:
    async with plain() as dev:
        load, compute = dev.stream(), dev.stream()
        host, there = dev.empty_host(50_000, "uint8"), dev.empty(50_000, "uint8")
        ready = dev.event()
        load.copy(there, host)
        ready.record(load)
        compute.wait_event(ready)
        compute.compute(10)
        await compute.synchronize()
        assert dev.now == 1 + 50 + 10


async def test_ready_order_decides_and_launch_order_breaks_ties() -> None:
    async with plain(launch_cost=0) as dev:
        streams = [dev.stream() for _ in range(4)]
        events = []
        for i, stream in enumerate(streams):
            stream.compute(10 * (4 - i))
            events.append(stream.record_event())
        await dev.synchronize()
        start = dev.event()
        start.record(streams[0])
        assert [round(events[0].elapsed_time(e) * 1000) for e in events] == [0, 30, 50, 60]


async def test_latency_pieces_and_bytes() -> None:
    async with plain(h2d_latency=5, h2d_descriptor=0.25, hbm_bandwidth=1e6) as dev:
        stream = dev.stream()
        host, there = dev.empty_host((40, 100), "uint8"), dev.empty((40, 200), "uint8")
        stream.copy(there[:, :100], host)
        await stream.synchronize()
        assert dev.now == 1 + 5 + 40 * 0.25 + 4
        stream.copy_batch([there[i, :100] for i in range(8)], [host[i] for i in range(8)])
        await stream.synchronize()
        assert dev.now == 20 + 1 + 5 + 8 * 0.25 + 0.8


async def test_pageable_copies_are_slower_and_host_copies_use_no_link() -> None:
    async with plain() as dev:
        stream = dev.stream()
        there = dev.empty(1000, "uint8")
        stream.copy(there, np.zeros(1000, np.uint8))
        await stream.synchronize()
        assert dev.now == 1 + 2
        stream.copy(dev.empty_host(1000, "uint8"), dev.empty_host(1000, "uint8"))
        await stream.synchronize()
        assert dev.now == 3 + 1 + 1
        assert dev.busy["h2d"] == 2


async def test_plans_cost_what_they_touched() -> None:
    async with plain(compute_latency=3, h2d_latency=2) as dev:
        stream = dev.stream()
        there, swapped = dev.empty(6000, "uint8"), dev.empty_swapped(50_000, "uint8")
        stream.launch(FakePlan(reads=[there[:2000]], writes=[there[2000:]]))
        await stream.synchronize()
        assert dev.now == 1 + 6
        stream.launch(FakePlan(reads=[swapped], writes=[there]))
        await stream.synchronize()
        assert dev.now == 7 + 1 + 2 + 50
        stream.launch(FakePlan(reads=[there], writes=[swapped]))
        await stream.synchronize()
        assert dev.now == 60 + 1 + 50
        stream.launch(FakePlan())
        await stream.synchronize()
        assert dev.now == 111 + 1 + 3


async def test_host_functions_and_queries_take_the_profile_s_time() -> None:
    async with plain() as dev:
        stream = dev.stream()
        stream.call(lambda: None)
        await stream.synchronize()
        assert dev.now == 1 + 7
        assert stream.query()
        assert dev.now == 9
        assert dev.event().query()
        assert dev.now == 9


async def test_query_says_what_the_model_says() -> None:
    """Polling takes the host's time, so a loop that polls ends, always after as many turns."""
    async with plain() as dev:
        stream = dev.stream()
        stream.compute(20)
        event = stream.record_event()
        turns = 0
        while not event.query():
            turns += 1
        assert turns == 19
        assert dev.now == 21


async def test_a_query_does_not_wait_for_a_host_function() -> None:
    async with device("model") as dev:
        stream = dev.stream()
        gate = Gate(stream)
        stream.launch(FakePlan())
        for _ in range(100):
            assert not stream.query()
        gate.open()
        await stream.synchronize()
        assert stream.query()


async def test_a_host_function_that_runs_holds_up_nobody_else_s_clock() -> None:
    async with plain() as dev:
        held, free = dev.stream(), dev.stream()
        gate = Gate(held)
        held.compute(10)
        free.compute(100)
        await free.synchronize()
        assert dev.now == 3 + 100  # and not 3 + 110, or never
        gate.open()


async def test_what_fails_keeps_the_cost_it_had() -> None:
    async with plain() as dev:
        stream = dev.stream()
        stream.call(int, "x")
        stream.compute(100)
        stream.launch(FakePlan(reads=[dev.empty(1000, "uint8")]))
        with pytest.raises(kvcore.StreamError):
            await stream.synchronize()
        assert dev.now == 1 + 7 + 100


def program(dev: kvcore.Device, seed: int) -> list[float]:
    """A random tangle of streams, events, copies and plans; the host's time now and then."""
    draw = random.Random(seed)
    streams = [dev.stream() for _ in range(5)]
    there, host = dev.empty((64, 4096), "uint8"), dev.empty_host((64, 4096), "uint8")
    swapped = dev.empty_swapped((64, 4096), "uint8")
    events = [dev.event() for _ in range(4)]
    plans = [
        FakePlan(reads=[swapped[i]], writes=[there[i]], num_descriptors=i + 1) for i in range(8)
    ]
    times = []
    for _ in range(300):
        stream = draw.choice(streams)
        what = draw.randrange(10)
        if what < 2:
            stream.compute(draw.randrange(50))
        elif what < 4:
            n = draw.randrange(64)
            stream.copy(there[:n], host[:n])
        elif what < 5:
            stream.copy(host[0], there[0])
        elif what < 7:
            stream.launch(draw.choice(plans))
        elif what == 7:
            draw.choice(events).record(stream)
        elif what == 8:
            stream.wait_event(draw.choice(events))
        elif draw.random() < 0.3:
            stream.synchronize_blocking()
            times.append(dev.now)
        elif draw.random() < 0.5:
            times.append(float(stream.query()))
    dev.synchronize_blocking()
    return [*times, dev.now, *dev.busy.values()]


@pytest.mark.parametrize("seed", range(8))
def test_the_same_numbers_on_every_run(seed: int) -> None:
    """Whatever the workers do: other seeds and other numbers of workers change nothing."""
    found = set()
    for workers, order in ((1, None), (2, None), (2, 1), (4, 2), (4, 3), (2, 4)):
        with kvcore.Device("A3", clock="model", workers=workers, seed=order) as dev:
            found.add(tuple(program(dev, seed)))
    assert len(found) == 1


def test_time_never_runs_backwards() -> None:
    with kvcore.Device("A3", clock="model", trace=True) as dev:
        program(dev, 99)
        spans = sorted(dev.trace.spans, key=lambda span: span.number)
        by_stream: dict[int, float] = {}
        for span in spans:
            assert span.end >= span.start >= by_stream.get(span.stream, 0)
            by_stream[span.stream] = span.end
        assert dev.now >= max(span.end for span in spans)


def test_memory_of_the_model_is_bounded() -> None:
    """Nodes are served as the host goes on, so nothing piles up without a synchronise."""
    with plain(launch_cost=20) as dev:
        a, b = dev.stream(), dev.stream()
        event = dev.event()
        for _ in range(3000):
            a.compute(5)
            event.record(a)
            b.wait_event(event)
            b.compute(5)
        assert len(dev._core.clock.heap) < 10


def test_the_wall_clock_goes_on() -> None:
    with device() as dev:
        before = dev.now
        dev.stream().compute(1000)
        dev.synchronize_blocking()
        assert dev.now >= before + 1000
        assert dev.busy == {}


async def test_a_batch_asks_each_resource_once() -> None:
    """Pinned and pageable sources in one batch: one latency, and all bytes, on one link."""
    async with kvcore.Device("A3", clock="model") as dev:
        assert dev.profile is not None
        stream = dev.stream()
        n = 100_000
        there = dev.empty((2, n), "uint8")
        stream.copy_batch([there[0], there[1]], [dev.empty_host(n, "uint8"), np.zeros(n, np.uint8)])
        await stream.synchronize()
        nbytes = n + n / dev.profile.value("pageable_share")
        share = dev.profile.value("h2d_latency") + 2 * dev.profile.value("h2d_descriptor")
        share += nbytes / dev.profile.value("h2d_bandwidth") * 1e-3
        assert dev.busy["h2d"] == pytest.approx(share)
        assert dev.now == pytest.approx(dev.profile.value("launch_cost") + share)
