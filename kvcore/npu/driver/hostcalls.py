# SPDX-License-Identifier: Apache-2.0
"""Host functions: Python run by a thread of the driver, in stream order.

The C side gets one function, made once and never freed, and a number; what the number stands for
is found here until it has run.  So no callback object can die under the driver.  None of this may
call ACL: a host function that allocates, launches or waits would block its own stream.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcore.npu.cann.library import thread
from kvcore.npu.cann.structs import HOST_FUNC
from kvcore.runtime.queues._marks import Failure
from kvcore.runtime.queues._outside import enter, leave, promise, settle

if TYPE_CHECKING:
    from kvcore.npu.driver.parts import OnHardware
    from kvcore.runtime.queues._marks import Mark

__all__ = ["Action", "HostCall", "launch"]


class Action:
    """A function on its way to a thread of the driver; its launcher keeps this until it has run.

    When no thread does, because its stream was given up, it will not run.
    """

    __slots__ = ("__weakref__", "run")

    def __init__(self, run: Callable[[], object]) -> None:
        self.run: Callable[[], object] = run


_numbers = itertools.count(1)
_actions: weakref.WeakValueDictionary[int, Action] = weakref.WeakValueDictionary()
# A child that a host function forks has a copy of the driver's thread: no function of the parent
# may run there.
os.register_at_fork(after_in_child=_actions.clear)


def _run(number: int | None) -> None:
    action = _actions.pop(number or 0, None)
    if action is not None:
        thread.in_host_function = True
        try:
            action.run()
        finally:
            thread.in_host_function = False


_ENTRY = HOST_FUNC(_run)


def launch(cann: Any, stream: int, run: Callable[[], object]) -> Action:
    """Put a function behind what the stream has.  It must not raise."""
    number = next(_numbers)
    action = _actions[number] = Action(run)
    cann.aclrtLaunchHostFunc(stream, _ENTRY, number)
    return action


class HostCall:
    """A function of the program on a stream: ``Stream.call``, or a plan that runs on the host.

    The stream's queue is held until it has run, by a promise.  That keeps the meaning of a
    failure: when the function raises, nothing behind it is handed over.
    """

    __slots__ = ("_action", "_args", "_fn", "_lane", "_losses", "done", "name")

    def __init__(
        self, lane: OnHardware, fn: Callable[..., object], args: tuple[object, ...], name: str
    ) -> None:
        self.name: str = name
        self._fn = fn
        self._args = args
        self._lane = lane
        self._losses = lane.flight.losses
        self._action: Action | None = None
        self.done: Mark = promise(lane.queue)

    def run(self) -> None:
        """Hand the function over; called by a worker when the stream's queue comes to it."""
        lane = self._lane
        driver = lane.npu
        calling = lane.queue.executor.calling()
        with driver.bind(), lane.flight.using(self._losses) as handle:
            driver.held.add(lane)
            if handle and lane.flight.took(self, self._losses):
                self._action = launch(driver.cann, handle, partial(self._act, calling))
                return
        failure = lane.flight.loss_since(self._losses)
        assert failure is not None
        self.abandon(failure)

    __call__ = run

    def _act(self, calling: object) -> None:
        lane = self._lane
        executor = lane.queue.executor
        failure = None
        enter(executor, calling)
        try:
            self._fn(*self._args)
        except BaseException as error:  # no exception may leave through the C caller
            failure = Failure(error, lane.name, self.name)
            executor.failures.append(failure)
        finally:
            leave(executor)
        lane.flight.ran(self)
        lane.npu.held.discard(lane)
        settle(executor, self.done, failure)

    def abandon(self, failure: Failure) -> None:
        """Settle the call as failed: its stream has failed before it came to this."""
        self._action = None
        self._lane.npu.held.discard(self._lane)
        settle(self._lane.queue.executor, self.done, failure)
