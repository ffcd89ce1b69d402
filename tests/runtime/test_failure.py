# SPDX-License-Identifier: Apache-2.0
"""What happens behind a failure, who is told, and how often."""

from __future__ import annotations

import traceback

import anyio
import numpy as np
import pytest
from fakes import FakePlan, Gate, Scatter, device

import kvcore


class Broken(Exception):
    pass


def fail() -> None:
    raise Broken("out of luck")


def poll(stream: kvcore.Stream) -> None:
    while not stream.query():
        pass


async def test_a_failure_is_told_once_and_the_stream_is_usable_again(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream("s")
        behind, later = FakePlan(), FakePlan()
        stream.launch(FakePlan(fail, name="boom"))
        stream.launch(behind)
        with pytest.raises(
            kvcore.StreamError,
            match=r"^stream 's': boom on stream 's' failed: Broken: out of luck$",
        ) as told:
            await stream.synchronize()
        assert isinstance(told.value.__cause__, Broken)
        assert "fail" in "".join(traceback.format_tb(told.value.__cause__.__traceback__))
        await stream.synchronize()
        stream.launch(later)
        await stream.synchronize()
        assert (behind.runs, later.runs) == (0, 1)


async def test_three_dependent_streams(clock: str) -> None:
    async with device(clock) as dev:
        origin = dev.stream("origin")
        dependents = [dev.stream(f"d{i}") for i in range(3)]
        free = dev.stream("free")
        plans = [FakePlan() for _ in range(3)]
        unharmed = FakePlan()
        gate = Gate(origin)
        origin.launch(FakePlan(fail))
        event = origin.record_event()
        for stream, plan in zip(dependents, plans, strict=True):
            stream.wait_event(event)
            stream.launch(plan)
        free.launch(unharmed)
        gate.open()
        for stream in (*dependents, origin):
            with pytest.raises(kvcore.StreamError, match=r"on stream 'origin' failed") as told:
                await stream.synchronize()
            assert isinstance(told.value.__cause__, Broken)
            await stream.synchronize()
        await free.synchronize()
        assert [plan.runs for plan in plans] == [0, 0, 0]
        assert unharmed.runs == 1


async def test_failures_travel_through_a_chain(clock: str) -> None:
    async with device(clock) as dev:
        streams = [dev.stream(f"s{i}") for i in range(5)]
        streams[0].call(fail)
        for i in range(1, 5):
            streams[i].wait_stream(streams[i - 1])
        with pytest.raises(kvcore.StreamError, match=r"^stream 's4': fail on stream 's0'"):
            await streams[4].synchronize()
        with pytest.raises(kvcore.StreamError, match=r"^stream 's0'"):
            await dev.synchronize()
        await dev.synchronize()


async def test_an_event_stays_failed_until_it_is_recorded_again(clock: str) -> None:
    async with device(clock) as dev:
        stream, other = dev.stream("s"), dev.stream("other")
        stream.call(fail)
        event = stream.record_event()
        with pytest.raises(kvcore.StreamError):
            await stream.synchronize()
        for _ in range(2):
            with pytest.raises(kvcore.StreamError, match=r"^event recorded on stream 's'"):
                await event.synchronize()
            with pytest.raises(kvcore.StreamError):
                event.query()
        other.wait_event(event)
        with pytest.raises(kvcore.StreamError, match=r"^stream 'other'"):
            await other.synchronize()
        event.record(stream)
        await event.synchronize()
        other.wait_event(event)
        await other.synchronize()


async def test_events_recorded_before_the_failure_are_whole(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        before = stream.record_event()
        stream.call(fail)
        after = stream.record_event()
        gate.open()
        await before.synchronize()
        with pytest.raises(kvcore.StreamError):
            await after.synchronize()
        with pytest.raises(kvcore.StreamError):
            await stream.synchronize()


async def test_what_was_launched_before_the_host_was_told_does_not_run(clock: str) -> None:
    """The same whether the worker has come to it by then or not."""
    async with device(clock, workers=1) as dev:
        stream, blocker = dev.stream("s"), dev.stream("blocker")
        stream.call(fail)
        mark = stream.record_event()
        with pytest.raises(kvcore.StreamError):
            await mark.synchronize()
        gate = Gate(blocker)
        assert await anyio.to_thread.run_sync(gate.entered.wait, 50)
        late, fresh = FakePlan(), FakePlan()
        stream.launch(late)  # the only worker is held, so this is not looked at yet
        event = stream.record_event()
        assert stream.queue.told(None)
        stream.launch(fresh)
        gate.open()
        await stream.synchronize()
        assert (late.runs, fresh.runs) == (0, 1)
        with pytest.raises(kvcore.StreamError):
            await event.synchronize()


async def test_several_failures_at_once(clock: str) -> None:
    async with device(clock) as dev:
        a, b = dev.stream("a"), dev.stream("b")
        a.call(fail)
        b.launch(FakePlan(fail, name="other"))
        with pytest.raises(kvcore.StreamError, match=r"^stream 'a'") as told:
            await dev.synchronize()
        assert told.value.__notes__ == [
            "stream 'b': other on stream 'b' failed: Broken: out of luck"
        ]
        await dev.synchronize()


async def test_leaving_with_a_failure_nobody_saw(clock: str) -> None:
    with pytest.raises(kvcore.StreamError, match=r"failed and was not reported: Broken") as told:
        async with device(clock) as dev:
            dev.stream("s").call(fail)
    assert isinstance(told.value.__cause__, Broken)


async def test_leaving_with_a_failure_somebody_saw(clock: str) -> None:
    async with device(clock) as dev:
        stream, dependent = dev.stream("s"), dev.stream("d")
        stream.call(fail)
        dependent.wait_stream(stream)
        with pytest.raises(kvcore.StreamError):
            await stream.synchronize()


def test_blocking_calls_tell_as_well(clock: str) -> None:
    with device(clock) as dev:
        stream = dev.stream()
        for synchronize in (stream.synchronize_blocking, dev.synchronize_blocking):
            stream.call(fail)
            with pytest.raises(kvcore.StreamError):
                synchronize()
        stream.call(fail)
        event = stream.record_event()
        with pytest.raises(kvcore.StreamError):
            event.synchronize_blocking()
        with pytest.raises(kvcore.StreamError):
            stream.synchronize_blocking()
        stream.call(fail)
        with pytest.raises(kvcore.StreamError):
            poll(stream)
        assert stream.query()


async def test_run_tells_of_its_own_plan(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        with pytest.raises(kvcore.StreamError) as told:
            await stream.run(FakePlan(fail))
        assert isinstance(told.value.__cause__, Broken)
        await stream.run(FakePlan())


async def test_typed_errors_of_plans_are_the_cause(clock: str) -> None:
    async with device() as dev:
        stream = dev.stream()
        cache = np.zeros((4, 2))
        stream.launch(Scatter(np.ones((1, 2)), cache, np.array([4])))
        with pytest.raises(kvcore.StreamError) as told:
            await stream.synchronize()
        assert isinstance(told.value.__cause__, kvcore.SlotRangeError)
        assert not cache.any()


async def test_system_exit_in_a_host_function_is_a_failure() -> None:
    async with device() as dev:
        stream = dev.stream()
        stream.call(exit)
        with pytest.raises(kvcore.StreamError) as told:
            await stream.synchronize()
        assert isinstance(told.value.__cause__, SystemExit)


async def test_a_cancelled_wait_loses_no_failure(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        stream.call(fail)
        async with anyio.create_task_group() as group:
            group.start_soon(stream.synchronize)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        gate.open()
        with pytest.raises(kvcore.StreamError):
            await stream.synchronize()


@pytest.mark.parametrize("waits", ["launch", "wait", "allocate", "synchronize", "free"])
async def test_a_host_function_must_not_use_its_device(clock: str, waits: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        buffer = dev.empty_host(4)
        event = dev.event()
        stream.call(
            {
                "launch": lambda: stream.launch(FakePlan()),
                "wait": lambda: stream.wait_event(event),
                "allocate": lambda: dev.empty(3),
                "synchronize": stream.synchronize_blocking,
                "free": buffer.free,
            }[waits]
        )
        with pytest.raises(kvcore.StreamError) as told:
            await stream.synchronize()
        assert "a host function must not" in str(told.value.__cause__)
