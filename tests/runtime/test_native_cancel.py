# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT012  (a whole block is what raises here)
"""asyncio's own cancels at every await of the runtime: ``Task.cancel`` knows no scope.

Leaving a device ends only when what runs is over, with nothing left behind, and raises the cancel.
Every other wait ends at once and leaves the work, and the tasks that wait beside it, alone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fakes import FakePlan, device

import kvcore
from cancels import WAYS, Outcome, run
from ctrl_c import interrupt

pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])

ways = pytest.mark.parametrize("way", WAYS)
MOST_WAITS = 60


class Running:
    """A host function that runs until it is let go, and says whether it does."""

    def __init__(self, stream: kvcore.Stream) -> None:
        self.entered = threading.Event()
        self.now = False
        self._go = threading.Event()
        stream.call(self._run)

    def _run(self) -> None:
        self.now = True
        self.entered.set()
        assert self._go.wait(50)
        self.now = False

    def let_go(self) -> None:
        self._go.set()


async def turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def check(outcome: Outcome) -> None:
    """The task ended with its cancel, if it had one, and with its count of requests whole."""
    assert outcome.error is None
    assert outcome.cancelled == (outcome.cancels > 0)
    assert outcome.count == outcome.cancels


async def sweep(scenario: Callable[[int], Any], way: str, others: Any = ()) -> int:
    """Run a scenario, cancelled at its first wait, its second, ...; how many there were.

    others: tasks that the scenario has started; they end before the next run.
    """
    for at in range(MOST_WAITS):
        outcome = await run(lambda at=at: scenario(at), at, way)
        check(outcome)
        await asyncio.gather(*others)
        if not outcome.cancels:
            return at
    raise AssertionError("the scenario never ends")


@ways
@pytest.mark.parametrize("by", ["normally", "exception"])
async def test_leaving_a_device(clock: str, by: str, way: str) -> None:
    ended: list[bool] = []
    devices: list[Any] = []
    kept: list[Any] = []

    async def scenario(at: int) -> None:
        dev = device(clock)
        devices.append(dev)
        try:
            async with dev:
                a, b = dev.stream("a"), dev.stream("b")
                kept[:] = [dev.empty(10), dev.empty_host(10), dev.empty_swapped(10)]
                running = Running(a)
                running.entered.wait(50)
                a.launch(FakePlan())
                b.wait_stream(a)
                b.launch(FakePlan())
                opener = asyncio.ensure_future(turns())
                opener.add_done_callback(lambda _: running.let_go())
                if by == "exception":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        finally:
            ended.append(not running.now)

    waits = await sweep(scenario, way)
    assert waits >= 1
    assert ended == [True] * (waits + 1)
    for dev in devices:
        for space in ("device", "host", "swapped"):
            memory = dev.memory(space)
            assert (memory.used, memory.allocations, memory.frees) == (0, 1, 1)
    assert all(buffer.freed for buffer in kept)


@ways
async def test_waits_end_at_once_and_leave_the_work_alone(clock: str, way: str) -> None:
    """The cancelled one watches the socket for all; the others must not be stranded."""
    async with device(clock) as dev:
        a, b = dev.stream(), dev.stream()
        for what in ("stream", "event", "device", "run", "drain"):
            ran: list[int] = []
            others: list[Any] = []

            async def scenario(
                at: int, what: str = what, ran: Any = ran, others: Any = others
            ) -> None:
                running = Running(a)
                b.wait_stream(a)
                event = b.record_event()
                waits = {
                    "stream": a.synchronize,
                    "event": event.synchronize,
                    "device": dev.synchronize,
                    "run": lambda: b.run(FakePlan()),
                    "drain": b.drain,
                }
                opener = asyncio.ensure_future(turns())
                opener.add_done_callback(lambda _: running.let_go())
                b.call(ran.append, at)
                others += [opener]

                # (leading when the loop comes round to the others)
                def join() -> None:
                    for wait in (a.synchronize, event.synchronize, b.synchronize, b.drain):
                        others.append(asyncio.ensure_future(wait()))

                asyncio.get_running_loop().call_soon(join)
                await waits[what]()

            waits = await sweep(scenario, way, others)
            assert waits >= 1
            assert ran == list(range(waits + 1))
        await dev.synchronize()


@ways
async def test_replays_whose_wait_is_cancelled(clock: str, way: str) -> None:
    """Each replay runs whole, and the graph can be replayed again."""
    async with device(clock) as dev:
        a, b = dev.stream(), dev.stream()
        plans = [FakePlan(), FakePlan()]
        async with dev.capture(a) as graph:
            a.launch(plans[0])
            b.wait_stream(a)
            b.launch(plans[1])
            a.wait_stream(b)

        async def scenario(at: int) -> None:
            running = Running(a)
            opener = asyncio.ensure_future(turns())
            opener.add_done_callback(lambda _: running.let_go())
            graph.replay(a)
            await a.synchronize()

        waits = await sweep(scenario, way)
        assert waits >= 1
        await dev.synchronize()
        assert [plan.runs for plan in plans] == [waits + 1] * 2


@ways
async def test_a_cancel_takes_no_failure_away(clock: str, way: str) -> None:
    """A failure that the cancelled wait did not tell is told to the next."""

    async def scenario(at: int) -> None:
        stream = dev.stream()
        running = Running(stream)
        stream.call(int, "no number")
        opener = asyncio.ensure_future(turns())
        opener.add_done_callback(lambda _: running.let_go())
        try:
            await stream.synchronize()
        except kvcore.StreamError:
            told.append(at)
        except asyncio.CancelledError:
            running.let_go()
            with pytest.raises(kvcore.StreamError):
                stream.synchronize_blocking()
            told.append(at)
            raise

    told: list[int] = []
    async with device(clock) as dev:
        waits = await sweep(scenario, way)
    assert told == list(range(waits + 1))


async def test_draining_while_a_device_is_left_by_an_exception(clock: str) -> None:
    """Work that was dropped is over; what runs is not, and ``drain`` waits for that."""
    ended: list[bool] = []

    async def lender(stream: kvcore.Stream) -> None:
        await stream.drain()
        ended.append(not running.now)

    with pytest.raises(ZeroDivisionError):
        async with device(clock) as dev:
            stream = dev.stream()
            running = Running(stream)
            running.entered.wait(50)
            stream.launch(FakePlan())
            task = asyncio.ensure_future(lender(stream))
            await turns()
            opener = asyncio.ensure_future(turns())
            opener.add_done_callback(lambda _: running.let_go())
            raise ZeroDivisionError
    await task
    await opener
    assert ended == [True]
    await stream.drain()  # of a device that is closed
    stream.drain_blocking()


async def test_draining_tells_of_no_failure_and_works_in_a_capture(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        inside: list[BaseException] = []
        stream.call(int, "no number")
        await stream.drain()
        stream.drain_blocking()
        with pytest.raises(kvcore.StreamError, match=r"no number"):
            await stream.synchronize()
        stream.launch(FakePlan())
        with dev.capture(stream):
            stream.drain_blocking()

        def waits_for_itself() -> None:
            try:
                stream.drain_blocking()
            except kvcore.StreamError as error:
                inside.append(error)

        stream.call(waits_for_itself)
        await stream.drain()
        assert "host function must not" in str(inside[0])


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvcore")]


def join_workers() -> None:
    for thread in workers():
        thread.join(50)
    assert not workers()


async def opened(clock: str, kept: list[Any]) -> AsyncIterator[Running]:
    """An async generator that holds a device."""
    async with device(clock) as dev:
        kept.append(dev.empty(10))
        running = Running(dev.stream())
        running.entered.wait(50)
        kept.append(running)
        yield running


def test_an_abandoned_generator_that_holds_a_device(clock: str, anyio_backend: str) -> None:
    """Its finaliser runs as a task, which the end of the loop cancels and does not wait for."""
    kept: list[Any] = []

    async def main(close: bool) -> None:
        generator = opened(clock, kept)
        async for running in generator:
            asyncio.get_running_loop().call_later(0.01, running.let_go)
            break
        if close:
            await generator.aclose()
            assert not running.now
            assert kept[-2].freed

    for close in (True, False):
        asyncio.run(main(close))
        kept[-1].let_go()
        join_workers()
    assert all(kept[i].freed for i in (0, 2))


@pytest.mark.parametrize("known", [False, True])
def test_a_generator_dropped_when_its_loop_is_gone(
    clock: str, known: bool, anyio_backend: str
) -> None:
    """Closed where nobody can await; or, known to its loop, never closed, but collected."""
    kept: list[Any] = []
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        await generator.__anext__()

    generator: Any = opened(clock, kept)
    loop.run_until_complete(begin() if known else generator.__anext__())
    loop.close()
    dev = weakref.ref(kept[0].device)
    ledger = kept[0].storage.ledger
    kept.pop().let_go()
    if known:  # (work under way holds its device)
        kept.pop().device.synchronize_blocking()
    kept.clear()
    generator = None
    gc.collect()
    join_workers()
    gc.collect()
    assert dev() is None
    assert ledger.used == 0


def test_a_device_that_was_left_is_collected(clock: str, anyio_backend: str) -> None:
    with device(clock, trace=True, race_check="record") as dev:
        a, b = dev.stream(), dev.stream()
        a.launch(FakePlan())
        b.wait_event(a.record_event())
        b.launch(FakePlan())
    there = weakref.ref(dev)
    del dev, a, b
    gc.collect()
    assert there() is None


@pytest.mark.parametrize("trace", [False, True])
def test_a_device_that_is_never_left_goes_with_its_workers(
    clock: str, trace: bool, anyio_backend: str
) -> None:
    dev = device(clock, trace=trace, race_check="record").__enter__()
    stream = dev.stream()
    stream.launch(FakePlan())
    stream.synchronize_blocking()
    buffer, ledger = dev.empty(10), dev._core.ledgers["device"]
    stream.fill(buffer, 1)
    stream.synchronize_blocking()
    threads = workers()
    assert threads
    del dev, stream, buffer
    gc.collect()
    join_workers()
    assert ledger.used == 0


@pytest.mark.parametrize("closed", [False, True])
def test_a_loop_that_is_gone_while_a_task_leaves(
    clock: str, closed: bool, anyio_backend: str
) -> None:
    """The task never goes on, or is closed: the device ends behind what runs all the same."""
    kept: list[Any] = []

    async def leave() -> None:
        async for _ in opened(clock, kept):
            pass

    loop = asyncio.new_event_loop()
    task = loop.create_task(leave())
    for _ in range(20):
        loop.run_until_complete(asyncio.sleep(0))
    assert not task.done()
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is meant
    coroutine: Any = task.get_coro()
    if closed:
        coroutine.close()
    buffer, running = kept
    assert not buffer.freed
    running.let_go()
    join_workers()
    assert buffer.freed
    coroutine.close()


def test_the_end_of_a_loop_in_the_middle_of_work(clock: str, anyio_backend: str) -> None:
    """A task inside a device is cancelled by asyncio.run."""
    kept: list[Any] = []
    tasks: list[Any] = []

    async def use() -> None:
        async for running in opened(clock, kept):
            await kept[0].device.synchronize()
            assert running.now

    async def main() -> None:
        tasks.append(asyncio.ensure_future(use()))
        await turns()

    # The task leaves the loop over the generator, which is then closed by a task that nobody
    # waits for: the loop's end may come first.
    asyncio.run(main())
    assert tasks[0].cancelled()
    assert kept[1].now
    assert not kept[0].freed
    kept[1].let_go()
    join_workers()
    assert not kept[1].now
    assert kept[0].freed


PROGRAM = """
import trio

how, inside = sys.argv[1:]
if how != "trio":  # which knows its own handler
    see_signals()
kept = []

def begin(dev):
    kept.append(dev.empty(10))
    dev.stream().call(hold)

async def body(pause):
    async with kvcore.Device() as dev:
        begin(dev)
        if inside == "block":
            await pause(3600)

def plain():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with kvcore.Device() as dev:
        begin(dev)
        if inside == "block":
            threading.Event().wait(3600)

run({
    "asyncio": lambda: asyncio.run(body(asyncio.sleep)),
    "trio": lambda: trio.run(body, trio.sleep),
    "plain": plain,
}[how])
print(left(), kept[0].freed, kept[0].device.memory().used, flush=True)
"""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_what_ends_the_leaving_at_once(clock: str, kind: type[BaseException]) -> None:
    """A second Ctrl-C is raised in the wait: it goes on, and a thread leaves behind what runs."""

    async def leave() -> None:
        async with device(clock) as dev:
            kept.append(dev.empty(10))
            kept.append(Running(dev.stream()))
            kept[1].entered.wait(50)
            if inside == "block":
                raise ZeroDivisionError

    for inside in ("block", "leaving"):
        kept: list[Any] = []
        coroutine = leave()
        coroutine.send(None)
        if inside == "leaving":  # the first one is taken for a cancel
            coroutine.throw(KeyboardInterrupt())
        with pytest.raises(kind):
            coroutine.throw(kind())
        assert kept[1].now
        assert not kept[0].freed
        kept[1].let_go()
        join_workers()
        assert kept[0].freed


@pytest.mark.parametrize("runs", [True, False])
async def test_ctrl_c_interrupts_the_start_of_the_closing_thread(
    clock: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may run nevertheless: it, or the next one, ends the device, and only one does."""
    start = threading.Thread.start
    starts = closings = 0

    def interrupted(thread: threading.Thread) -> None:
        nonlocal starts
        if thread.name == "kvcore-closer":
            starts += 1
            if starts == 1:
                if runs:
                    start(thread)
                raise KeyboardInterrupt
        start(thread)

    def close() -> list[Any]:
        nonlocal closings
        closings += 1
        return closed()

    dev = device(clock)
    closed = dev.driver.close
    monkeypatch.setattr(dev.driver, "close", close)
    with pytest.raises(KeyboardInterrupt):
        async with dev:
            buffer, running = dev.empty(10), Running(dev.stream())
            running.entered.wait(50)
            monkeypatch.setattr(threading.Thread, "start", interrupted)
    assert runs or starts == 2
    running.let_go()
    join_workers()
    assert closings == 1
    assert buffer.freed
    assert (dev.memory().used, dev.memory().frees) == (0, 1)


@pytest.mark.parametrize("inside", ["block", "leaving"])
def test_what_ends_the_leaving_of_a_plain_block_at_once(
    clock: str, inside: str, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev = device(clock)
    interrupts = 1 if inside == "block" else 2

    def wait(*_: object, **__: object) -> None:
        nonlocal interrupts
        interrupts -= 1
        assert interrupts >= 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), dev:
        buffer, running = dev.empty(10), Running(dev.stream())
        running.entered.wait(50)
        monkeypatch.setattr(dev.driver, "wait_for", wait)
        life = dev._life
        monkeypatch.setattr(
            life, "drop", lambda drop=life.drop: (drop(), interrupts or monkeypatch.undo())
        )
        if inside == "block":
            raise ZeroDivisionError
    assert running.now
    assert not buffer.freed
    running.let_go()
    join_workers()
    assert buffer.freed


@pytest.mark.skipif(os.name != "posix", reason="SIGINT of POSIX")
@pytest.mark.parametrize(
    ("how", "times"),
    [("asyncio", 1), ("asyncio", 2), ("trio", 1), ("trio", 2), ("plain", 1), ("plain", 2)],
)
@pytest.mark.parametrize("inside", ["block", "leaving"])
def test_ctrl_c(how: str, times: int, inside: str, anyio_backend: str) -> None:
    """Inside the block and while it is left: at the end no thread and no memory is left."""
    lines, errors = interrupt(PROGRAM, how, inside, times=times, seen=how != "trio")
    assert sorted(lines) == ["[] True 0\n", "interrupted\n", "over\n"], errors
