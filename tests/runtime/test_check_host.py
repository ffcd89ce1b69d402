# SPDX-License-Identifier: Apache-2.0
"""``check_host``: sources in host memory that change between launch and run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes import FakePlan, device

import kvcore


class Waits:
    """Holds a stream without being a host function, which pinned sources are not summed beside."""

    def __init__(self, stream: Any) -> None:
        self._open = threading.Event()
        stream.launch(FakePlan(lambda: self._open.wait(50)))

    def open(self) -> None:
        self._open.set()


def pinned(dev: kvcore.Device) -> tuple[Any, np.ndarray[Any, Any]]:
    buffer = dev.empty_host((8, 16), "bfloat16", name="staging")
    buffer.numpy().view(np.uint16)[...] = 0
    return buffer, buffer.numpy().view(np.uint16)


def swapped(dev: kvcore.Device) -> tuple[Any, np.ndarray[Any, Any]]:
    buffer = dev.empty_swapped((8, 16), "bfloat16", name="staging")
    buffer.numpy().view(np.uint16)[...] = 0
    return buffer, buffer.numpy().view(np.uint16)


def plain(dev: kvcore.Device) -> tuple[Any, np.ndarray[Any, Any]]:
    array = np.zeros((8, 16), ml_dtypes.bfloat16)
    return array, array.view(np.uint16)


def tensor(dev: kvcore.Device) -> tuple[Any, np.ndarray[Any, Any]]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    made = torch.zeros((8, 16), dtype=torch.bfloat16)
    return made, made.view(torch.uint16).numpy()


SOURCES: list[Callable[[kvcore.Device], tuple[Any, np.ndarray[Any, Any]]]] = [
    pinned, swapped, plain, tensor,
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("changed", [False, True])
async def test_a_change_between_launch_and_run(
    clock: str, source: Callable[..., tuple[Any, np.ndarray[Any, Any]]], changed: bool
) -> None:
    async with device(clock, race_check="record", check_host=True) as dev:
        stream = dev.stream()
        memory, bits = source(dev)
        there = dev.empty((8, 16), "bfloat16")
        await dev.synchronize()
        gate = Waits(stream)
        stream.copy(there, memory)
        if changed:
            bits[5, 3] = 1
        gate.open()
        await stream.synchronize()
        assert len(dev.races) == changed
        for race in dev.races:
            assert (race.kind, race.second.stream) == ("WAR", "the host")
            assert race.first.argument == "src"
            if source in (pinned, swapped):
                assert race.buffer.startswith("'staging'")
        bits[0, 0] = 2  # the copy is over
        await stream.synchronize()
        assert len(dev.races) == changed


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
async def test_a_part_of_a_source(source: Callable[..., Any]) -> None:
    """Only what the copy reads counts."""
    for row, races in ((0, 0), (3, 1)):
        async with device(race_check="record", check_host=True) as dev:
            stream = dev.stream()
            memory, bits = source(dev)
            await dev.synchronize()
            gate = Waits(stream)
            stream.copy(dev.empty((4, 8), "bfloat16"), memory[2:6, ::2])
            bits[row, 2] = 1
            bits[3, 1] = 1  # between two columns that it reads
            gate.open()
            await stream.synchronize()
            assert len(dev.races) == races


# ---------------------------------------------------------------- correct programs
def written_by_the_stream(dev: kvcore.Device) -> None:
    stream, (host, _) = dev.stream(), pinned(dev)
    gate = Waits(stream)
    block = dev.empty((8, 16), "bfloat16")
    stream.copy(host, block)
    stream.copy(block, host)
    gate.open()


def written_by_another_stream_launched_later(dev: kvcore.Device) -> None:
    """The record that the reader waits for is made after the reader was launched."""
    reader, writer, (host, _) = dev.stream(), dev.stream(), pinned(dev)
    block, event = dev.empty((8, 16), "bfloat16"), dev.external_event()
    event.wait(reader)
    reader.copy(block, host)
    writer.fill(host, 3)
    event.record(writer)


def written_by_a_host_function(dev: kvcore.Device) -> None:
    stream, (host, bits) = dev.stream(), pinned(dev)
    gate = Waits(stream)
    stream.call(bits.fill, 7)
    stream.copy(dev.empty((8, 16), "bfloat16"), host)
    gate.open()


def written_by_a_host_function_launched_later(dev: kvcore.Device) -> None:
    reader, writer, (host, bits) = dev.stream(), dev.stream(), pinned(dev)
    event = dev.external_event()
    event.wait(reader)
    reader.copy(dev.empty((8, 16), "bfloat16"), host)
    writer.call(bits.fill, 7)
    event.record(writer)


def written_by_a_launched_object(dev: kvcore.Device) -> None:
    class Fills:
        def run(self) -> None:
            with host.host("w") as rows:
                rows.view(np.uint16)[...] = 5

    stream, (host, _) = dev.stream(), pinned(dev)
    gate = Waits(stream)
    stream.launch(Fills())
    stream.copy(dev.empty((8, 16), "bfloat16"), host)
    gate.open()


def filled_again_behind_a_wait(dev: kvcore.Device) -> None:
    stream, (host, _) = dev.stream(), pinned(dev)
    block = dev.empty((8, 16), "bfloat16")
    for step in range(3):
        with host.host("w") as rows:
            rows.view(np.uint16)[...] = step
        stream.copy(block, host)
        stream.synchronize_blocking()


def freed_behind_its_last_copy(dev: kvcore.Device) -> None:
    stream, (host, _) = dev.stream(), pinned(dev)
    stream.copy(dev.empty((8, 16), "bfloat16"), host)
    stream.synchronize_blocking()
    host.free()


def replayed_after_a_change(dev: kvcore.Device) -> None:
    stream, (host, bits) = dev.stream(), pinned(dev)
    block = dev.empty((8, 16), "bfloat16")
    with dev.capture(stream) as graph:
        stream.copy(block, host)
    for step in range(3):
        bits[...] = step
        graph.replay(stream)
        stream.synchronize_blocking()


def a_failure_in_front(dev: kvcore.Device) -> None:
    stream, (host, bits) = dev.stream(), pinned(dev)
    gate = Waits(stream)
    stream.call(lambda: 1 // 0)
    stream.copy(dev.empty((8, 16), "bfloat16"), host)
    gate.open()
    with pytest.raises(kvcore.StreamError):
        stream.synchronize_blocking()
    bits[...] = 1
    stream.copy(dev.empty((8, 16), "bfloat16"), host)


CORRECT = [
    written_by_the_stream,
    written_by_another_stream_launched_later,
    written_by_a_host_function,
    written_by_a_host_function_launched_later,
    written_by_a_launched_object,
    filled_again_behind_a_wait,
    freed_behind_its_last_copy,
    replayed_after_a_change,
    a_failure_in_front,
]


@pytest.mark.parametrize("program", CORRECT, ids=lambda program: program.__name__)
def test_correct_programs_are_left_alone(
    clock: str, program: Callable[[kvcore.Device], None]
) -> None:
    for seed in range(20):
        with device(
            clock, race_check="raise", check_host=True, seed=seed, workers=1 + seed % 3
        ) as dev:
            program(dev)
        assert dev.races == ()
        race = dev._core.race
        assert race is not None
        assert not race._summed
        assert not race._unknown
        assert not race._host_writes


def test_what_the_race_check_sees_is_reported_once() -> None:
    """A block of the host over a source that was not waited for: one fault, one report."""
    with device(race_check="record", check_host=True) as dev:
        stream, (host, _) = dev.stream(), pinned(dev)
        gate = Waits(stream)
        stream.copy(dev.empty((8, 16), "bfloat16"), host)
        with host.host("w") as rows:
            rows.view(np.uint16)[...] = 1
        gate.open()
    assert {race.second.operation for race in dev.races} == {"buffer.host()"}


def test_a_tensor_larger_than_its_storage_is_not_read() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with device(race_check="record", check_host=True) as dev:
        stream = dev.stream()
        loose = torch.zeros(1 << 20)
        loose.untyped_storage().resize_(0)
        plan = FakePlan(reads=[np.zeros(4)])
        plan.reads[0].owner = loose
        stream.launch(plan)
        stream.synchronize_blocking()
    assert not dev.races
