# SPDX-License-Identifier: Apache-2.0
"""What every driver owes its device: ``kvcore.runtime.abc``, asked by way of a program.

The same tests run on the model's driver with both clocks, on a driver in memory that was written
from the contract's text (``thread_driver``), and, in ``test_device_runtime``, on aclnn's.  The
device's memory is only reached by copies, as no host reaches an NPU's.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from fakes import Gate, Hold
from thread_driver import ThreadDriver

import kvcore
from kvcore.errors import CaptureError, DeviceOutOfMemoryError, ParamInvalidError, StreamError

Make = Callable[[], kvcore.Device]

MAKERS: dict[str, Make] = {
    "model_wall": lambda: kvcore.Device("A3"),
    "model_clock": lambda: kvcore.Device("A3", clock="model"),
    "threads": lambda: kvcore.Device(backend=ThreadDriver()),
    "threads_with_one_worker": lambda: kvcore.Device(backend=ThreadDriver(), workers=1),
    "threads_with_a_race_check": lambda: kvcore.Device(backend=ThreadDriver(), race_check="raise"),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


def fail() -> None:
    raise ZeroDivisionError("on purpose")


def pinned(dev: kvcore.Device, values: Any) -> kvcore.Buffer:
    values = np.asarray(values, np.int32)
    found = dev.empty_host(values.shape, "int32")
    found.numpy()[...] = values
    return found


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("space", ["device", "host", "swapped"])
def test_memory_of_each_space_is_counted_and_given_back(make: Make, space: str) -> None:
    with make() as dev:
        take = {"device": dev.empty, "host": dev.empty_host, "swapped": dev.empty_swapped}[space]
        one, two = take((3, 4), "int32"), take((0, 7), "int32")
        assert dev.memory(space).used == 48
        assert one.address % 512 == 0
        assert two.nbytes == 0
        one.free()
        assert dev.memory(space).used == 0
        held = take(5, "int32")
    assert held.freed
    info = dev.memory(space)
    assert (info.used, info.allocations, info.frees) == (0, 3, 3)


def test_more_memory_than_there_is(make: Make) -> None:
    with make() as dev:
        capacity = dev.memory().capacity
        assert capacity is not None
        with pytest.raises(DeviceOutOfMemoryError) as raised:
            dev.empty(capacity + 1, "int8")
        assert raised.value.total == capacity
        assert dev.memory().used == 0
        dev.empty(16, "int8").free()  # there is still some


def test_copies_carry_bytes_through_every_space(make: Make) -> None:
    values = np.arange(60, dtype=np.int32).reshape(5, 12)
    with make() as dev:
        stream, there, swapped = dev.stream(), dev.empty((5, 12), "int32"), None
        source, back = pinned(dev, values), pinned(dev, np.full((5, 12), -1))
        swapped = dev.empty_swapped((5, 12), "int32")
        plain = np.full((5, 12), -1, np.int32)
        stream.copy(there, source)
        stream.copy(swapped, there)
        stream.copy_batch([back[i] for i in range(1, 4)], [there[i] for i in range(1, 4)])
        stream.copy(plain, there)
        stream.fill(there, 7)
        stream.synchronize_blocking()
        assert np.array_equal(swapped.numpy(), values)
        assert np.array_equal(back.numpy()[1:4], values[1:4])
        assert (back.numpy()[[0, 4]] == -1).all()
        assert np.array_equal(plain, values)


def test_work_keeps_its_memory(make: Make) -> None:
    with make() as dev:
        stream, there, back = dev.stream(), dev.empty(9, "int32"), pinned(dev, np.zeros(9))
        gate = Gate(stream)
        source = pinned(dev, np.arange(9))
        stream.copy(there, source)
        stream.copy(back, there)
        del source, there
        gc.collect()
        gate.open()
        stream.synchronize_blocking()
        assert back.numpy().tolist() == list(range(9))


# ---------------------------------------------------------------- order


def test_launching_does_not_wait_and_a_stream_keeps_the_order(make: Make) -> None:
    ran: list[int] = []
    with make() as dev:
        stream = dev.stream()
        gate = Gate(stream)
        for i in range(200):
            stream.call(ran.append, i)
        event = stream.record_event()
        assert ran == []
        assert not event.query()
        assert not stream.query()
        assert not stream.idle
        gate.open()
        stream.synchronize_blocking()
        assert ran == list(range(200))
        assert event.query()
        assert stream.query()
        assert stream.idle


def test_many_threads_launch_on_one_stream(make: Make) -> None:
    ran: list[tuple[int, int]] = []
    with make() as dev:
        stream = dev.stream()

        def launch(me: int) -> None:
            for i in range(250):
                stream.call(ran.append, (me, i))

        threads = [threading.Thread(target=launch, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stream.synchronize_blocking()
    assert len(ran) == 1000
    for me in range(4):
        assert [i for who, i in ran if who == me] == list(range(250))


def test_streams_owe_each_other_nothing(make: Make) -> None:
    ran: list[str] = []
    with make() as dev:
        held, free = dev.stream("held"), dev.stream("free")
        gate = Gate(held)
        free.call(ran.append, "free")
        free.synchronize_blocking()
        assert ran == ["free"]
        gate.open()


def test_an_event_orders_two_streams(make: Make) -> None:
    ran: list[str] = []
    with make() as dev:
        first, second = dev.stream(), dev.stream()
        gate = Gate(first)
        first.call(ran.append, "first")
        event = first.record_event()
        first.call(ran.append, "behind")
        second.wait_event(event)
        second.call(ran.append, "second")
        gate.open()
        dev.synchronize_blocking()
        assert ran.index("first") < ran.index("second")
        assert sorted(ran) == ["behind", "first", "second"]


def test_a_wait_means_the_last_record_before_it(make: Make) -> None:
    ran: list[str] = []
    with make() as dev:
        first, second, third = dev.stream(), dev.stream(), dev.stream()
        event = dev.event()
        first.call(ran.append, "first")
        event.record(first)
        second.wait_event(event)
        gate = Gate(first)
        event.record(first)  # behind the gate
        second.call(ran.append, "second")
        third.wait_event(event)
        third.call(ran.append, "third")
        second.synchronize_blocking()
        assert ran == ["first", "second"]
        assert not event.query()
        gate.open()
        third.synchronize_blocking()
        assert ran == ["first", "second", "third"]


def test_an_external_event_is_waited_for_before_it_is_recorded(make: Make) -> None:
    ran: list[str] = []
    with make() as dev:
        waits, records, event = dev.stream(), dev.stream(), dev.external_event()
        waits.wait_event(event)
        waits.call(ran.append, "waits")
        records.call(ran.append, "records")
        assert dev.awaits_external
        records.record_event(event)
        dev.synchronize_blocking()
        assert ran == ["records", "waits"]


def test_an_external_event_that_nobody_records_fails_the_wait(make: Make) -> None:
    ran: list[int] = []
    with pytest.raises(StreamError, match="nobody recorded"), make() as dev:  # noqa: PT012
        stream = dev.stream()
        stream.wait_event(dev.external_event())
        stream.call(ran.append, 1)
    assert ran == []


# ---------------------------------------------------------------- completion


async def test_tasks_wait_and_a_cancel_ends_the_waiting_alone(make: Make) -> None:
    ran: list[int] = []
    async with make() as dev:
        stream = dev.stream()
        gate = Gate(stream)
        stream.call(ran.append, 1)
        event = stream.record_event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(event.synchronize)
            tasks.start_soon(stream.synchronize)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert ran == []
        gate.open()
        await stream.synchronize()
        assert ran == [1]
        await event.synchronize()
        await checkpoint()


def test_a_wait_for_seconds(make: Make) -> None:
    with make() as dev:
        stream = dev.stream()
        gate = Gate(stream)
        with pytest.raises(StreamError, match=r"^stream 'stream': expected its work to be done in"):
            stream.synchronize_blocking(0)
        for wrong in (-1, "1", float("nan"), True):
            with pytest.raises(ParamInvalidError, match=r"^timeout_s: expected seconds"):
                stream.synchronize_blocking(wrong)  # type: ignore[arg-type]
        gate.open()
        stream.synchronize_blocking(50)
        stream.synchronize_blocking(0)  # there is nothing to wait for
        assert stream.idle


def test_time_goes_on(make: Make) -> None:
    with make() as dev:
        stream, there = dev.stream(), dev.empty(1 << 12, "int32")
        begin, end = dev.event(), dev.event()
        stream.fill(there, 1)
        begin.record(stream)
        with pytest.raises(StreamError, match="recorded and reached"):
            begin.elapsed_time(end)
        stream.fill(there, 2)
        end.record(stream)
        stream.synchronize_blocking()
        assert 0 <= begin.elapsed_time(end) < 1e5
        assert dev.now > 0


async def test_drain_tells_of_no_failure(make: Make) -> None:
    async with make() as dev:
        stream = dev.stream()
        stream.call(fail)
        await stream.drain()
        stream.drain_blocking()
        with pytest.raises(StreamError):
            await stream.synchronize()


# ---------------------------------------------------------------- statistics


def test_statistics_of_work_that_is_held(make: Make) -> None:
    with make() as dev:
        stream, waits = dev.stream("s"), dev.stream("w")
        gate = Gate(stream)
        assert gate.entered.wait(50)
        for _ in range(3):
            stream.call(int)
        waits.wait_stream(stream)
        waits.call(int)
        found = stream.statistics()
        assert (found.name, found.queued, found.running, found.done) == ("s", 3, 1, 0)
        assert not found.failed
        assert not found.capturing
        held = dev.empty(8, "int32")
        of_all = dev.statistics()
        assert [one.name for one in of_all.streams] == ["s", "w"]
        assert (of_all.queued, of_all.running, of_all.done) == (4, 1, 0)
        assert of_all.memory["device"].used == held.nbytes
        assert set(of_all.memory) == {"device", "host", "swapped"}
        while not waits.statistics().waiting:  # a worker comes to it
            pass
        gate.open()
        dev.synchronize_blocking()
        of_all = dev.statistics()
        assert (of_all.queued, of_all.running, of_all.done) == (0, 0, 5)
        assert not any(one.waiting for one in of_all.streams)


def test_statistics_of_failures_and_captures(make: Make) -> None:
    with make() as dev:
        stream, event = dev.stream(), dev.external_event()
        stream.call(fail)
        stream.call(int)
        stream.drain_blocking()
        found = dev.statistics()
        assert (found.queued, found.running, found.done, found.unseen_failures) == (0, 0, 1, 1)
        assert stream.statistics().failed
        with pytest.raises(StreamError):
            stream.synchronize_blocking()
        assert not stream.statistics().failed
        assert dev.statistics().unseen_failures == 0
        source, there = pinned(dev, [1, 2]), dev.empty(2, "int32")
        with dev.capture(stream):
            stream.copy(there, source)
            found = dev.statistics()
            assert (found.captures, found.queued) == (1, 0)
            assert stream.statistics().capturing
        assert dev.statistics().captures == 0
        stream.wait_event(event)
        assert dev.statistics().external_events == 1
        event.record(dev.stream())
        assert dev.statistics().external_events == 0


async def test_statistics_of_tasks_that_wait(make: Make) -> None:
    async with make() as dev:
        stream = dev.stream()
        gate = Gate(stream)
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(stream.synchronize)
            await anyio.wait_all_tasks_blocked()
            assert dev.statistics().tasks_waiting == 3
            gate.open()
        assert dev.statistics().tasks_waiting == 0
    assert dev.statistics().running == 0


# ---------------------------------------------------------------- failures


def test_a_failure_is_told_once_and_nothing_behind_it_runs(make: Make) -> None:
    ran: list[str] = []
    with make() as dev:
        stream = dev.stream("s")
        stream.call(ran.append, "before")
        before = stream.record_event()
        stream.call(fail)
        stream.call(ran.append, "behind")
        behind = stream.record_event()
        with pytest.raises(StreamError, match=r"^stream 's': fail on stream 's' failed") as raised:
            stream.synchronize_blocking()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert ran == ["before"]
        before.synchronize_blocking()
        for _ in range(2):
            with pytest.raises(StreamError, match="event recorded on stream 's'"):
                behind.synchronize_blocking()
        stream.call(ran.append, "again")
        stream.synchronize_blocking()
        assert ran == ["before", "again"]


def test_a_failure_reaches_who_waits_and_nobody_else(make: Make) -> None:
    ran: list[str] = []
    with make() as dev:
        fails, waits, other = dev.stream("f"), dev.stream("w"), dev.stream("o")
        gate = Gate(fails)
        fails.call(fail)
        waits.wait_stream(fails)
        waits.call(ran.append, "waits")
        other.call(ran.append, "other")
        gate.open()
        with pytest.raises(StreamError, match=r"^stream 'w'"):
            waits.synchronize_blocking()
        other.synchronize_blocking()
        with pytest.raises(StreamError, match=r"^stream 'f'"):
            fails.synchronize_blocking()
        assert ran == ["other"]
        dev.synchronize_blocking()


def test_a_failure_that_nobody_saw_is_raised_at_the_end(make: Make) -> None:
    with pytest.raises(StreamError, match="fail failed and was not reported"), make() as dev:
        dev.stream().call(fail)


def test_a_host_function_must_not_use_its_device(make: Make) -> None:
    with make() as dev:
        stream = dev.stream()
        stream.call(stream.synchronize_blocking)
        with pytest.raises(StreamError, match="a host function must not"):
            stream.synchronize_blocking()


# ---------------------------------------------------------------- the end


def test_an_exception_drops_what_has_not_begun(make: Make) -> None:
    ran: list[int] = []
    with pytest.raises(ZeroDivisionError), make() as dev:  # noqa: PT012
        stream, held = dev.stream(), dev.empty(10)
        hold = Hold(stream)
        stream.call(ran.append, 1)
        hold.until_dropped()
        assert hold.entered.wait(50)
        raise ZeroDivisionError
    assert ran == []
    assert not hold.held
    assert held.freed
    with pytest.raises(StreamError, match="closed"):
        stream.call(ran.append, 2)


def test_a_device_is_entered_once(make: Make) -> None:
    dev = make()
    with pytest.raises(StreamError, match="not open"):
        dev.stream()
    with dev:
        pass
    with pytest.raises(StreamError, match="never entered"), dev:
        pass


# ---------------------------------------------------------------- captures


def test_a_capture_is_replayed_with_the_contents_of_then(make: Make) -> None:
    with make() as dev:
        stream, fork = dev.stream(), dev.stream()
        source, back = pinned(dev, np.zeros(4)), pinned(dev, np.zeros(4))
        other = pinned(dev, np.zeros(4))
        there = dev.empty(4, "int32")
        with dev.capture(stream) as graph:
            stream.copy(there, source)
            fork.wait_stream(stream)
            fork.copy(other, there)
            stream.copy(back, there)
            with pytest.raises(CaptureError):
                stream.synchronize_blocking()
            stream.wait_stream(fork)
        assert graph.num_operations == 3
        for value in (5, 6):
            source.numpy()[...] = value
            graph.replay(stream)
            stream.synchronize_blocking()
            assert (back.numpy() == value).all()
            assert (other.numpy() == value).all()


# ---------------------------------------------------------------- the driver in memory


def test_a_driver_opens_and_closes_once_and_gets_its_memory_back() -> None:
    driver = ThreadDriver(1 << 20)
    with kvcore.Device(backend=driver) as dev:
        assert dev.backend == "threads"
        assert dev.driver is driver
        assert dev.memory().capacity == 1 << 20
        held = dev.empty(100, "int8")
        assert driver.alive["device"] >= 100
        array = dev.empty_host(7, "int8").numpy()
        array[...] = 3
    assert (driver.opened, driver.closed) == (1, 1)
    del held, dev
    gc.collect()
    assert driver.alive["device"] == 0
    assert driver.alive["host"] > 0  # an array of it is alive
    assert (array == 3).all()
    del array
    gc.collect()
    assert driver.alive == {"device": 0, "host": 0, "swapped": 0}
    left = [t.name for t in threading.enumerate() if t.name.startswith("kvcore-")]
    assert left == []


def test_what_closing_complains_of_is_raised() -> None:
    driver = ThreadDriver()
    driver.closed = 1
    with (
        pytest.raises(StreamError, match=r"^device: expected to give everything back, got: "),
        kvcore.Device(backend=driver),
    ):
        pass


def test_what_only_the_model_has_is_refused() -> None:
    with pytest.raises(ParamInvalidError, match=r"^clock: expected 'wall' on backend 'threads'"):
        kvcore.Device("A3", clock="model", backend=ThreadDriver())
    with (
        kvcore.Device(backend=ThreadDriver()) as dev,
        pytest.raises(kvcore.BackendUnavailableError, match="only takes time"),
    ):
        dev.stream().compute(5)
