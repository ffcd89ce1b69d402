# SPDX-License-Identifier: Apache-2.0
"""asyncio's own cancels, at every point where a coroutine waits.

`run` drives a scenario as an asyncio task and cancels it with ``Task.cancel`` at its k-th wait,
in one of four ways.  A scenario that waits fewer times is not cancelled, which ends the sweep.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

__all__ = ["WAYS", "Outcome", "run"]

#: once:   the task waits, and is cancelled.
#: late:   what it waits for comes in the same turn of the loop, just before the cancel.
#: twice:  a second cancel at the wait after the first.
#: storm:  a cancel at every wait from the k-th on, ten at most.
WAYS = ("once", "late", "twice", "storm")


class Outcome:
    """What became of a task.

    waits:     how often it waited.
    cancels:   how often it was cancelled.
    cancelled: it ended with the cancel.
    count:     its count of requests to cancel when it was over.
    error:     what it raised instead, or None.
    """

    def __init__(self) -> None:
        self.waits = self.cancels = self.count = 0
        self.cancelled = False
        self.error: BaseException | None = None


@types.coroutine
def _watched(
    coroutine: Coroutine[Any, Any, None], on_wait: Callable[[Any], None]
) -> Generator[Any, Any, None]:
    """Await the coroutine; on_wait(future or None) is called at each of its waits."""
    error: BaseException | None = None
    while True:
        try:
            future = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration:
            return
        on_wait(future)
        error = None
        try:
            yield future
        except BaseException as thrown:
            error = thrown


async def run(
    scenario: Callable[[], Coroutine[Any, Any, None]],
    at: int,
    way: str,
    on_cancel: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run a scenario and cancel it at its wait number ``at`` (from 0; -1: never).

    on_cancel: called once, in a turn of the loop after the first cancel.
    """
    outcome = Outcome()
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        if task.done():
            return
        if not outcome.cancels:
            loop.call_soon(loop.call_soon, on_cancel)
        outcome.cancels += 1
        task.cancel()

    def on_wait(future: Any) -> None:
        place = outcome.waits - at
        outcome.waits += 1
        most = {"once": 1, "late": 1, "twice": 2, "storm": 10}[way]
        if at < 0 or not 0 <= place < most:
            return
        if way == "late" and future is not None:
            # (first among the future's callbacks: the task itself comes behind)
            future.add_done_callback(lambda _: cancel())
        else:
            loop.call_soon(cancel)

    async def body() -> None:
        try:
            await _watched(scenario(), on_wait)
        finally:
            outcome.count = task.cancelling()

    task = asyncio.ensure_future(body())
    await asyncio.wait([task])
    outcome.cancelled = task.cancelled()
    outcome.error = None if task.cancelled() else task.exception()
    return outcome
