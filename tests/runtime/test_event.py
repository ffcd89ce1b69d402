# SPDX-License-Identifier: Apache-2.0
"""Events: what a wait binds to, what is nothing at all, and times."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakePlan, Gate, device

import kvcore


async def test_one_event_recorded_again_every_layer(clock: str) -> None:
    async with device(clock) as dev:
        load, compute = dev.stream("load"), dev.stream("compute")
        event = dev.event()
        buffer = dev.empty((64,), "int64")
        seen: list[int] = []
        sources = [np.full(64, layer) for layer in range(50)]
        done = dev.event()
        for layer in range(50):
            load.wait_event(done)
            load.copy(buffer, sources[layer])
            event.record(load)
            compute.wait_event(event)
            compute.call(lambda: seen.append(int(buffer.__kvcore_array__[63])))
            done.record(compute)
        await compute.synchronize()
        assert seen == list(range(50))


async def test_waiting_on_an_event_never_recorded(clock: str) -> None:
    async with device(clock) as dev:
        stream, plan = dev.stream(), FakePlan()
        event = dev.event()
        stream.wait_event(event)
        stream.launch(plan)
        await stream.synchronize()
        assert plan.runs == 1
        assert event.query()
        assert not event.recorded
        await event.synchronize()
        event.synchronize_blocking()


async def test_waiting_on_one_s_own_stream(clock: str) -> None:
    async with device(clock) as dev:
        stream, plan = dev.stream(), FakePlan()
        gate = Gate(stream)
        event = stream.record_event()
        stream.wait_event(event)
        stream.wait_stream(stream)
        stream.launch(plan)
        gate.open()
        await stream.synchronize()
        assert plan.runs == 1


async def test_query_and_synchronize(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        event = stream.record_event()
        behind = Gate(stream)
        assert not event.query()
        gate.open()
        await event.synchronize()
        assert event.query()
        assert not stream.query()
        behind.open()


async def test_record_and_wait_use_the_current_stream() -> None:
    async with device() as dev:
        a, b = dev.stream("a"), dev.stream("b")
        event = dev.event(blocking=True, enable_timing=False)
        plan = FakePlan()
        gate = Gate(a)
        with dev.use(a):
            event.record()
        with dev.use(b):
            event.wait()
        b.launch(plan)
        assert not b.query()
        gate.open()
        await b.synchronize()
        assert plan.runs == 1


async def test_elapsed_time_on_the_wall_clock() -> None:
    async with device() as dev:
        stream = dev.stream()
        start, end = dev.event(), dev.event()
        start.record(stream)
        stream.compute(3000)
        end.record(stream)
        with pytest.raises(kvcore.StreamError, match=r"^other: .* reached, got one .* pending$"):
            start.elapsed_time(end)
        await stream.synchronize()
        assert start.elapsed_time(end) >= 3.0
        assert end.elapsed_time(start) == -start.elapsed_time(end)


async def test_elapsed_time_on_the_model_clock() -> None:
    async with device("model") as dev:
        stream = dev.stream()
        start, end = dev.event(), dev.event()
        stream.compute(10)
        start.record(stream)
        stream.compute(250)
        end.record(stream)
        with pytest.raises(kvcore.StreamError, match=r"pending$"):
            start.elapsed_time(end)
        await stream.synchronize()
        assert start.elapsed_time(end) == pytest.approx(0.250)


async def test_elapsed_time_asks_for_timing_and_for_records() -> None:
    async with device() as dev:
        stream = dev.stream()
        one, two = dev.event(), dev.event(enable_timing=False)
        with pytest.raises(kvcore.StreamError, match=r"^event: .* got one that is not recorded$"):
            one.elapsed_time(dev.event())
        one.record(stream)
        two.record(stream)
        with pytest.raises(kvcore.ParamInvalidError, match=r"^other: .*enable_timing=True"):
            one.elapsed_time(two)
        with pytest.raises(kvcore.ParamInvalidError, match=r"^other: .* got int$"):
            one.elapsed_time(3)


@pytest.mark.parametrize("workers", [1, 2, 4])
async def test_ping_pong(clock: str, workers: int) -> None:
    async with device(clock, workers=workers) as dev:
        a, b = dev.stream("a"), dev.stream("b")
        ping, pong = dev.event(), dev.event()
        trail: list[str] = []
        for _ in range(300):
            a.wait_event(pong)
            a.call(trail.append, "a")
            ping.record(a)
            b.wait_event(ping)
            b.call(trail.append, "b")
            pong.record(b)
        await b.synchronize()
        assert trail == ["a", "b"] * 300
