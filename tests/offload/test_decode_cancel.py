# SPDX-License-Identifier: Apache-2.0
"""asyncio's own cancels at every await of the decode engine: ``Task.cancel`` knows no scope.

A request's place is given to another only when its last operation is over, so leaving, flushing
and closing last until then, and raise the cancel; waiting for a step ends at once.  Afterwards
the engine serves the right rows and the host has the bytes that it is said to have.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import kvcore
from cancels import WAYS, Outcome, run
from ctrl_c import interrupt
from kvcore.errors import CaptureError, ParamInvalidError, StreamError
from kvcore.offload import DecodeFailed, PrefillOffloader
from offload.decode_world import World, device

pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])

#: The tool runs every way on every clock.
ways = pytest.mark.parametrize(
    ("way", "clock", "writes"),
    [("once", "wall", "write_through"), ("late", "model", "write_back"),
     ("twice", "model", "write_through"), ("storm", "wall", "write_back")],
)  # fmt: skip
clocks = pytest.mark.parametrize("clock", ["model", "wall"])
MOST_WAITS = 80


async def turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


class Held(World):
    """A world whose operations can be held: at the rows of one layer of "b"."""

    def __init__(self, dev: Any, seed: int, **options: Any) -> None:
        self.go, self.entered = threading.Event(), threading.Event()
        self.go.set()
        self.running = False
        self.breaks = False
        self.inside: Callable[[], object] = int
        super().__init__(dev, seed, **{"max_batch": 3, **options})

    def rows(self, request: Any, layer: int, first: int, count: int) -> Any:
        if layer == 2 and request == "b":
            self.running = True
            self.entered.set()
            assert self.go.wait(50)
            self.inside()
            self.running = False
            if self.breaks:
                raise RuntimeError("the layer broke")
        return super().rows(request, layer, first, count)

    def begin(self) -> Any:
        """Two steps of two requests that are over, and one that is held."""
        for request, tokens in (("a", 9), ("b", 5)):
            assert self.start(request, tokens)
        for drafts in (0, 1):
            self.compare(self.launch(["a", "b"], {"a": drafts, "b": 0}).wait_blocking())
            self.engine.accept("a", 1)
            self.engine.accept("b", 1)
        self.entered.clear()
        self.go.clear()
        step = self.launch(["a", "b"], {"a": 1, "b": 0})
        assert self.entered.wait(50)
        return step

    def let_go_soon(self) -> None:
        opener = asyncio.ensure_future(turns())
        opener.add_done_callback(lambda _: self.go.set())
        self.opener = opener

    def drop(self, request: Any) -> None:
        """Give the blocks of a request back that has left, whatever the host has."""
        self.release(request, 0, keep=False)

    def go_on(self) -> None:
        """Whoever is in, and newcomers in every place that is free, decode as without offload."""
        engine = self.engine
        self.seen.clear()
        for name in ("c", "d", "e"):
            if len(engine.requests) < 3:
                assert self.start(name, 7)
        assert len(engine.requests) == 3
        batch = list(engine.requests)
        for _ in range(2):
            self.compare(self.launch(batch, dict.fromkeys(batch, 1)).wait_blocking())
            for request in batch:
                engine.accept(request, 2)
        self.check_books()
        for request in batch:
            tokens = engine.context(request)
            assert engine.evict_blocking(request) == tokens
            self.check_host(request, tokens)
            self.drop(request)
        assert self.blocks.used == 0
        engine.close()


def check(outcome: Outcome) -> None:
    """The task ended with its cancel, if it had one, and with its count of requests whole."""
    assert outcome.error is None
    assert outcome.cancelled == (outcome.cancels > 0)
    assert outcome.count == outcome.cancels


async def sweep(one: Callable[[int], Coroutine[Any, Any, Outcome]]) -> int:
    """one(k) for the first wait, the second, ...; how many there were."""
    for at in range(MOST_WAITS):
        outcome = await one(at)
        check(outcome)
        if not outcome.cancels:
            return at
    raise AssertionError("it never ends")


@ways
@pytest.mark.parametrize("how", ["preempt", "evict", "abort"])
async def test_a_request_that_leaves(how: str, writes: str, clock: str, way: str) -> None:
    async def one(at: int) -> Outcome:
        async with device(clock, at) as dev:
            world = Held(dev, at, write_policy=writes)
            engine = world.engine
            world.begin()
            tokens = engine.context("a")
            certain = engine.on_host("a")

            async def leave() -> None:
                try:
                    await getattr(engine, how)("a")
                finally:
                    assert not world.running
                    assert engine.requests == ("b",)

            world.let_go_soon()
            outcome = await run(leave, at, way)
            await world.opener
            assert engine.leaving == ()
            world.check_host("a", certain if how == "abort" else tokens)
            world.drop("a")
            engine.accept("b", 1)
            world.go_on()
            return outcome

    assert await sweep(one) > 1


@ways
@pytest.mark.parametrize("what", ["flush", "wait", "step", "aclose", "events"])
async def test_other_waits(what: str, writes: str, clock: str, way: str) -> None:
    async def one(at: int) -> Outcome:
        async with device(clock, at) as dev:
            before = dev.memory("device").used
            world = Held(dev, at, write_policy=writes)
            engine = world.engine
            step = world.begin()

            async def body() -> None:
                if what == "wait":
                    await step.wait()
                elif what == "events":
                    await engine.events.synchronize()
                elif what == "step":
                    engine.accept("a", 1)
                    for request in ("a", "b"):
                        world.grow(request, 1)
                    await engine.step(["a"])
                else:
                    try:
                        await (engine.flush("a") if what == "flush" else engine.aclose())
                    finally:
                        assert not world.running

            world.let_go_soon()
            outcome = await run(body, at, way)
            await world.opener
            if what == "aclose":
                assert dev.memory("device").used == before
                with pytest.raises(StreamError, match=r"closed"):
                    engine.admit("c", world.tables["a"], 3)
                return outcome
            if what == "flush":
                assert engine.on_host("a") == engine.context("a") == 11
                world.check_host("a", 11)
            assert engine.requests == ("a", "b")
            await dev.synchronize()
            if what == "step":  # a later step has written over what its rows were made of
                engine.accept("a", 1)
            engine.accept("b", 1)
            world.go_on()
            return outcome

    assert await sweep(one) >= 1


@ways
@pytest.mark.parametrize("what", ["preempt", "abort", "wait", "flush", "aclose"])
async def test_a_failure_and_a_cancel(what: str, writes: str, clock: str, way: str) -> None:
    """Every request is out all the same, and nothing is taken for being on the host."""

    async def one(at: int) -> Outcome:
        async with device(clock, at) as dev:
            world = Held(dev, at, write_policy=writes)
            engine = world.engine
            step = world.begin()
            world.breaks = True
            certain = {name: engine.on_host(name) for name in ("a", "b")}
            failures: list[DecodeFailed] = []

            async def body() -> None:
                waits: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
                    "preempt": lambda: engine.preempt("a"),
                    "abort": lambda: engine.abort("a"),
                    "wait": step.wait,
                    "flush": lambda: engine.flush("a"),
                    "aclose": engine.aclose,
                }
                try:
                    await waits[what]()
                except DecodeFailed as error:
                    failures.append(error)
                else:
                    raise AssertionError("nobody was told")

            world.let_go_soon()
            outcome = await run(body, at, way)
            await world.opener
            assert bool(failures) != outcome.cancelled
            if what == "aclose":
                return outcome
            if what == "wait" and outcome.cancelled and engine.requests:
                with pytest.raises(DecodeFailed):  # the wait had ended before the failure
                    step.wait_blocking()
            assert not world.running
            assert engine.requests == ()
            world.breaks = False
            for name, tokens in certain.items():
                world.check_host(name, tokens)
                world.drop(name)
            world.go_on()
            return outcome

    assert await sweep(one) > 1


async def test_a_leave_that_times_out_gives_no_place_away() -> None:
    """wait_for, a timeout and a sibling that fails, and a newcomer that wants the place."""
    for kind in ("wait_for", "timeout", "group"):
        async with device("wall") as dev:
            world = Held(dev, 3, max_batch=2)
            engine = world.engine
            world.begin()
            world.let_go_soon()

            async def newcomer(world: Held = world) -> None:
                while world.running:
                    with pytest.raises(
                        ParamInvalidError, match=r"at most max_batch \(2\) requests"
                    ):
                        world.engine.admit("c", world.tables["a"], 3)
                    await asyncio.sleep(0)

            async def fails() -> None:
                raise ZeroDivisionError

            async def leave(engine: Any = engine) -> None:
                await engine.preempt("a")

            newcomers = asyncio.ensure_future(newcomer())
            if kind == "group":
                with pytest.raises(ExceptionGroup) as caught:
                    await _together(leave(), fails())
                assert caught.value.split(ZeroDivisionError)[1] is None
            elif kind == "timeout":
                with pytest.raises(TimeoutError):
                    await _timed(leave())
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(leave(), 1e-9)
            assert engine.requests == (("a", "b") if world.running else ("b",))
            await newcomers
            await dev.synchronize()
            assert engine.requests == ("b",)
            world.check_host("a", 11)
            engine.close()


async def _together(*coroutines: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as group:
        for coroutine in coroutines:
            group.create_task(coroutine)


async def _timed(coroutine: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(0):
        await coroutine


@clocks
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("how", ["preempt", "evict", "abort"])
async def test_what_breaks_a_leave_off_keeps_the_place(
    how: str, kind: type[BaseException], clock: str
) -> None:
    async with device(clock) as dev:
        world = Held(dev, 5, max_batch=2)
        engine = world.engine
        world.begin()
        coroutine = getattr(engine, how)("a")
        coroutine.send(None)
        coroutine.throw(asyncio.CancelledError())  # a cancel does not
        with pytest.raises(kind):
            coroutine.throw(kind())
        assert engine.requests == ("a", "b")
        assert engine.leaving == ("a",)
        for act in (
            lambda: engine.launch(["a"]),
            lambda: engine.accept("a", 1),
            lambda: engine.invalidate("a", 1),
            lambda: engine.flush_blocking("a"),
        ):
            with pytest.raises(ParamInvalidError, match=r"expected a request that is not leaving"):
                act()
        with pytest.raises(ParamInvalidError, match=r"not admitted yet, got 'a', which is leaving"):
            engine.admit("a", world.tables["a"], 3)
        with pytest.raises(ParamInvalidError, match=r"at most max_batch \(2\) requests"):
            engine.admit("c", world.tables["a"], 3)
        assert engine.context("a") == 11
        world.go.set()
        if how == "evict":  # asked again, it waits
            assert await engine.evict("a") == 11
        else:  # or whoever waits next, or nobody
            await dev.synchronize()
        assert engine.requests == ("b",)
        assert engine.leaving == ()
        world.check_host("a", engine.on_host("b") if how == "abort" else 11)
        assert world.start("c", 3)
        assert engine.requests == ("b", "c")
        assert engine.totals.preempted + engine.totals.evicted + engine.totals.aborted == 1
        engine.close()


@clocks
async def test_closing_that_is_broken_off_is_taken_up_again(clock: str) -> None:
    async with device(clock) as dev:
        before = dev.memory("device").used
        world = Held(dev, 5)
        engine = world.engine
        world.begin()
        coroutine = engine.aclose()
        coroutine.send(None)
        with pytest.raises(KeyboardInterrupt):
            coroutine.throw(KeyboardInterrupt())
        assert dev.memory("device").used > before
        world.go.set()
        await engine.aclose()
        assert dev.memory("device").used == before
        await engine.aclose()
        engine.close()


@clocks
def test_ctrl_c_in_a_blocking_leave(
    clock: str, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device(clock) as dev:
        world = Held(dev, 5, max_batch=2)
        engine = world.engine
        world.begin()

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(dev.driver, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.preempt_blocking("a")
        assert engine.leaving == ("a",)
        with pytest.raises(ParamInvalidError, match=r"at most max_batch \(2\) requests"):
            engine.admit("c", world.tables["a"], 3)
        world.go.set()
        assert engine.preempt_blocking("a") == 11
        world.check_host("a", 11)
        assert engine.requests == ("b",)
        engine.close()


@clocks
async def test_leaving_while_the_device_is_left(clock: str) -> None:
    """The request's waiter is told of the failure only when what runs is over."""
    ended: list[bool] = []
    tasks: list[Any] = []

    async def leave(world: Held) -> None:
        with pytest.raises(DecodeFailed):
            await world.engine.abort("a")
        ended.append(not world.running)

    async def use() -> None:
        async with device(clock) as dev:
            world = Held(dev, 5)
            world.begin()
            tasks.append(asyncio.ensure_future(leave(world)))
            await turns()
            world.let_go_soon()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()
    await tasks[0]
    assert ended == [True]


@clocks
async def test_what_cannot_be_waited_for_is_refused_and_changes_nothing(clock: str) -> None:
    """Inside a capture of the engine's stream, and inside its own operations."""
    async with device(clock) as dev:
        refused: list[BaseException] = []
        world = Held(dev, 5)
        engine = world.engine
        world.begin()

        def inside() -> None:
            for act in (
                lambda: engine.preempt_blocking("a"),
                lambda: engine.abort_blocking("a"),
                lambda: engine.flush_blocking("a"),
                engine.close,
            ):
                try:
                    act()
                except StreamError as error:
                    refused.append(error)

        world.inside = inside
        world.go.set()
        await dev.synchronize()
        world.inside = int
        assert len(refused) == 4
        assert all("host function must not" in str(error) for error in refused)
        assert engine.requests == ("a", "b")
        with dev.capture(engine.streams["compute"]):
            for leave in (engine.preempt, engine.evict, engine.abort, engine.flush):
                with pytest.raises(CaptureError, match=r"^engine: expected streams of which"):
                    await leave("a")
            with pytest.raises(CaptureError):
                await engine.aclose()
        assert engine.requests == ("a", "b")
        engine.accept("a", 1)
        engine.accept("b", 1)
        world.go_on()


async def test_a_failure_told_to_one_leave_is_no_success_to_the_other() -> None:
    """Two requests leave at once; rows that were not copied are nowhere taken for copied."""
    async with device("wall") as dev:
        world = Held(dev, 5, write_policy="write_back")
        engine = world.engine
        world.begin()
        world.breaks = True
        tasks = [asyncio.ensure_future(engine.preempt(name)) for name in ("a", "b")]
        for task in tasks:  # who comes behind the failure stays
            task.add_done_callback(lambda _: "c" in engine.requests or world.start("c", 3))
        await turns()
        world.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [DecodeFailed, DecodeFailed]
        assert [result.lost for result in results] == [{"a": 9}, {"b": 5}]
        assert engine.requests == ("c",)
        engine.close()


async def test_a_wait_from_before_a_failure_puts_no_newcomer_out() -> None:
    """One wait was told of the failure; another, begun before it, ends after a request came."""
    async with device("wall") as dev:
        world = Held(dev, 5)
        engine = world.engine
        world.begin()
        world.breaks = True
        late = engine._settler.begin()
        world.go.set()
        with pytest.raises(DecodeFailed):
            engine.preempt_blocking("a")
        assert world.start("c", 3)
        with late:
            assert late.to_drain() == ()
            late.end()
        assert engine.requests == ("c",)
        engine.close()


async def test_an_aborted_request_s_copies_are_not_taken_for_done() -> None:
    """A step that waited for them confirms nothing once they were told not to run."""
    async with device("wall") as dev:
        world = Held(dev, 5)
        engine = world.engine
        world.begin()
        engine.accept("a", 1)
        world.grow("a", 2)
        step = engine.launch(["a"])  # behind it are the copies of the step that is held
        leaving = asyncio.ensure_future(engine.abort("a"))
        await turns()
        world.go.set()
        await step.wait()
        tokens = await leaving
        assert tokens <= 11
        world.check_host("a", tokens)
        engine.close()


@pytest.mark.parametrize("way", WAYS)
async def test_prefill_while_its_waits_are_cancelled(way: str) -> None:
    """The ring goes on: each layer's rows reach the host, none before they are there."""

    async def one(at: int) -> Outcome:
        with kvcore.Device("A3", clock="model", race_check="raise", seed=at) as dev:
            full = {layer: [dev.empty_host((4, 4, 8), "uint8")] for layer in range(5)}
            compute, copies = dev.stream("compute"), dev.stream("d2h")
            ring = PrefillOffloader(dev, full, max_tokens=8, copies=copies, depth=2)

            async def body() -> None:
                for layer in full:
                    staging = ring.take(layer, compute)
                    compute.fill(staging.lanes[0], layer + 1)
                    stored = ring.hand_over(staging, np.arange(2), first=0, count=8)
                    done.append(layer)
                    await stored.synchronize()

            done: list[int] = []
            outcome = await run(body, at, way)
            await dev.synchronize()
            for layer in done:
                with full[layer][0].host("r") as rows:
                    assert (rows[:2] == layer + 1).all()
            ring.close()
            return outcome

    assert await sweep(one) >= 1


PROGRAM = """
import numpy as np
from kvcore.offload import DecodeEngine

see_signals()

def rows(request, layer, first, count):
    if first == 5 and request == "a":
        hold()
    return [np.full((count, 16), 7, np.uint8)]

def make(dev):
    full = {0: [dev.empty_swapped((8, 4, 16), "uint8")]}
    engine = DecodeEngine(dev, full, groups=((0,),), max_batch=2, max_tokens=16, topk=2, rows=rows,
        select=lambda r, g, t: np.array([t - 1]), write_policy="write_back")
    engine.admit("a", np.arange(4), 4)
    engine.launch(["a"]); engine.accept("a", 1); engine.launch(["a"])
    return engine

async def body():
    async with kvcore.Device() as dev:
        engine = make(dev)
        try:
            await engine.preempt("a")
        finally:
            os.write(1, f"{engine.requests} {engine.leaving}\\n".encode())

def plain():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with kvcore.Device() as dev:
        engine = make(dev)
        try:
            engine.preempt_blocking("a")
        finally:
            os.write(1, f"{engine.requests} {engine.leaving}\\n".encode())

run((lambda: asyncio.run(body())) if sys.argv[1] == "asyncio" else plain)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGINT of POSIX")
@pytest.mark.parametrize("how", ["asyncio", "plain"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(how: str, times: int, anyio_backend: str) -> None:
    """The request has left when its operations are over, or is leaving; never in between."""
    lines, errors = interrupt(PROGRAM, how, times=times)
    assert "interrupted\n" in lines, errors
    states = [line for line in lines if line.startswith("(")]
    # (the second one can end the program before it prints)
    assert len(states) == 1 or (times == 2 and not states), lines
    leaving, left = "('a',) ('a',)\n", "() ()\n"
    not_begun = "('a',) ()\n"  # it came before the first line of preempt had run
    for state in states:
        early = lines.index(state) < lines.index("over\n")
        assert state in ((not_begun, leaving) if early else (leaving, left)), lines
        if how == "asyncio" and times == 1:  # a cancel
            assert not early, lines
            assert state == left, lines
