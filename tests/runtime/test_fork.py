# SPDX-License-Identifier: Apache-2.0
"""A forked child has the parent's devices and none of their threads: errors, no hang."""

from __future__ import annotations

import os
import threading
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
        with dev.capture(stream) as graph:
            stream.launch(FakePlan())
        gate = Gate(stream)
        stream.launch(FakePlan())
        event.record(stream)
        buffer = dev.empty(4)
        external = dev.external_event()
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
            dev.external_event,
            lambda: dev.streams,
            lambda: dev.default_stream,
            dev.current_stream,
            lambda: kvcore.current_stream(dev),
            lambda: dev.use(stream),
            lambda: dev.capture(stream).__enter__(),
            dev.memory,
            lambda: dev.now,
            lambda: dev.busy,
            lambda: dev.races,
            lambda: dev.race_remarks,
            lambda: dev.trace,
            lambda: dev.awaits_external,
            lambda: stream.compute(1),
            lambda: stream.compute(1, reads=buffer),
            lambda: stream.fill(buffer, 0),
            lambda: stream.copy_batch([], []),
            lambda: stream.wait_event(event),
            lambda: stream.wait_stream(stream),
            lambda: event.record(stream),
            lambda: event.wait(stream),
            lambda: event.elapsed_time(event),
            lambda: external.wait(stream),
            lambda: external.reset(stream),
            lambda: external.record(stream),
            external.query,
            lambda: graph.replay(stream),
            buffer.free,
            buffer.numpy,
            buffer.__dlpack__,
            lambda: np.asarray(buffer),
            lambda: buffer.host("r").__enter__(),
            lambda: buffer[1],
            lambda: buffer.view((2, 2)),
            lambda: kvcore.Device.memory(dev, "host"),
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
            # Leaving does nothing there, with an exception under way or without one.
            dev.__exit__(None, None, None)
            assert dev.__exit__(KeyError, KeyError(), None) is None
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


def test_a_child_has_what_needs_no_device() -> None:
    with device() as dev:
        stream, event = dev.stream("s"), dev.event()
        buffer = dev.empty((4, 2), "int32", name="table")
        buffer.numpy()[:] = 5
        array = buffer.numpy()

        def child() -> None:
            assert array.tolist() == [[5, 5]] * 4
            assert (buffer.shape, buffer.dtype, buffer.name, len(buffer)) == (
                (4, 2), "int32", "table", 4,
            )  # fmt: skip
            assert "table" in repr(buffer)
            assert repr(stream) == "Stream('s', idle)"
            assert not event.recorded
            assert "no profile" in repr(dev)

        assert in_child(child) == "ok"


def test_a_child_that_is_inside_a_block_leaves_it() -> None:
    with device(race_check="record") as dev:
        stream, buffer = dev.stream(), dev.empty(4)

        def child() -> None:
            block.__exit__(None, None, None)
            used.__exit__(None, None, None)

        block, used = buffer.host("w"), dev.use(stream)
        block.__enter__()
        used.__enter__()
        assert in_child(child) == "ok"
        assert in_child(kvcore.current_stream).startswith("StreamError: ")
        used.__exit__(None, None, None)
        block.__exit__(None, None, None)


# ---------------------------------------------------------------- forks on a worker
class Trail:
    """What ran, and in which process, over a pipe that parent and child share."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._parent = os.getpid()

    def put(self, what: str) -> None:
        where = "parent" if os.getpid() == self._parent else "child"
        os.write(self._writer, f"{what} in the {where}\n".encode())

    def read(self) -> list[str]:
        os.close(self._writer)
        with os.fdopen(self._reader) as file:
            return file.read().splitlines()


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@pytest.mark.parametrize("how", ["host function", "plan", "compute"])
@pytest.mark.parametrize("race_check", ["off", "record"])
@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_of_the_queues_runs_in_a_child_of_an_operation(
    clock: str, race_check: str, workers: int, how: str
) -> None:
    trail, children = Trail(), []

    def split() -> None:
        if child := fork():
            children.append(child)
        else:
            trail.put("the rest of the operation")

    with device(clock, race_check=race_check, workers=workers) as dev:
        a, b = dev.stream(), dev.stream()
        gate = Gate(a)
        external = dev.external_event()
        external.wait(b)
        b.call(trail.put, "what waited for the record")
        if how == "plan":
            a.launch(FakePlan(split))
        else:
            a.call(split)
        if how == "compute":
            a.compute(1)
        a.launch(FakePlan(lambda: trail.put("what is behind")))
        external.record(a)
        gate.open()
        dev.synchronize_blocking()
    (child,) = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(trail.read()) == [
        "the rest of the operation in the child",
        "what is behind in the parent",
        "what waited for the record in the parent",
    ]


def test_what_an_operation_raises_in_the_child_is_its_threads(clock: str) -> None:
    trail, children = Trail(), []
    hooked = threading.excepthook

    def split() -> None:
        if child := fork():
            children.append(child)
        else:
            threading.excepthook = lambda given: trail.put(f"{given.exc_type.__name__} is told of")
            raise KeyError("only in the child")

    with device(clock, race_check="record") as dev:
        stream = dev.stream()
        stream.call(split)
        stream.call(trail.put, "what is behind")
        stream.synchronize_blocking()
    assert threading.excepthook is hooked
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 1
    assert sorted(trail.read()) == [
        "KeyError is told of in the child",
        "what is behind in the parent",
    ]


@pytest.mark.parametrize(("code", "status"), [(None, 0), (3, 3), ("words", 1)])
def test_a_child_may_say_how_it_ends(code: object, status: int) -> None:
    children = []

    def split() -> None:
        if child := fork():
            children.append(child)
        else:
            raise SystemExit(code)

    with device() as dev:
        dev.stream().call(split)
        dev.synchronize_blocking()
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == status


def test_a_child_of_a_host_function_may_use_a_device_of_its_own(clock: str) -> None:
    trail, children = Trail(), []

    def split() -> None:
        if child := fork():
            children.append(child)
            return
        with device(clock) as own:
            stream = own.stream()
            stream.call(trail.put, "work of its own")
            stream.synchronize_blocking()
        try:
            dev.memory()
        except kvcore.StreamError:
            trail.put("an error")

    with device(clock) as dev:
        dev.stream().call(split)
        dev.synchronize_blocking()
    os.waitpid(children[0], 0)
    assert trail.read() == ["work of its own in the child", "an error in the child"]


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
