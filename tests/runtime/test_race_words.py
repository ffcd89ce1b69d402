# SPDX-License-Identifier: Apache-2.0
"""What a report of a race says: names, rows, counts, and whose access it was."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import FakePlan, Scatter, device

import kvcore
from kvcore.runtime import Access, Race


def line_of(text: str) -> int:
    """The line of the calling function that holds this text."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    lines, first = inspect.getsourcelines(frame.f_back.f_code)
    (found,) = (i for i, line in enumerate(lines) if text in line and "line_of" not in line)
    return first + found


# ---------------------------------------------------------------- names and rows
def meet(buffer: Any, one: Any, two: Any) -> Race:
    device = buffer.device
    a, b = device.stream("a"), device.stream("b")
    a.launch(FakePlan(writes=[one]))
    b.launch(FakePlan(reads=[two]))
    device.synchronize_blocking()
    (race,) = device.races
    assert isinstance(race, Race)
    return race


@pytest.mark.parametrize("space", ["device", "host", "swapped"])
def test_ranges_are_told_as_rows_of_a_named_buffer(space: str) -> None:
    with device(race_check="record") as dev:
        make = {"device": dev.empty, "host": dev.empty_host, "swapped": dev.empty_swapped}[space]
        cache = make((64, 4, 8), "bfloat16", name="k_cache")
        race = meet(cache, cache[3:9], cache[7:20])
    assert race.buffer == "'k_cache' (64, 4, 8) bfloat16"
    assert race.rows == ((7, 9),)
    assert race.nbytes == 2 * 4 * 8 * 2
    assert "128 bytes shared, in rows [7, 9) of 'k_cache' (64, 4, 8) bfloat16" in str(race)


def test_a_buffer_without_a_name_has_its_space_and_shape() -> None:
    with device(race_check="record") as dev:
        cache = dev.empty((8, 16), "float16")
        race = meet(cache, cache, cache[5])
    assert race.buffer == "a device buffer (8, 16) float16"
    assert race.rows == ((5, 6),)


def test_rows_are_those_of_the_whole_buffer_whatever_the_view() -> None:
    with device(race_check="record") as dev:
        pool = dev.empty((10, 4, 6), "int32", name="pool")
        race = meet(pool, pool.view((40, 6))[9:14], pool.view(shape=(-1,), dtype="uint8")[:300])
        # rows of 4 x 6 int32 are 96 bytes; bytes 216 to 300 are shared
    assert race.rows == ((2, 4),)
    assert race.nbytes == 300 - 216


def test_columns_lie_in_all_their_rows() -> None:
    with device(race_check="record") as dev:
        table = dev.empty((5, 8), "int32", name="table")
        race = meet(table, table[1:4, 2], table)
    assert race.rows == ((1, 4),)
    assert race.nbytes == 3 * 4


def test_scattered_rows_are_named_up_to_a_few() -> None:
    with device(race_check="record") as dev:
        cache, rows = dev.empty((400, 8), name="cache"), dev.empty((100, 8))
        a, b = dev.stream("a"), dev.stream("b")
        a.launch(Scatter(rows, cache, np.arange(100) * 3))
        b.launch(Scatter(rows, cache, np.arange(100) * 3))
        dev.synchronize_blocking()
        (race,) = [race for race in dev.races if race.kind == "WAW"]
    assert race.rows == tuple((3 * i, 3 * i + 1) for i in range(64))
    assert race.nbytes == 100 * 32
    assert "in rows [0, 1), [3, 4), [6, 7), [9, 10) and more of 'cache'" in str(race)


def test_memory_of_no_buffer_is_told_by_address() -> None:
    with device(race_check="record") as dev:
        a, b = dev.stream("a"), dev.stream("b")
        plain, scalar = np.zeros((4, 8), np.float32), dev.empty((), name="one")
        for target in (plain, scalar):
            a.launch(FakePlan(writes=[target]))
            b.launch(FakePlan(reads=[target], name=f"read {np.ndim(target)}"))
        dev.synchronize_blocking()
        one, two = dev.races
    assert (one.buffer, one.rows) == ("", ())
    assert f"first [{plain.ctypes.data:#x}, {plain.ctypes.data + 128:#x})" in str(one)
    assert (two.buffer, two.rows) == ("'one' () float32", ())


def test_a_plain_array_over_a_buffer_is_the_buffers() -> None:
    with device(race_check="record") as dev:
        cache = dev.empty((8, 16), name="cache")
        shown = cache.numpy()
        race = meet(cache, cache[2:6], shown[4:])
    assert (race.buffer, race.rows) == ("'cache' (8, 16) float32", ((4, 6),))


def test_names() -> None:
    with device() as dev:
        buffer = dev.empty((4, 2), name="x\x1b[31m")
        assert (buffer.name, buffer[1:].name, buffer.view(8).name) == ("x\x1b[31m",) * 3
        assert dev.empty(3).name is None
        assert repr(dev.empty(3, name="y")) == "Buffer((3,), 'float32', device, name='y')"
        assert "\x1b" not in repr(buffer)
        for name in (3, b"x", ["x"], ("x",)):
            with pytest.raises(kvcore.ParamInvalidError, match=r"^name: expected a string or None"):
                dev.empty(3, name=name)  # type: ignore[arg-type]
        assert dev.memory().used == buffer.nbytes


# ---------------------------------------------------------------- how many
@pytest.mark.parametrize("times", [1, 2, 50])
def test_one_report_for_a_loop_says_how_many(clock: str, times: int) -> None:
    with device(clock, race_check="record") as dev:
        a, b = dev.stream("a"), dev.stream("b")
        blocks = [dev.empty((4, 8), name=f"block {i}") for i in range(times)]
        for block in blocks:
            a.fill(block, 1)
            b.launch(FakePlan(reads=[block]))
    (race,) = dev.races
    assert race.times == times
    assert race.buffer.startswith("'block 0'")
    assert str(race).endswith(f"; {times} times so far") == (times > 1)


async def test_what_is_raised_says_how_many() -> None:
    async with device(race_check="raise") as dev:
        a, b = dev.stream("a"), dev.stream("b")
        blocks = [dev.empty((4, 8)) for _ in range(7)]
        for block in blocks:
            a.fill(block, 1)
            b.launch(FakePlan(reads=[block]))
        with pytest.raises(kvcore.RaceError, match=r"7 times so far") as caught:
            await dev.synchronize()
        (race,) = caught.value.seen  # type: ignore[misc]
        assert race.times == 7
        a.fill(blocks[0], 1)
        b.launch(FakePlan(reads=[blocks[0]]))
        with pytest.raises(kvcore.RaceError, match=r"RAW"):  # another place: another report
            await dev.synchronize()
        assert [race.times for race in dev.races] == [7, 1]


# ---------------------------------------------------------------- work that only takes time
def attention(dev: kvcore.Device, waits: bool, **options: Any) -> None:
    load, compute = dev.stream("load"), dev.stream("compute")
    host, block = dev.empty_host((8, 16)), dev.empty((8, 16), name="block")
    load.copy(block, host)
    if waits:
        compute.wait_stream(load)
    compute.compute(20, "attention", **{name: give(block) for name, give in options.items()})


GIVEN: list[dict[str, Callable[[Any], Any]]] = [
    {"reads": lambda block: block},
    {"reads": lambda block: [block[2:4], block[6]]},
    {"writes": lambda block: (block,)},
    {"reads": lambda block: block[0], "writes": lambda block: iter([block[7]])},
]


@pytest.mark.parametrize("given", GIVEN)
def test_work_that_takes_time_may_say_what_it_touches(
    clock: str, given: dict[str, Callable[[Any], Any]]
) -> None:
    for seed in range(20):
        with device(clock, race_check="raise", seed=seed) as dev:
            attention(dev, True, **given)
        with device(clock, race_check="record", seed=seed) as dev:
            attention(dev, False, **given)
        assert {race.kind for race in dev.races} == {
            {"reads": "RAW", "writes": "WAW"}[name] for name in given
        }
        assert {race.second.operation for race in dev.races} == {"attention"}
        assert all(race.second.argument.startswith(("reads", "writes")) for race in dev.races)
        assert all("of 'block'" in str(race) for race in dev.races)


def test_what_it_touches_costs_no_time_and_lives_until_it_is_over(clock: str) -> None:
    times = []
    for with_buffers in (False, True):
        with device("model") as dev:
            stream = dev.stream()
            block = dev.empty((64, 64))
            given = {"reads": [block], "writes": block} if with_buffers else {}
            stream.compute(30, "attention", **given)
            stream.synchronize_blocking()
            times.append((dev.now, dev.busy))
    assert times[0] == times[1]
    with device(clock) as dev:
        stream = dev.stream()
        block = dev.empty((64, 64))
        stream.compute(1, reads=block)
        del block
        stream.synchronize_blocking()


def test_a_graph_keeps_what_it_touches(clock: str) -> None:
    with device(clock, race_check="record") as dev:
        main, other = dev.stream("main"), dev.stream("other")
        block = dev.empty((8, 16))
        with dev.capture(main) as graph:
            main.compute(5, "attention", writes=block)
        graph.replay(main)
        other.wait_stream(main)
        other.fill(block, 1)
        dev.synchronize_blocking()
        assert not dev.races
        graph.replay(main)
        other.fill(block, 1)
        dev.synchronize_blocking()
        assert [race.first.operation for race in dev.races] == ["attention"]
        block.free()
        with pytest.raises(kvcore.ParamInvalidError, match=r"^graph: .* freed"):
            graph.replay(main)


def test_what_it_may_not_touch() -> None:
    with device("model") as dev, device() as other:
        stream = dev.stream()
        frozen = np.zeros(4)
        frozen.flags.writeable = False
        freed = dev.empty(4)
        freed.free()
        refused: list[tuple[dict[str, Any], str]] = [
            ({"reads": np.zeros(4)}, r"^reads: expected device or swapped memory"),
            ({"reads": [dev.empty_host(4)]}, r"^reads\[0\]: expected device or swapped"),
            ({"writes": [dev.empty(4), other.empty(4)]}, r"^writes\[1\]: .* another device's"),
            ({"writes": frozen}, r"^writes: expected memory that may be written"),
            ({"reads": freed}, r"^buffer: expected live memory"),
            ({"reads": 3}, r"^reads: expected buffers or arrays, got int"),
            ({"reads": None}, r"^reads: expected buffers or arrays, got NoneType"),
            ({"writes": "block"}, r"^writes: expected buffers or arrays, got str"),
            ({"writes": [None]}, r"^writes\[0\]: expected a buffer or an array, got NoneType"),
        ]
        for given, message in refused:
            with pytest.raises(kvcore.ParamInvalidError, match=message):
                stream.compute(1, "x", **given)
        assert stream.query()
        stream.compute(1, "x", reads=[dev.empty(4), dev.empty_swapped(4)], writes=[])
        stream.synchronize_blocking()


# ---------------------------------------------------------------- launched objects
class Attend:
    """An object of the program's own: only ``run``."""

    def __init__(self, block: Any, mode: str = "r") -> None:
        self.block, self.mode = block, mode

    def run(self) -> None:
        with self.block.host(self.mode) as rows:
            rows.tobytes()


class Reads:
    """Says what it touches in the documented way, and nothing more."""

    def __init__(self, block: Any) -> None:
        self.reads = (Access("block", block),)
        self.writes = ()

    def run(self) -> None:
        pass


def ring(dev: kvcore.Device, launch: Callable[[Any, Any], None], missing: str) -> None:
    """A prefetch into a ring of one block, which a launched object looks at."""
    compute, prefetch = dev.stream("compute"), dev.stream("prefetch")
    host, block = dev.empty_host((16, 8)), dev.empty((16, 8), name="ring")
    for _ in range(3):
        if missing != "the reader":
            prefetch.wait_stream(compute)
        prefetch.copy(block, host)
        if missing != "the load":
            compute.wait_stream(prefetch)
        launch(compute, block)


LAUNCHES: dict[str, Callable[[Any, Any], None]] = {
    "opens host()": lambda stream, block: stream.launch(Attend(block)),
    "opens host() of a view": lambda stream, block: stream.launch(Attend(block[3:])),
    "calls numpy()": lambda stream, block: stream.launch(FakePlan(block.numpy)),
    "host function": lambda stream, block: stream.call(Attend(block).run),
    "says what it reads": lambda stream, block: stream.launch(Reads(block)),
}


@pytest.mark.parametrize("how", LAUNCHES)
def test_a_launched_object_belongs_to_its_stream(clock: str, how: str) -> None:
    for seed in range(20):
        with device(clock, race_check="raise", seed=seed, workers=1 + seed % 3) as dev:
            ring(dev, LAUNCHES[how], "nothing")


@pytest.mark.parametrize("missing", ["the load", "the reader"])
@pytest.mark.parametrize("how", LAUNCHES)
def test_a_launched_object_with_its_wait_missing_is_reported(
    clock: str, how: str, missing: str
) -> None:
    for seed in range(20):
        with device(clock, race_check="record", seed=seed, workers=1 + seed % 3) as dev:
            ring(dev, LAUNCHES[how], missing)
        assert dev.races, seed
        for race in dev.races:
            assert {race.first.stream, race.second.stream} == {"compute", "prefetch"}
            assert "of 'ring'" in str(race)


def test_the_report_names_where_the_object_was_launched() -> None:
    with device(race_check="record") as dev:
        load, compute = dev.stream("load"), dev.stream("compute")
        host, block = dev.empty_host((16, 8)), dev.empty((16, 8))
        load.copy(block, host)
        compute.launch(Attend(block))  # here
    (race,) = dev.races
    assert (race.second.operation, race.second.stream) == ("Attend", "compute")
    assert (race.second.file, race.second.line) == (__file__, line_of("# here"))


def test_objects_need_only_run(clock: str) -> None:
    ran: list[str] = []

    class Bare:
        def run(self) -> None:
            ran.append("bare")

    with device(clock, race_check="raise", trace=True) as dev:
        stream = dev.stream()
        stream.launch(Bare())
        stream.launch(Reads(dev.empty(8)))
        stream.synchronize_blocking()
        assert [span.name for span in dev.trace.spans] == ["Bare", "Reads"]
    assert ran == ["bare"]


def test_objects_that_say_it_wrongly() -> None:
    class Wrong(FakePlan):
        def __init__(self, reads: Any) -> None:
            super().__init__()
            self.reads = reads

    with device("model") as dev:
        stream = dev.stream()
        for reads in (3, [dev.empty(4)], [object()], None):
            with pytest.raises(kvcore.ParamInvalidError, match=r"^plan: expected reads and writes"):
                stream.launch(Wrong(reads))
        assert stream.query()


def test_an_access_of_a_part() -> None:
    with device(race_check="record") as dev:
        block = dev.empty((8, 4), name="block")
        array = block.__kvcore_array__
        part = Access("rows", block, [array[1:2], array[4:6]])
        assert part.ranges.tolist() == [
            [block.address + 16, block.address + 32],
            [block.address + 64, block.address + 96],
        ]
        assert Access("all", block).ranges.tolist() == [[block.address, block.address + 128]]
        with pytest.raises(kvcore.ParamInvalidError, match=r"^x: expected a buffer or an array"):
            Access("x", 3)


# ---------------------------------------------------------------- places
def test_with_statements_of_the_library_are_the_programs_lines() -> None:
    with device(race_check="record") as dev, contextlib.ExitStack() as stack:
        buffer = dev.empty(8)
        stream, done = dev.stream("a"), threading.Event()
        stream.launch(FakePlan(writes=[buffer]))
        stream.call(done.set)
        assert done.wait(50)  # which orders nothing
        stack.enter_context(buffer.host("r"))  # here
    looks = {(race.second.file, race.second.line) for race in dev.races}
    assert {file for file, _ in looks} == {__file__}
    assert line_of("# here") in {line for _, line in looks}
