# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT012  (a whole capture block is what raises here)
"""Capture and replay: contents read at replay, forks, joins, and what a capture refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import FakePlan, Gate, Scatter, device

import kvcore


async def test_replay_with_other_slots_and_with_negative_ones(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        rows, cache = dev.empty((3, 4), "int32"), dev.empty((8, 4), "int32")
        slots = np.array([0, 1, 2])
        rows.numpy()[:] = 1
        cache.numpy()[:] = 0
        async with dev.capture(stream) as graph:
            stream.launch(Scatter(rows, cache, slots))
        await stream.synchronize()
        assert cache.numpy().sum() == 0
        graph.replay(stream)
        await stream.synchronize()
        assert np.flatnonzero(cache.numpy()[:, 0]).tolist() == [0, 1, 2]
        slots[:] = [7, -1, 5]
        rows.numpy()[:] = 2
        graph.replay(stream)
        await stream.synchronize()
        assert cache.numpy()[:, 0].tolist() == [1, 1, 1, 0, 0, 2, 0, 2]
        slots[:] = -1
        before = cache.numpy().copy()
        graph.replay(stream)
        await stream.synchronize()
        assert np.array_equal(cache.numpy(), before)


async def test_every_kind_of_work_is_recorded(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        a, b = dev.empty(4, "int32"), dev.empty_host(4, "int32")
        counts = [0]

        def count() -> None:
            counts[0] += 1

        with dev.capture(stream) as graph:
            assert stream.is_capturing
            stream.fill(a, 7)
            stream.copy(b, a)
            stream.copy_batch([a], [b])
            stream.compute(5)
            stream.call(count)
            stream.launch(FakePlan(count))
        assert not stream.is_capturing
        assert graph.num_operations == 6
        for _ in range(3):
            graph.replay(stream)
        await stream.synchronize()
        assert counts == [6]
        assert b.numpy().tolist() == [7] * 4


async def test_forks_and_joins(clock: str) -> None:
    async with device(clock) as dev:
        main, left, right = dev.stream("main"), dev.stream("left"), dev.stream("right")
        trail: list[str] = []
        async with dev.capture(main) as graph:
            main.call(trail.append, "begin")
            fork = main.record_event()
            left.wait_event(fork)
            right.wait_stream(main)
            left.call(trail.append, "left")
            right.call(trail.append, "right")
            right.wait_stream(left)
            right.call(trail.append, "both")
            main.wait_stream(right)
            main.call(trail.append, "end")
        assert trail == []
        assert not left.is_capturing
        for _ in range(20):
            graph.replay(main)
            main.synchronize_blocking()
            assert trail[0] == "begin"
            assert sorted(trail[1:3]) == ["left", "right"]
            assert trail[3:] == ["both", "end"]
            trail.clear()


async def test_replays_of_one_graph_on_two_streams(clock: str) -> None:
    async with device(clock) as dev:
        main, side, other = dev.stream("main"), dev.stream("side"), dev.stream("other")
        counts = [0, 0]

        def count(i: int) -> None:
            counts[i] += 1

        async with dev.capture(main) as graph:
            side.wait_stream(main)
            side.call(count, 0)
            main.call(count, 1)
            main.wait_stream(side)
        for _ in range(50):
            graph.replay(main)
            graph.replay(other)
        await dev.synchronize()
        assert counts == [100, 100]


async def test_streams_keep_their_own_queue_during_a_capture(clock: str) -> None:
    """What was launched before the capture runs, and other streams are not part of it."""
    async with device(clock) as dev:
        stream, other = dev.stream("s"), dev.stream("o")
        gate = Gate(stream)
        before, inside, beside = FakePlan(), FakePlan(), FakePlan()
        stream.launch(before)
        async with dev.capture(stream) as graph:
            stream.launch(inside)
            other.launch(beside)
            await other.synchronize()
            assert beside.runs == 1
            gate.open()
        await stream.synchronize()
        assert (before.runs, inside.runs) == (1, 0)
        graph.replay(stream)
        await stream.synchronize()
        assert inside.runs == 1


REFUSED: dict[str, Callable[[Any, Any, Any, Any], object]] = {
    "synchronise": lambda d, s, e, b: s.synchronize_blocking(),
    "device": lambda d, s, e, b: d.synchronize_blocking(),
    "query": lambda d, s, e, b: s.query(),
    "event": lambda d, s, e, b: s.record_event().synchronize_blocking(),
    "event query": lambda d, s, e, b: s.record_event().query(),
    "allocate": lambda d, s, e, b: d.empty(3),
    "allocate host": lambda d, s, e, b: d.empty_host(3),
    "free": lambda d, s, e, b: b.free(),
    "host": lambda d, s, e, b: b.host("r").__enter__(),
    "numpy": lambda d, s, e, b: b.numpy(),
    "capture": lambda d, s, e, b: d.capture(s).__enter__(),
    "outside": lambda d, s, e, b: s.wait_event(e),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_a_capture_refuses(clock: str, what: str) -> None:
    """The call raises, nothing is recorded for it, and stream and capture stay usable."""
    async with device(clock) as dev:
        stream, other = dev.stream("s"), dev.stream("o")
        buffer = dev.empty(4)
        event = other.record_event()
        plan = FakePlan()
        async with dev.capture(stream) as graph:
            stream.launch(plan)
            with pytest.raises(kvcore.CaptureError, match=r"^(stream 's'|device|event): expected"):
                REFUSED[what](dev, stream, event, buffer)
            stream.launch(plan)
        await stream.synchronize()
        graph.replay(stream)
        await stream.synchronize()
        assert plan.runs == 2


async def test_awaiting_inside_a_capture(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        plan = FakePlan()
        async with dev.capture(stream):
            for wait in (stream.synchronize, dev.synchronize):
                with pytest.raises(kvcore.CaptureError):
                    await wait()
            with pytest.raises(kvcore.CaptureError):
                await stream.run(plan)
        await stream.run(plan)
        assert plan.runs == 1


async def test_a_capture_that_an_error_ends(clock: str) -> None:
    async with device(clock) as dev:
        stream, side = dev.stream("s"), dev.stream("side")
        plan = FakePlan()
        capture = dev.capture(stream)
        with pytest.raises(kvcore.CaptureError):
            async with capture as graph:
                side.wait_stream(stream)
                stream.launch(plan)
                await stream.synchronize()
        assert not stream.is_capturing
        assert not side.is_capturing
        with pytest.raises(kvcore.CaptureError, match=r"whose capture failed$"):
            graph.replay(stream)
        for s in (stream, side):
            await s.run(plan)
        assert plan.runs == 2
        dev.empty(3)


async def test_a_fork_that_nothing_joins(clock: str) -> None:
    async with device(clock) as dev:
        main, side = dev.stream("main"), dev.stream("side")
        plan = FakePlan()
        with pytest.raises(kvcore.CaptureError, match=r"^stream 'side': expected a fork that"):
            async with dev.capture(main):
                side.wait_stream(main)
                side.launch(plan)
        await side.run(plan)
        assert plan.runs == 1


async def test_work_after_the_join_is_not_joined(clock: str) -> None:
    async with device(clock) as dev:
        main, side = dev.stream("main"), dev.stream("side")
        with pytest.raises(kvcore.CaptureError, match=r"^stream 'side'"):
            async with dev.capture(main):
                side.wait_stream(main)
                side.launch(FakePlan())
                main.wait_stream(side)
                side.launch(FakePlan())


async def test_events_recorded_in_a_capture_mean_nothing_outside(clock: str) -> None:
    async with device(clock) as dev:
        main, other = dev.stream("main"), dev.stream("other")
        event = dev.event()
        async with dev.capture(main):
            event.record(main)
        with pytest.raises(kvcore.CaptureError, match=r"recorded inside a capture that has ended"):
            other.wait_event(event)
        with pytest.raises(kvcore.CaptureError):
            await event.synchronize()
        event.record(main)
        other.wait_event(event)
        await event.synchronize()


async def test_a_failure_in_a_fork_fails_the_replay_and_nothing_else(clock: str) -> None:
    async with device(clock) as dev:
        main, side = dev.stream("main"), dev.stream("side")
        broken = [True]
        after = FakePlan()

        def act() -> None:
            if broken[0]:
                raise ValueError("broken")

        async with dev.capture(main) as graph:
            side.wait_stream(main)
            side.launch(FakePlan(act, name="act"))
            main.wait_stream(side)
            main.launch(after)
        for _ in range(2):
            graph.replay(main)
            with pytest.raises(kvcore.StreamError, match=r"^stream 'main': act on stream"):
                await main.synchronize()
        await side.synchronize()
        broken[0] = False
        graph.replay(main)
        await main.synchronize()
        assert after.runs == 1
        await dev.synchronize()


async def test_replay_refuses(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        buffer = dev.empty(4, "int32")
        async with dev.capture(stream) as graph:
            stream.fill(buffer, 1)
            with pytest.raises(kvcore.CaptureError):
                graph.replay(stream)
        async with dev.capture(stream):
            with pytest.raises(kvcore.CaptureError, match=r"replay a graph$"):
                graph.replay(stream)
        with dev.use(stream):
            graph.replay()
        await stream.synchronize()
        buffer.free()
        with pytest.raises(kvcore.ParamInvalidError, match=r"^graph: expected live memory"):
            graph.replay(stream)
    with pytest.raises(kvcore.StreamError, match="closed"):
        graph.replay(stream)


async def test_pageable_copies_cannot_be_captured_on_a_modelled_device() -> None:
    async with kvcore.Device("A3") as dev:
        stream = dev.stream()
        buffer = dev.empty(4)
        async with dev.capture(stream) as graph:
            with pytest.raises(kvcore.CaptureError, match=r"^src: .* copy pageable memory"):
                stream.copy(buffer, np.zeros(4, np.float32))
        assert graph.num_operations == 0


async def test_a_replay_costs_one_launch() -> None:
    async with device("model") as dev:
        stream = dev.stream()
        async with dev.capture(stream) as graph:
            for _ in range(100):
                stream.launch(FakePlan())
        before = dev.now
        graph.replay(stream)
        assert dev.now - before == pytest.approx(dev.profile.value("launch_cost"))


async def test_forks_overlap_on_the_model_clock() -> None:
    """A copy beside compute: the replay takes the longer of the two."""
    async with device("model") as dev:
        main, side = dev.stream("main"), dev.stream("side")
        host, there = dev.empty_host(10_000_000, "uint8"), dev.empty(10_000_000, "uint8")
        async with dev.capture(main) as graph:
            side.wait_stream(main)
            side.copy(there, host)
            main.compute(250)
            main.wait_stream(side)
        start = main.record_event()
        graph.replay(main)
        end = main.record_event()
        await main.synchronize()
        copy = dev.profile.value("h2d_latency") + 1e4 / dev.profile.value("h2d_bandwidth")
        copy += dev.profile.value("h2d_descriptor")
        assert 1e3 * start.elapsed_time(end) == pytest.approx(max(250, copy), abs=8)
