# SPDX-License-Identifier: Apache-2.0
"""The race check: faulty programs are found on every one of 200 seeds, repaired ones never are.

The programs are those that public bug reports describe.  Each takes ``repaired`` and differs in
one line.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import anyio
import numpy as np
import pytest
from fakes import FakePlan, Gate, Scatter, device

import kvcore

SEEDS = range(60)


def store_without_waiting(dev: kvcore.Device, repaired: bool) -> None:
    """A block is stored to the host while the kernel that fills it may still run."""
    compute, store = dev.stream("compute"), dev.stream("store")
    block, host = dev.empty(64), dev.empty_host(64)
    compute.launch(FakePlan(writes=[block], name="attention"))
    if repaired:
        store.wait_stream(compute)
    store.copy(host, block)


def load_over_a_block_being_read(dev: kvcore.Device, repaired: bool) -> None:
    """The next load overwrites a block that attention still reads."""
    compute, load = dev.stream("compute"), dev.stream("load")
    block, host = dev.empty(64), dev.empty_host(64)
    load.copy(block, host)
    compute.wait_stream(load)
    compute.launch(FakePlan(reads=[block], name="attention"))
    if repaired:
        load.wait_stream(compute)
    load.copy(block, host)


def one_event_for_every_layer(dev: kvcore.Device, repaired: bool) -> None:
    """Layers {0, 2, 6} share an event; a consumer waits before its layer's record."""
    load, compute = dev.stream("load"), dev.stream("compute")
    layers = {layer: dev.empty(64) for layer in (0, 2, 6)}
    host = dev.empty_host(64)
    event = dev.event()
    for buffer in layers.values():
        if not repaired:
            compute.wait_event(event)
        load.copy(buffer, host)
        event.record(load)
        if repaired:
            compute.wait_event(event)
        compute.launch(FakePlan(reads=[buffer]))


def waiting_for_an_event_never_recorded(dev: kvcore.Device, repaired: bool) -> None:
    load, compute = dev.stream("load"), dev.stream("compute")
    buffer, host = dev.empty(64), dev.empty_host(64)
    event = dev.event()
    load.copy(buffer, host)
    if repaired:
        event.record(load)
    compute.wait_event(event)
    compute.launch(FakePlan(reads=[buffer]))


def waiting_on_the_wrong_stream(dev: kvcore.Device, repaired: bool) -> None:
    """The loader waits for itself instead of for the reader."""
    load, compute = dev.stream("load"), dev.stream("compute")
    buffer, host = dev.empty(64), dev.empty_host(64)
    compute.launch(FakePlan(reads=[buffer]))
    load.wait_stream(compute if repaired else load)
    load.copy(buffer, host)


def source_changed_while_its_copy_is_queued(dev: kvcore.Device, repaired: bool) -> None:
    """A staging buffer is filled again before its copy was waited for."""
    load = dev.stream("load")
    buffer, staging = dev.empty(64), dev.empty_host(64)
    for step in range(2):
        with staging.host("w") as a:
            a[:] = step
        load.copy(buffer, staging)
        if repaired:
            load.synchronize_blocking()


def source_freed_while_its_copy_is_queued(dev: kvcore.Device, repaired: bool) -> None:
    load = dev.stream("load")
    buffer, staging = dev.empty(64), dev.empty_host(64)
    load.copy(buffer, staging)
    if repaired:
        load.synchronize_blocking()
    staging.free()


def result_read_before_it_is_there(dev: kvcore.Device, repaired: bool) -> None:
    store = dev.stream("store")
    buffer, host = dev.empty(64), dev.empty_host(64)
    store.copy(host, buffer)
    if repaired:
        store.record_event().synchronize_blocking()
    host.numpy()


def launched_inside_a_host_block(dev: kvcore.Device, repaired: bool) -> None:
    """The copy is launched while the host still writes its source."""
    load = dev.stream("load")
    buffer, host = dev.empty(64), dev.empty_host(64)
    with host.host("w") as a:
        a[:] = 1
        if not repaired:
            load.copy(buffer, host)
    if repaired:
        load.copy(buffer, host)


def two_writers_of_one_slot(dev: kvcore.Device, repaired: bool) -> None:
    """Two streams write slots of one cache: a common one, or (repaired) disjoint ones."""
    a, b = dev.stream("a"), dev.stream("b")
    cache, rows = dev.empty((32, 8)), dev.empty((8, 8))
    slots = np.arange(8)
    a.launch(Scatter(rows, cache, slots * 2))
    b.launch(Scatter(rows, cache, slots * 2 + 1 if repaired else slots * 3))


def buffer_given_on_too_early(dev: kvcore.Device, repaired: bool) -> None:
    """A ring of staging buffers goes round before the first user has finished."""
    load, compute = dev.stream("load"), dev.stream("compute")
    ring = [dev.empty(64) for _ in range(2)]
    free = [dev.event() for _ in range(2)]
    host = dev.empty_host(64)
    for step in range(6):
        slot = step % 2
        if repaired:
            load.wait_event(free[slot])
        load.copy(ring[slot], host)
        compute.wait_stream(load)
        compute.launch(FakePlan(reads=[ring[slot]]))
        free[slot].record(compute)


def replayed_without_a_join(dev: kvcore.Device, repaired: bool) -> None:
    """A graph's fork and the work after the replay on another stream."""
    main, side, other = dev.stream("main"), dev.stream("side"), dev.stream("other")
    block, host = dev.empty(64), dev.empty_host(64)
    with dev.capture(main) as graph:
        side.wait_stream(main)
        side.copy(block, host)
        main.wait_stream(side)
    graph.replay(main)
    if repaired:
        other.wait_stream(main)
    other.launch(FakePlan(reads=[block]))


def host_function_without_waiting(dev: kvcore.Device, repaired: bool) -> None:
    """A host function of another stream looks at a result."""
    store, report = dev.stream("store"), dev.stream("report")
    buffer, host = dev.empty(64), dev.empty_host(64)
    store.copy(host, buffer)
    if repaired:
        report.wait_stream(store)

    def look() -> None:
        with host.host("r"):
            pass

    report.call(look)


PROGRAMS: dict[Callable[[kvcore.Device, bool], None], set[str]] = {
    store_without_waiting: {"RAW"},
    load_over_a_block_being_read: {"WAR"},
    one_event_for_every_layer: {"RAW"},
    waiting_for_an_event_never_recorded: {"RAW"},
    waiting_on_the_wrong_stream: {"WAR"},
    source_changed_while_its_copy_is_queued: {"WAR"},
    source_freed_while_its_copy_is_queued: {"WAR"},
    result_read_before_it_is_there: {"WAW"},
    launched_inside_a_host_block: {"WAR"},
    two_writers_of_one_slot: {"WAW"},
    buffer_given_on_too_early: {"WAR"},
    replayed_without_a_join: {"RAW"},
    host_function_without_waiting: {"RAW"},
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_faulty_programs_are_found_on_every_seed(
    clock: str, program: Callable[[kvcore.Device, bool], None]
) -> None:
    for seed in SEEDS:
        with device(clock, race_check="record", seed=seed, workers=1 + seed % 3) as dev:
            program(dev, False)
        assert {race.kind for race in dev.races} == PROGRAMS[program], seed


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_repaired_programs_are_left_alone_on_every_seed(
    clock: str, program: Callable[[kvcore.Device, bool], None]
) -> None:
    for seed in SEEDS:
        with device(clock, race_check="raise", seed=seed, workers=1 + seed % 3) as dev:
            program(dev, True)
        assert dev.races == ()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
async def test_a_race_is_raised_at_the_next_synchronise_or_exit(
    clock: str, program: Callable[[kvcore.Device, bool], None]
) -> None:
    with pytest.raises(kvcore.RaceError):
        async with device(clock, race_check="raise") as dev:
            program(dev, False)
    async with device(clock, race_check="raise") as dev:
        program(dev, False)
        with pytest.raises(kvcore.RaceError):
            await dev.synchronize()
        await dev.synchronize()


def test_the_report_names_both_sides_and_the_bytes() -> None:
    with device(race_check="record") as dev:
        compute, load = dev.stream("compute"), dev.stream("load")
        block, host = dev.empty((4, 16)), dev.empty_host((2, 16))
        compute.launch(FakePlan(reads=[block], name="attention"))
        load.copy(block[1:3], host)
    (race,) = dev.races
    lines = test_the_report_names_both_sides_and_the_bytes.__code__.co_firstlineno
    assert (race.first.operation, race.first.stream, race.first.argument) == (
        "attention", "compute", "in0",
    )  # fmt: skip
    assert (race.second.operation, race.second.stream, race.second.argument) == (
        "copy", "load", "dst",
    )  # fmt: skip
    assert (race.first.writes, race.second.writes) == (False, True)
    assert (race.first.file, race.second.file) == (__file__, __file__)
    assert (race.first.line - lines, race.second.line - lines) == (4, 5)
    assert race.kind == "WAR"
    assert race.nbytes == race.end - race.start == 128
    text = str(race)
    assert text.startswith("WAR: attention on compute reads in0 (")
    assert "and copy on load writes dst (" in text
    assert "128 bytes shared" in text


def test_races_with_the_host_name_the_line() -> None:
    with device(race_check="record") as dev:
        load = dev.stream("load")
        buffer, staging = dev.empty(64), dev.empty_host(64)
        load.copy(buffer, staging)
        staging.numpy()
    (race,) = dev.races
    first = test_races_with_the_host_name_the_line.__code__.co_firstlineno
    assert (race.second.stream, race.second.operation) == ("the host", "buffer.numpy()")
    assert (race.first.line - first, race.second.line - first) == (4, 5)


def test_one_place_is_reported_once() -> None:
    with device(race_check="record") as dev:
        a, b = dev.stream("a"), dev.stream("b")
        buffer = dev.empty(64)
        for _ in range(50):
            a.fill(buffer, 1)
            b.fill(buffer, 2)
    assert 1 <= len(dev.races) <= 2


def test_raising_does_not_lose_what_is_found_later() -> None:
    with device(race_check="raise") as dev:
        a, b = dev.stream("a"), dev.stream("b")
        one, two = dev.empty(64), dev.empty(64)
        for buffer in (one, two):
            a.fill(buffer, 1)
            b.launch(FakePlan(reads=[buffer], name=f"plan{id(buffer)}"))
            with pytest.raises(kvcore.RaceError, match=r"RAW: fill on a writes dst"):
                dev.synchronize_blocking()
        assert len(dev.races) == 2


def test_an_event_never_recorded_is_remarked() -> None:
    with device(race_check="record") as dev:
        dev.stream("s").wait_event(dev.event())
    ((sentence, file, line),) = dev.race_remarks
    assert sentence == "stream 's' waits for an event that was never recorded"
    assert file == __file__
    assert line == test_an_event_never_recorded_is_remarked.__code__.co_firstlineno + 2
    assert dev.races == ()


def test_readers_do_not_race() -> None:
    with device(race_check="raise") as dev:
        buffer = dev.empty(64)
        for _ in range(5):
            dev.stream().launch(FakePlan(reads=[buffer]))


def test_neighbours_do_not_race() -> None:
    """Byte by byte: rows that touch, columns that interleave, empty arrays."""
    with device(race_check="raise") as dev:
        a, b = dev.stream(), dev.stream()
        buffer = dev.empty((10, 6), "uint8")
        a.fill(buffer[:5], 1)
        b.fill(buffer[5:], 2)
        dev.synchronize_blocking()
        a.fill(buffer[:, ::2], 1)
        b.fill(buffer[:, 1::2], 2)
        a.fill(buffer[3:3], 0)
        b.fill(buffer[:, 6:], 0)


def test_the_host_orders_what_it_waited_for() -> None:
    with device(race_check="raise") as dev:
        a, b = dev.stream(), dev.stream()
        buffer = dev.empty(64)
        a.fill(buffer, 1)
        a.synchronize_blocking()
        b.fill(buffer, 2)
        event = b.record_event()
        event.synchronize_blocking()
        a.fill(buffer, 3)
        while not a.query():
            pass
        b.fill(buffer, 4)
        dev.synchronize_blocking()
        buffer.numpy()


@pytest.mark.parametrize("how", ["stream", "event", "query", "device"])
def test_the_host_orders_while_others_are_busy(how: str) -> None:
    """What a host knows is passed on to every launch, whatever else is under way."""
    with device(race_check="raise") as dev:
        a, b, busy = dev.stream(), dev.stream(), dev.stream()
        buffer = dev.empty(64)
        b.compute(1)
        gate = Gate(busy)
        a.fill(buffer, 1)
        if how == "stream":
            a.synchronize_blocking()
        elif how == "event":
            a.record_event().synchronize_blocking()
        elif how == "query":
            while not a.query():
                pass
        else:
            gate.open()
            dev.synchronize_blocking()
        b.fill(buffer, 2)
        b.synchronize_blocking()
        buffer.numpy()
        gate.open()


def test_waiting_for_one_stream_does_not_order_another() -> None:
    with device(race_check="record") as dev:
        a, b, c = dev.stream("a"), dev.stream("b"), dev.stream("c")
        buffer = dev.empty(64)
        a.fill(buffer, 1)
        b.compute(1)
        b.synchronize_blocking()
        c.fill(buffer, 2)
    assert len(dev.races) == 1


def test_order_goes_through_chains_of_streams() -> None:
    with device(race_check="raise") as dev:
        streams = [dev.stream() for _ in range(30)]
        buffer = dev.empty(64)
        for before, stream in zip([None, *streams], streams, strict=False):
            if before is not None:
                stream.wait_stream(before)
            stream.fill(buffer, 1)
        streams[-1].synchronize_blocking()
        buffer.numpy()
        streams[0].fill(buffer, 2)


def test_addresses_that_are_used_again() -> None:
    """New memory at an old address is not the old memory."""
    with device(race_check="raise") as dev:
        a, b = dev.stream(), dev.stream()
        for i in range(200):
            stream = (a, b)[i % 2]
            stream.fill(np.empty(5000, np.uint8), 1)
            stream.record_event().synchronize_blocking()
            stream.launch(FakePlan(writes=[dev.empty(5000, "uint8")]))
        dev.synchronize_blocking()


def finish(stream: kvcore.Stream) -> None:
    """Let the stream come to rest in a way that the race check cannot see."""
    done = threading.Event()
    stream.call(done.set)
    assert done.wait(50)


def test_unwaited_memory_that_is_dropped_and_used_again() -> None:
    """Unordered streams, but no byte is ever shared: each array dies before the next is made."""
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer keeps freed memory from being used again")
    addresses: list[int] = []
    with device(race_check="raise") as dev:
        a, b = dev.stream(), dev.stream()
        for i in range(1000):
            stream = (a, b)[i % 2]
            array = np.zeros(5000, np.uint8)
            addresses.append(array.ctypes.data)
            stream.launch(FakePlan(writes=[array]))
            del array
            finish(stream)
            if len(addresses) - len(set(addresses)) > 10:
                break
    assert len(set(addresses)) < len(addresses)


def test_views_of_one_array_are_one_memory() -> None:
    with device(race_check="record") as dev:
        a, b = dev.stream(), dev.stream()
        base = np.zeros((4, 100), np.uint8)
        a.launch(FakePlan(writes=[base[1:3].reshape(2, 10, 10)]))
        finish(a)
        gc.collect()
        b.launch(FakePlan(writes=[base[2:4]]))
    assert [race.nbytes for race in dev.races] == [100]


@pytest.mark.parametrize("changed", [True, False])
async def test_changes_of_plain_sources_by_checksum(clock: str, changed: bool) -> None:
    dev = device(clock, race_check="raise", check_host=True)
    source = np.zeros(100, np.float32)

    async def use() -> None:
        async with dev:
            stream = dev.stream()
            gate = Gate(stream)
            stream.copy(dev.empty(100), source)
            if changed:
                source[50] = 1
            gate.open()
            await stream.synchronize()

    if changed:
        with pytest.raises(kvcore.RaceError, match=r"WAR: copy on stream reads src .*by the host"):
            await use()
    else:
        await use()


async def test_checksums_leave_alone_what_the_stream_itself_writes() -> None:
    async with device(race_check="raise", check_host=True) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        plain = np.zeros(100, np.float32)
        there = dev.empty(100)
        stream.fill(plain, 3)
        stream.copy(there, plain)
        gate.open()
        await stream.synchronize()
        assert (there.numpy() == 3).all()


async def test_failed_and_skipped_work_touches_nothing(clock: str) -> None:
    async with device(clock, race_check="raise") as dev:
        a, b = dev.stream(), dev.stream()
        buffer = dev.empty(64)

        def fail() -> None:
            raise ValueError

        a.launch(FakePlan(fail, writes=[buffer]))
        a.fill(buffer, 1)
        b.fill(buffer, 2)
        with pytest.raises(kvcore.StreamError):
            await dev.synchronize()
        assert not dev._core.race.in_flight


async def test_tasks_share_one_host(clock: str) -> None:
    """Two tasks that hand over by themselves are a correct program."""
    async with device(clock, race_check="raise") as dev:
        buffer = dev.empty(64)
        handed = anyio.Event()

        async def first() -> None:
            stream = dev.stream()
            stream.fill(buffer, 1)
            await stream.synchronize()
            handed.set()

        async def second() -> None:
            await handed.wait()
            dev.stream().fill(buffer, 2)

        async with anyio.create_task_group() as group:
            group.start_soon(first)
            group.start_soon(second)


def test_the_shadow_is_bounded() -> None:
    """Streams that are never idle at once, and a host that waits for one of them at a time."""
    with device(race_check="raise") as dev:
        a, b = dev.stream(), dev.stream()
        one, two = dev.empty((64, 64)), dev.empty((64, 64))
        race = dev._core.race
        race.next_sweep = 512
        for i in range(4000):
            a.fill(one[i % 64], 1)
            b.fill(two[i % 64], 1)
            if i % 100 == 0:
                a.synchronize_blocking()
                b.fill(two[0], 1)
                b.record_event().synchronize_blocking()
                a.fill(one[0], 1)
        assert len(race.records) == race.shadow.num_live < 70_000
        dev.synchronize_blocking()
        assert race.shadow.num_live == 0


def test_off_watches_nothing() -> None:
    with device() as dev:
        store_without_waiting(dev, False)
        assert dev._core.executor.observer is None
    assert dev.races == dev.race_remarks == ()
