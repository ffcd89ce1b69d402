# SPDX-License-Identifier: Apache-2.0
"""Operations on their way to the hardware: what the queue holds in place of a plan."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvcore.errors import KVCoreError
from kvcore.npu.call import launch as operators
from kvcore.npu.cann import status
from kvcore.npu.cann.status import bare
from kvcore.npu.driver.buffers import HeldBuffers
from kvcore.npu.driver.transfers import Transfer
from kvcore.runtime.copies import Copy, Fill
from kvcore.runtime.queues._marks import Failure

if TYPE_CHECKING:
    from kvcore.npu.driver.parts import OnHardware

__all__ = ["Handover", "Moves", "Work", "name_of", "owners_of", "work_of"]


class Handover:
    """An operation that hands itself over when a worker runs it, and is queued as it is."""

    __slots__ = ()


class Work(Handover):
    """An operation as the queue holds it: it answers as the plan does, and hands the work over."""

    __slots__ = ("_held", "_lane", "_losses", "_plan", "name")

    def __init__(self, lane: OnHardware, plan: Any, owners: Iterable[object] = ()) -> None:
        self._losses = lane.flight.losses
        self._lane = lane
        self._plan = plan
        self._held = HeldBuffers(owners)
        self.name: str = name_of(plan)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._plan, attribute)  # reads, writes, touched, arrays, ...

    def run(self) -> None:
        """Hand the operation over; called by a worker when the queue comes to it."""
        lane = self._lane
        with lane.npu.bind(), lane.flight.using(self._losses) as handle:
            if not handle:
                return  # there was a failure that the queue does not have yet
            try:
                self.hand_over(handle, lane.flight.took)
            except KVCoreError as error:
                if error.code is not None and status.is_sticky(error.code):
                    # This call reported an earlier fault, so nothing in flight can be relied on.
                    lane.give_up(Failure(bare(error), lane.name, self.name))
                raise
            lane.look_around()

    def hand_over(self, handle: int, keep: Callable[[Any], object]) -> None:
        """Run the plan, which puts its kernels on the stream."""
        keep(self)
        driver = self._lane.npu
        # The operators keep their workspace by stream, but in a capture.
        sink = None if keep == self._lane.flight.took else keep
        with (
            driver.turns.of(self._plan),
            operators.onto(stream=handle, device_id=driver.device_id, keep=sink),
            self._held.in_use(),
        ):
            self._plan.run()


class Moves(Work):
    """A copy or a fill."""

    __slots__ = ("_transfer",)

    def __init__(self, lane: OnHardware, plan: Copy | Fill) -> None:
        super().__init__(lane, plan)
        self._transfer = Transfer(lane.npu, plan)

    def hand_over(self, handle: int, keep: Callable[[Any], object]) -> None:
        """Put its copies on the stream."""
        self._transfer.hand_over(handle, keep)


def work_of(lane: OnHardware, plan: Any) -> Work | None:
    """A plan as work of the hardware; None for one that has no arrays: a host function."""
    if isinstance(plan, Copy | Fill):
        return Moves(lane, plan)
    owners = owners_of(plan)
    return None if owners is None else Work(lane, plan, owners)


def owners_of(plan: Any) -> Iterable[object] | None:
    """The owners of a plan's arrays; None for a plan without any, which runs on the host."""
    if not (hasattr(plan, "reads") and hasattr(plan, "writes")):
        return None
    arrays = getattr(plan, "arrays", None)
    if isinstance(arrays, tuple):
        return arrays
    return [access.owner for access in (*plan.reads, *plan.writes)] or None


def name_of(plan: object, attribute: str = "name") -> str:
    """The name of an operation in messages, whatever the program's own classes answer."""
    if isinstance(plan, Transfer):
        plan = plan.plan
    for path in ((), ("operator",)):
        with contextlib.suppress(Exception):
            name = getattr(functools.reduce(getattr, path, plan), attribute)
            if isinstance(name, str):
                return name
    return "" if isinstance(plan, tuple) else type(plan).__name__
