# SPDX-License-Identifier: Apache-2.0
"""What nobody means to do: memory freed under an array, names that raise, loops without end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from fakes import Gate, device

import kvcore
from kvcore.runtime import DeviceProfile, current_stream


def test_an_array_of_a_freed_buffer_keeps_its_bytes() -> None:
    with kvcore.Device() as dev:
        buffer = dev.empty(1 << 22, "uint8")
        array = np.asarray(buffer)
        array[:] = 7
        buffer.free()
        assert dev.memory().used == 0
        others = [np.full(1 << 22, 9, np.uint8) for _ in range(4)]
        assert (array == 7).all()
        assert len(others) == 4


class NoName:
    reads: tuple[object, ...] = ()
    writes: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        raise RuntimeError("no name")

    def touched(self) -> tuple[tuple[object, ...], tuple[object, ...]]:
        return (), ()

    def run(self) -> None:
        raise ValueError("ran")

    def __call__(self) -> None:
        raise ValueError("called")


class OddName(NoName):
    name = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.__qualname__ = 5


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def no_text() -> None:
    raise NoText


@pytest.mark.parametrize("options", [{}, {"race_check": "record"}, {"trace": True}], ids=str)
@pytest.mark.parametrize("kind", [NoName, OddName])
@pytest.mark.parametrize("verb", ["call", "launch"])
def test_a_name_that_cannot_be_told_is_no_end_of_a_worker(
    options: dict[str, Any], kind: type[NoName], verb: str
) -> None:
    with kvcore.Device(**options) as dev:
        stream = dev.stream()
        getattr(stream, verb)(kind())
        with pytest.raises(kvcore.StreamError, match=kind.__name__):
            stream.synchronize_blocking()


def test_an_exception_without_a_text_is_told() -> None:
    with kvcore.Device() as dev:
        stream = dev.stream()
        stream.call(no_text)
        with pytest.raises(kvcore.StreamError, match="NoText"):
            stream.synchronize_blocking()


def test_loops_leave_nothing_open(anyio_backend: str) -> None:
    async def wait(stream: kvcore.Stream) -> None:
        gate = Gate(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(stream.synchronize)
            await anyio.lowlevel.checkpoint()
            gate.open()

    with kvcore.Device() as dev:
        stream = dev.stream()
        for _ in range(30):
            anyio.run(wait, stream, backend=anyio_backend)
        gc.collect()
        assert dev._core.waiting.num_loops <= 3


def test_python_ends_inside_a_block_of_a_generator() -> None:
    code = """
import kvcore
def block():
    with kvcore.Device() as dev:
        stream = dev.stream()
        stream.call(int)
        yield stream
kept = block()
next(kept)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], timeout=50, cwd=root, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("stream", [0, "x", [], np.zeros(3), ...], ids=repr)
def test_streams_that_are_none(stream: Any) -> None:
    with device("wall") as dev:
        event, external = dev.event(), dev.external_event()
        with dev.capture(dev.stream()) as graph:
            pass
        for call in (event.record, event.wait, external.record, graph.replay, current_stream):
            with pytest.raises(kvcore.ParamInvalidError, match="expected"):
                call(stream)


@pytest.mark.parametrize(
    "make",
    [
        lambda dev: dev.empty((0, 2**80)),
        lambda dev: dev.empty((0, 2**62, 2**62)),
        lambda dev: dev.empty(3, "(2,3)f4"),
        lambda dev: dev.empty(3, ("f4", (2,))),
        lambda dev: dev.empty(3, {"a": 1}),
        lambda dev: dev.empty(3, "\0"),
        lambda dev: dev.empty(3, "__doc__"),
        lambda dev: dev.empty(3, align=np.array([1, 2])),
        lambda dev: dev.empty(3).view(2**80),
        lambda dev: dev.empty(3).host(np.zeros(3)),
        lambda dev: dev.empty(3)["a":],
        lambda dev: dev.empty(3)[:1.5],
        lambda dev: dev.empty(3)[::0],
        lambda dev: list(dev.empty(())),
        lambda dev: kvcore.Device(trace=np.zeros(3)),
        lambda dev: kvcore.Device(check_host=np.zeros(3)),
        lambda dev: DeviceProfile("x", None),
        lambda dev: DeviceProfile("x", dict.fromkeys(dev.profile.figures, 3)),
        lambda dev: DeviceProfile.named([]),
        lambda dev: DeviceProfile.load(None),
        lambda dev: DeviceProfile.load("\0"),
        lambda dev: DeviceProfile.from_dict(None),
        lambda dev: dev.profile.replace(capacity=1e300),
        lambda dev: dev.profile.replace(capacity=10**400),
        lambda dev: dev.profile.replace(capacity=1e12),
        lambda dev: dev.profile.replace(h2d_bandwidth=5e-324),
        lambda dev: dev.profile.replace(launch_cost=1e308),
    ],
)
def test_values_that_make_no_sense(make: Callable[[kvcore.Device], object]) -> None:
    with device("model") as dev:
        with pytest.raises(kvcore.ParamInvalidError, match="expected"):
            make(dev)
        assert dev.memory().used == 0
        assert dev.memory().allocations == dev.memory().frees


def test_a_profile_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(kvcore.ParamInvalidError, match=r"^profile: expected"):
        DeviceProfile.load(tmp_path / "x.toml")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", None),
        ("float32", "1.5"),
        ("float32", 1j),
        ("float32", np.datetime64(3, "s")),
        ("float32", [1]),
        ("float16", 1e300),
        ("float16", 2**64),
        ("bool", 300),
        ("bool", 0.5),
        ("bool", None),
        ("int8", 1j),
        ("complex64", "1"),
    ],
)
def test_fills_with_what_the_type_cannot_hold(dtype: str, value: object) -> None:
    refused = pytest.raises(kvcore.ParamInvalidError, match=r"^value: expected")
    with kvcore.Device() as dev, refused:
        dev.default_stream.fill(dev.empty(3, dtype), value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", 2**70),
        ("float16", np.float32(1.0001)),
        ("float16", float("inf")),
        ("float32", True),
        ("bool", 1),
        ("uint64", 2**64 - 1),
        ("complex64", 2 - 1j),
        ("float32", np.array(2.0)),
    ],
)
def test_fills_with_what_it_can(dtype: str, value: Any) -> None:
    with kvcore.Device() as dev:
        buffer = dev.empty(3, dtype)
        dev.default_stream.fill(buffer, value)
        dev.default_stream.synchronize_blocking()
        assert (buffer.numpy() == np.asarray(value).astype(dtype)).all()


async def later() -> None:
    """A coroutine function."""


def one_by_one() -> Any:
    yield 1


@pytest.mark.parametrize("fn", [later, one_by_one])
def test_functions_that_nobody_would_run(fn: Callable[[], object]) -> None:
    refused = pytest.raises(kvcore.ParamInvalidError, match=r"^fn: expected")
    with kvcore.Device() as dev, refused:
        dev.default_stream.call(fn)


def test_going_along_a_buffer() -> None:
    with kvcore.Device() as dev:
        buffer, other = dev.empty((3, 2)), dev.empty((3, 2))
        assert [row.shape for row in buffer] == [(2,)] * 3
        buffer.numpy()[:] = 3
        dev.default_stream.copy_batch(other, buffer)
        dev.default_stream.synchronize_blocking()
        assert (other.numpy() == 3).all()


def test_a_capture_is_made_once() -> None:
    with kvcore.Device() as dev:
        capture = dev.capture(dev.stream())
        with pytest.raises(KeyError), capture:
            raise KeyError
        with pytest.raises(kvcore.CaptureError):
            capture.__enter__()
        with pytest.raises(kvcore.CaptureError):
            capture.__exit__(None, None, None)


def test_an_external_query_is_an_order_and_tells_of_failures() -> None:
    with kvcore.Device(race_check="record") as dev:
        stream, event, buffer = dev.stream(), dev.external_event(), dev.empty(3)
        stream.fill(buffer, 1)
        event.record(stream)
        while not event.query():
            pass
        buffer.numpy()
        assert not dev.races
        stream.call(no_text)
        event.reset(stream)
        event.record(stream)
        while not stream.idle:
            pass
        with pytest.raises(kvcore.StreamError, match="NoText"):
            event.query()
        with pytest.raises(kvcore.StreamError):
            stream.synchronize_blocking()


def test_an_external_query_takes_the_time_of_the_model() -> None:
    with device("model") as dev:
        stream, event = dev.stream(), dev.external_event()
        stream.compute(1000)
        event.record(stream)
        assert not event.query()
        while not event.query():
            pass
        assert 1000 <= dev.now < 1100


def test_host_accesses_are_reported_where_they_are() -> None:
    with kvcore.Device(race_check="record") as dev:
        buffer, stream = dev.empty(4), dev.stream()
        gate = Gate(stream)
        stream.fill(buffer, 1)
        with buffer.host("w"):
            pass
        gate.open()
        stream.synchronize_blocking()
        (race,) = dev.races
        assert os.path.samefile(race.second.file, __file__)


def test_the_memory_of_a_mapped_file_is_not_taken_for_gone(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(64,))
    with kvcore.Device(race_check="record") as dev:
        one, two = dev.stream(), dev.stream()
        first, second = dev.empty(16, "uint8"), dev.empty(16, "uint8")
        one.copy(mapped[:16], first)
        done = threading.Event()
        one.call(done.set)
        done.wait()
        gc.collect()
        two.copy(mapped[:16], second)
        dev.synchronize_blocking()
        assert [race.kind for race in dev.races] == ["WAW"]


def test_checksums_leave_alone_what_work_in_flight_changes() -> None:
    with kvcore.Device(race_check="record", check_host=True) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        buffer, target, plain = dev.empty(4), dev.empty(4), np.zeros(4, np.float32)
        shown = buffer.numpy()
        stream.fill(buffer, 1)
        stream.copy(target, shown)
        gate.open()
        stream.synchronize_blocking()
        assert not dev.races
        plain[:] = 0
        stream.compute(0)
        stream.copy(target, plain)
        stream.synchronize_blocking()
        assert not dev.races


def test_a_host_function_cannot_leave_its_own_device() -> None:
    with kvcore.Device() as dev:
        stream = dev.stream()
        stream.call(dev.__exit__, None, None, None)
        with pytest.raises(kvcore.StreamError, match="host function must not"):
            stream.synchronize_blocking()
        stream.call(int)
        stream.synchronize_blocking()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_is_told_no_times() -> None:
    with device("model") as dev:
        stream = dev.stream()
        start = stream.record_event()
        end = stream.record_event()
        stream.synchronize_blocking()
        child = os.fork()
        if not child:
            try:
                start.elapsed_time(end)
            except kvcore.StreamError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
