# SPDX-License-Identifier: Apache-2.0
"""A forked child has the parent's devices and none of their threads: errors, no hang."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import anyio
import numpy as np
import pytest
from fakes import FakePlan, Gate, device

import kvcore


def in_child(act: Callable[[], object]) -> str:
    """What the child says: "ok", or the error it met."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        pid = os.fork()
    if pid == 0:
        try:
            act()
            said = "ok"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.parametrize("race_check", ["off", "record"])
def test_every_use_is_an_error(clock: str, race_check: str) -> None:
    with device(clock, race_check=race_check) as dev:
        stream, event = dev.stream(), dev.event()
        gate = Gate(stream)
        stream.launch(FakePlan())
        event.record(stream)
        buffer = dev.empty(4)
        uses: list[Callable[[], object]] = [
            lambda: stream.launch(FakePlan()),
            lambda: stream.copy(buffer, np.zeros(4, np.float32)),
            lambda: stream.call(print),
            stream.synchronize_blocking,
            stream.query,
            stream.record_event,
            dev.synchronize_blocking,
            event.synchronize_blocking,
            event.query,
            lambda: dev.empty(3),
            dev.stream,
            buffer.free,
        ]
        for use in uses:
            assert "was forked from it" in in_child(use)
        gate.open()
        stream.synchronize_blocking()


def test_awaiting_in_a_child(clock: str, anyio_backend: str) -> None:
    with device(clock) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        said = in_child(lambda: anyio.run(stream.synchronize, backend=anyio_backend))
        assert said.startswith("StreamError: ")
        assert "was forked from it" in said
        gate.open()


def test_a_child_may_leave_the_block_and_make_its_own(clock: str) -> None:
    with device(clock) as dev:
        stream = dev.stream()
        gate = Gate(stream)

        def child() -> None:
            dev.__exit__(None, None, None)
            with device(clock) as own:
                plan = FakePlan()
                own.stream().launch(plan)
                own.synchronize_blocking()
                assert plan.runs == 1

        assert in_child(child) == "ok"
        gate.open()


def test_the_parent_goes_on(clock: str) -> None:
    with device(clock) as dev:
        stream = dev.stream()
        plan = FakePlan()
        for _ in range(3):
            assert in_child(lambda: None) == "ok"
            stream.launch(plan)
            stream.synchronize_blocking()
        assert plan.runs == 3


def test_a_child_reads_what_the_parent_wrote() -> None:
    with device() as dev:
        buffer = dev.empty(4, "int32")
        buffer.numpy()[:] = 5

        def child() -> None:
            with buffer.host("r") as a:
                assert a.tolist() == [5] * 4

        assert in_child(child) == "ok"


async def test_forking_while_a_task_waits(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        gate = Gate(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(stream.synchronize)
            await anyio.wait_all_tasks_blocked()
            assert "was forked from it" in in_child(stream.synchronize_blocking)
            gate.open()


def test_a_device_that_is_closed_needs_no_care() -> None:
    with device() as dev:
        dev.stream()
    assert in_child(lambda: None) == "ok"
    assert isinstance(dev, kvcore.Device)
