# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT012  (a whole block is what raises here)
"""Waits that last through cancels: scopes' on both loops, and asyncio's own."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import anyio
import pytest

from kvcore.runtime.shield import Shield

asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])


class Work:
    """Something to wait for; ``waits`` counts how often a wait for it began."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.waits = 0

    async def wait(self) -> None:
        self.waits += 1
        await self.over.wait()


async def shielded(work: Work, ended: list[str]) -> None:
    with Shield() as shield:
        await shield(work.wait)
        ended.append("over" if work.over.is_set() else "early")
    ended.append("not cancelled")


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await anyio.lowlevel.checkpoint()


async def test_without_a_cancel_it_is_a_plain_wait() -> None:
    work, ended = Work(), []
    async with anyio.create_task_group() as group:
        group.start_soon(shielded, work, ended)
        await turns()
        work.over.set()
    assert ended == ["over", "not cancelled"]
    assert work.waits == 1


async def test_a_scope_s_cancel_waits_and_comes_at_the_next_checkpoint() -> None:
    work, ended = Work(), []

    async def body() -> None:
        await shielded(work, ended)
        await anyio.lowlevel.checkpoint()
        ended.append("gone on")

    async with anyio.create_task_group() as group:
        group.start_soon(body)
        await turns()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await turns()
        work.over.set()
    assert group.cancel_scope.cancelled_caught
    assert ended == ["over", "not cancelled"]


async def test_what_the_wait_raises_goes_on() -> None:
    cause = KeyError("cause")

    async def fails() -> None:
        raise RuntimeError("no scope's") from cause

    with pytest.raises(RuntimeError, match=r"no scope's") as caught, Shield() as shield:
        await shield(fails)
    assert caught.value.__cause__ is cause


@asyncio_only
@pytest.mark.parametrize("times", [1, 2, 5])
async def test_a_task_s_cancel_is_raised_when_the_work_is_over(times: int) -> None:
    work, ended = Work(), []
    task = asyncio.ensure_future(shielded(work, ended))
    await turns()
    for i in range(times):
        task.cancel(f"cancel {i}")
        await turns()
    assert not task.done()
    work.over.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert caught.value.args == ("cancel 0",)
    assert ended == ["over"]
    assert task.cancelling() == times
    assert work.waits == times + 1


@asyncio_only
async def test_a_cancel_in_the_turn_in_which_the_work_is_over() -> None:
    work, ended = Work(), []
    task = asyncio.ensure_future(shielded(work, ended))
    await turns()
    work.over.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["over"]


@asyncio_only
async def test_a_timeout_is_told_as_one() -> None:
    work, ended = Work(), []

    async def opener() -> None:
        while not work.waits >= 2:
            await anyio.lowlevel.checkpoint()
        work.over.set()

    task = asyncio.ensure_future(opener())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await shielded(work, ended)
    current: Any = asyncio.current_task()
    assert current.cancelling() == 0
    assert ended == ["over"]
    await task
    await asyncio.sleep(0)  # and this task goes on


@asyncio_only
async def test_a_timeout_and_a_cancel_at_once_are_a_cancel() -> None:
    work, ended = Work(), []

    async def body() -> None:
        async with asyncio.timeout(0):
            await shielded(work, ended)

    task = asyncio.ensure_future(body())
    while work.waits < 2:
        await turns()
    task.cancel()
    await turns()
    work.over.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["over"]


@asyncio_only
async def test_a_sibling_that_fails() -> None:
    work, ended = Work(), []

    async def fails() -> None:
        await turns()
        raise ZeroDivisionError

    async def opener() -> None:
        while work.waits < 2:
            await anyio.lowlevel.checkpoint()
        work.over.set()

    task = asyncio.ensure_future(opener())
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(shielded(work, ended))
            group.create_task(fails())
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
    assert ended == ["over"]
    await task


@asyncio_only
async def test_a_cancel_of_a_task_inside_a_cancelled_scope_is_not_the_scope_s() -> None:
    work, ended = Work(), []

    async def body() -> None:
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_soon(scope.cancel)
            await shielded(work, ended)
        ended.append("swallowed")

    task = asyncio.ensure_future(body())
    await turns()
    task.cancel()
    await turns()
    work.over.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["over"]


@asyncio_only
async def test_a_cancel_goes_before_an_ordinary_error_and_keeps_it() -> None:
    work = Work()

    async def body() -> None:
        with Shield() as shield:
            await shield(work.wait)
            raise ZeroDivisionError

    task = asyncio.ensure_future(body())
    await turns()
    task.cancel()
    await turns()
    work.over.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert isinstance(caught.value.__context__, ZeroDivisionError)


@asyncio_only
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_ctrl_c_ends_the_wait_at_once(kind: type[BaseException]) -> None:
    class Waiting:
        def __await__(self) -> Any:
            yield

    async def never() -> None:
        await Waiting()

    async def body() -> None:
        with Shield() as shield:
            await shield(never)

    coroutine = body()
    coroutine.send(None)
    with pytest.raises(kind):
        coroutine.throw(kind())


async def test_a_dropped_coroutine_is_told_so(recwarn: pytest.WarningsRecorder) -> None:
    """Its loop is gone, so the scope inside cannot be left in order; GeneratorExit goes on."""
    seen: list[BaseException] = []

    async def body() -> None:
        with Shield() as shield:
            try:
                await shield(Work().wait)
            except BaseException as error:
                seen.append(error)
                raise

    coroutines = []

    async def begin() -> None:
        coroutines.append(body())
        coroutines[0].send(None)

    thread = threading.Thread(target=anyio.run, args=(begin,))
    thread.start()
    thread.join()
    coroutines[0].close()
    assert [type(error) for error in seen] == [GeneratorExit]
    assert inspect.getcoroutinestate(coroutines[0]) == inspect.CORO_CLOSED
