# SPDX-License-Identifier: Apache-2.0
"""External events: waits before records, rounds, graphs, and nobody recording at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from fakes import FakePlan, Gate, device

import kvcore
from kvcore.runtime import Device, ExternalEvent, Stream


async def test_a_stream_waits_before_the_record(clock: str) -> None:
    async with device(clock) as dev:
        a, b = dev.stream("a"), dev.stream("b")
        event = dev.external_event()
        ran: list[str] = []
        event.wait(a)
        a.call(ran.append, "a")
        assert not event.recorded
        assert not event.query()
        assert not a.query()
        b.call(ran.append, "b")
        event.record(b)
        await a.synchronize()
        assert ran == ["b", "a"]
        assert event.query()
        assert repr(event) == "ExternalEvent(recorded)"


async def test_a_record_on_an_idle_stream_lets_the_others_go(clock: str) -> None:
    async with device(clock, workers=1) as dev:
        waiting, idle = [dev.stream() for _ in range(10)], dev.stream()
        event = dev.external_event()
        plan = FakePlan()
        for stream in waiting:
            stream.wait_event(event)
            stream.launch(plan)
        async with anyio.create_task_group() as group:
            group.start_soon(dev.synchronize)
            await anyio.wait_all_tasks_blocked()
            assert plan.runs == 0
            idle.record_event(event)
        assert plan.runs == 10


@pytest.mark.parametrize("order", ["wait, reset, record", "record, wait, reset"])
async def test_both_orders_of_calls_go_from_round_to_round(clock: str, order: str) -> None:
    async with device(clock) as dev:
        inner, outer = dev.stream("inner"), dev.stream("outer")
        event = dev.external_event()
        trail: list[tuple[str, int]] = []
        for i in range(20):
            calls = {
                "wait": lambda: event.wait(inner),
                "reset": lambda: event.reset(inner),
                "record": lambda i=i: (
                    outer.call(trail.append, ("outer", i)),
                    event.record(outer),
                ),
            }
            for verb in order.split(", "):
                calls[verb]()
            inner.call(trail.append, ("inner", i))
        await dev.synchronize()
        places = {entry: place for place, entry in enumerate(trail)}
        assert len(places) == 40
        for i in range(20):
            assert places["outer", i] < places["inner", i]


async def test_a_wait_in_the_next_round_waits_for_the_next_record(clock: str) -> None:
    async with device(clock) as dev:
        a, b = dev.stream("a"), dev.stream("b")
        event = dev.external_event()
        event.record(b)
        event.wait(a)
        event.reset(a)
        await a.synchronize()
        plan = FakePlan()
        event.wait(a)
        a.launch(plan)
        assert not a.query()
        event.record(b)
        event.record(b)  # set already: adds nothing
        await a.synchronize()
        assert plan.runs == 1
        fresh = dev.external_event()
        fresh.reset(a)  # nothing to reset
        fresh.record(a)
        assert fresh.recorded


async def test_a_graph_waits_for_work_outside(clock: str) -> None:
    async with device(clock) as dev:
        main, feeder = dev.stream("main"), dev.stream("feeder")
        buffer = dev.empty((8,), "int64")
        event = dev.external_event()
        seen: list[int] = []
        async with dev.capture(main) as graph:
            event.wait(main)
            event.reset(main)
            main.call(lambda: seen.append(int(buffer.__kvcore_array__[7])))
        assert graph.num_operations == 1
        for i in range(6):
            source = np.full(8, i)
            if i % 2:
                graph.replay(main)
            feeder.copy(buffer, source)
            event.record(feeder)
            if not i % 2:
                graph.replay(main)
            feeder.wait_stream(main)
        await main.synchronize()
        assert seen == list(range(6))


async def test_a_graph_records_for_those_outside(clock: str) -> None:
    async with device(clock) as dev:
        main, other = dev.stream("main"), dev.stream("other")
        event = dev.external_event()
        plan, after = FakePlan(), FakePlan()
        with dev.capture(main) as graph:
            main.launch(plan)
            event.record(main)
        event.wait(other)
        event.reset(other)
        other.launch(after)
        graph.replay(main)
        await other.synchronize()
        assert (plan.runs, after.runs) == (1, 1)


async def test_never_recorded_fails_the_wait_when_the_device_is_left(clock: str) -> None:
    plan = FakePlan()
    dev = device(clock)

    async def use() -> None:
        async with dev:
            a, b = dev.stream("a"), dev.stream("b")
            dev.external_event().wait(a)
            a.launch(plan)
            b.wait_stream(a)
            b.launch(plan)

    with pytest.raises(kvcore.StreamError, match=r"wait_event failed .* nobody recorded") as caught:
        await use()
    assert isinstance(caught.value.__cause__, kvcore.ParamInvalidError)
    assert plan.runs == 0
    with pytest.raises(kvcore.StreamError, match="closed"):
        dev.external_event()


async def test_never_recorded_is_dropped_with_everything_else(clock: str) -> None:
    plan = FakePlan()

    async def use() -> None:
        async with device(clock) as dev:
            stream = dev.stream()
            dev.external_event().wait(stream)
            stream.launch(plan)
            raise KeyError

    with pytest.raises(KeyError):
        await use()
    assert plan.runs == 0
    with device(clock) as dev:
        stream = dev.stream()
        event = dev.external_event()
        event.wait(stream)
        event.record(dev.stream())
        stream.launch(plan)
        stream.synchronize_blocking()
    assert plan.runs == 1


async def test_a_failure_passes_through(clock: str) -> None:
    async with device(clock) as dev:
        a, b = dev.stream("a"), dev.stream("b")
        event = dev.external_event()
        event.wait(b)
        plan = FakePlan()
        b.launch(plan)
        a.call(lambda: 1 // 0)
        event.record(a)
        with pytest.raises(kvcore.StreamError) as caught:
            await b.synchronize()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert plan.runs == 0
        with pytest.raises(kvcore.StreamError):
            await a.synchronize()


def model_times(dev: Device, inner: Stream, outer: Stream, event: ExternalEvent) -> list[float]:
    start, end = dev.event(), dev.event()
    start.record(inner)
    event.wait(inner)
    inner.compute(10)
    end.record(inner)
    outer.compute(100)
    event.record(outer)
    dev.synchronize_blocking()
    return [start.elapsed_time(end), dev.now]


def test_the_model_waits_for_the_record() -> None:
    times = []
    for _ in range(2):
        with device("model", trace=True) as dev:
            times.append(
                model_times(dev, dev.stream("in"), dev.stream("out"), dev.external_event())
            )
            assert [span.name for span in dev.trace.spans] == ["compute", "compute"]
    assert times[0] == times[1]
    assert times[0][0] >= 0.110


@pytest.mark.parametrize("seed", range(20))
async def test_the_race_check_knows_the_order(clock: str, seed: int) -> None:
    async with device(clock, race_check="record", seed=seed) as dev:
        load, compute, third = dev.stream("load"), dev.stream("compute"), dev.stream("third")
        buffer, source = dev.empty((64,)), dev.empty((64,))
        ready, free = dev.external_event(), dev.external_event()
        for _ in range(5):
            ready.wait(compute)
            ready.reset(compute)
            compute.launch(FakePlan(reads=[buffer]))
            third.wait_stream(compute)
            third.launch(FakePlan(writes=[buffer]))
            with source.host("w"):
                pass
            load.launch(FakePlan(reads=[source], writes=[buffer]))
            ready.record(load)
            load.wait_stream(third)
            await dev.synchronize()
        assert not dev.races
        free.wait(compute)
        compute.launch(FakePlan(writes=[buffer], name="early"))
        free.record(third)
        load.launch(FakePlan(writes=[buffer], name="unordered"))
        await dev.synchronize()
        assert [{r.first.operation, r.second.operation} for r in dev.races] == [
            {"early", "unordered"}
        ]


async def test_host_accesses_before_the_record_come_before_who_waited_for_it() -> None:
    async with device(race_check="raise") as dev:
        a, b = dev.stream("a"), dev.stream("b")
        buffer = dev.empty((64,))
        event = dev.external_event()
        event.wait(a)
        a.launch(FakePlan(reads=[buffer]))
        gate = Gate(b)
        with buffer.host("w"):
            pass
        event.record(b)
        gate.open()
        await a.synchronize()
        event.reset(a)
        event.wait(a)
        a.launch(FakePlan(reads=[buffer]))
        event.record(b)
        with buffer.host("w"):
            pass
        with pytest.raises(kvcore.RaceError):
            await a.synchronize()


async def test_late_clocks_do_not_pile_up() -> None:
    async with device(race_check="record") as dev:
        a, b = dev.stream("a"), dev.stream("b")
        event = dev.external_event()
        plan = FakePlan()
        for _ in range(50):
            event.wait(a)
            event.reset(a)
            a.launch(plan)
            event.record(b)
        await dev.synchronize()
        assert len(dev._core.race.lanes[a.index].late) <= 1


async def test_bad_input() -> None:
    async with device() as dev, device() as other:
        event = dev.external_event()
        with pytest.raises(kvcore.ParamInvalidError, match=r"^stream: .* one of another device$"):
            event.wait(other.stream())
        with pytest.raises(kvcore.ParamInvalidError, match=r"^stream: .* got int$"):
            event.record(3)  # type: ignore[arg-type]
        stream = dev.stream()
        stream.call(event.record)
        with pytest.raises(kvcore.StreamError, match="a host function must not"):
            await stream.synchronize()


# ---------------------------------------------------------------- a record behind its own wait
MESSAGE = r"^event: expected an external event .* does not wait for that record, got stream '{}'"


def on_the_same_stream(dev: Device, circle: bool) -> str:
    a, b = dev.stream("a"), dev.stream("b")
    event = dev.external_event()
    event.wait(a)
    event.record(a if circle else b)
    return "a"


def over_two_events(dev: Device, circle: bool) -> str:
    a, b, c = dev.stream("a"), dev.stream("b"), dev.stream("c")
    x, y = dev.external_event(), dev.external_event()
    x.wait(a)
    y.wait(b)
    x.record(b)
    y.record(a if circle else c)
    return "a"


def through_ordinary_events(dev: Device, circle: bool) -> str:
    streams = [dev.stream(f"s{i}") for i in range(5)]
    event = dev.external_event()
    if not circle:
        streams[4].record_event()
    event.wait(streams[0])
    for before, stream in itertools.pairwise(streams):
        if circle or stream is not streams[4]:
            stream.wait_stream(before)
            stream.compute(1)
    event.record(streams[4])
    return "s4"


def through_a_graph(dev: Device, circle: bool) -> str:
    """The graph waits for the one and records the other, which is what the record waits for."""
    main, other, third = dev.stream("main"), dev.stream("other"), dev.stream("third")
    x, y = dev.external_event(), dev.external_event()
    with dev.capture(main) as graph:
        x.wait(main)
        main.compute(1)
        y.record(main)
    graph.replay(main)
    if circle:
        y.wait(other)
    else:
        y.wait(third)
    x.record(other)
    return "other"


CIRCLES = [on_the_same_stream, over_two_events, through_ordinary_events]


@pytest.mark.parametrize("program", CIRCLES)
@pytest.mark.parametrize("race_check", ["off", "raise"])
async def test_a_record_behind_its_own_wait_is_refused(
    clock: str, race_check: str, program: Callable[[Device, bool], str]
) -> None:
    await refused_at_the_record(clock, race_check, program)


async def test_a_circle_through_a_graph_is_refused(clock: str) -> None:
    for race_check in ("off", "raise"):
        await refused_at_the_record(clock, race_check, through_a_graph)


async def refused_at_the_record(
    clock: str, race_check: Any, program: Callable[[Device, bool], str]
) -> None:
    async with device(clock, race_check=race_check) as dev:
        program(dev, False)
        await dev.synchronize()
    dev = device(clock, race_check=race_check)
    with pytest.raises(kvcore.ParamInvalidError, match="does not wait for that record") as caught:
        async with dev:
            program(dev, True)
    assert caught.value.argument == "event"
    fresh = device(clock, race_check=race_check)
    async with fresh:
        pass


@pytest.mark.parametrize("program", CIRCLES)
async def test_what_waits_in_a_circle_fails_when_the_device_is_left(
    clock: str, program: Callable[[Device, bool], str]
) -> None:
    await failed_at_the_end(clock, program)


async def test_a_circle_through_a_graph_fails_when_the_device_is_left(clock: str) -> None:
    await failed_at_the_end(clock, through_a_graph)


async def failed_at_the_end(clock: str, program: Callable[[Device, bool], str]) -> None:
    refused: list[object] = []

    async def use() -> None:
        async with device(clock) as dev:
            with pytest.raises(kvcore.ParamInvalidError) as caught:
                program(dev, True)
            refused.append(caught.value.seen)

    with pytest.raises(kvcore.StreamError, match=r"wait_event failed .* nobody recorded"):
        await use()
    assert refused in (["a"], ["s4"], ["other"])


async def test_a_refused_record_can_be_made_elsewhere(clock: str) -> None:
    async with device(clock) as dev:
        a, b = dev.stream("a"), dev.stream("b")
        event = dev.external_event()
        plan = FakePlan()
        event.wait(a)
        a.launch(plan)
        with pytest.raises(kvcore.ParamInvalidError, match=MESSAGE.format("a")):
            event.record(a)
        assert not event.recorded
        assert plan.runs == 0
        event.record(b)
        await a.synchronize()
        assert plan.runs == 1
        event.record(a)  # set already: adds nothing
        event.reset(a)
        event.wait(b)
        event.record(a)  # the wait of the round before is over
        await b.synchronize()


async def test_a_graph_that_records_behind_its_own_wait_fails_when_it_is_replayed(
    clock: str,
) -> None:
    async with device(clock) as dev:
        main, other = dev.stream("main"), dev.stream("other")
        event = dev.external_event()
        before, behind = FakePlan(), FakePlan()
        with dev.capture(main) as graph:
            main.launch(before)
            event.wait(main)
            main.launch(behind)
            event.record(main)
            event.reset(main)
        event.record(other)
        graph.replay(main)  # set from outside: the graph's own record adds nothing
        await main.synchronize()
        assert (before.runs, behind.runs) == (1, 1)
        graph.replay(main)
        with pytest.raises(kvcore.StreamError, match=r"record on stream 'main' failed") as caught:
            await main.synchronize()
        assert isinstance(caught.value.__cause__, kvcore.ParamInvalidError)
        assert (before.runs, behind.runs) == (2, 1)
        event.record(other)
        graph.replay(main)
        await main.synchronize()
        assert (before.runs, behind.runs) == (3, 2)


async def test_a_graph_in_a_circle_with_others_is_told_when_the_device_is_left(clock: str) -> None:
    plan = FakePlan()

    async def use() -> None:
        async with device(clock) as dev:
            main, other = dev.stream("main"), dev.stream("other")
            x, y = dev.external_event(), dev.external_event()
            with dev.capture(main) as graph:
                x.wait(main)
                main.launch(plan)
                y.record(main)
            y.wait(other)
            x.record(other)
            graph.replay(main)

    with pytest.raises(kvcore.StreamError, match="does not wait for that record"):
        await use()
    assert plan.runs == 0


async def test_what_waits_for_records_does_not_pile_up() -> None:
    async with device() as dev:
        a, b = dev.stream("a"), dev.stream("b")
        event = dev.external_event()
        marks = []
        for _ in range(50):
            event.wait(a)
            event.reset(a)
            event.record(b)
            b.wait_stream(a)
            marks.append(a.record_event())
        await dev.synchronize()
        event.wait(a)
        last = a.record_event()
        assert len(last.mark.promises) == 1
        assert all(mark.mark.promises is None for mark in marks)
        event.record(b)
