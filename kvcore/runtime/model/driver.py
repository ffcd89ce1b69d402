# SPDX-License-Identifier: Apache-2.0
"""The driver behind ``Device()``: this machine's memory and workers, and the model of time.

It gives no lanes: what a lane does for hardware, the compiled queue does here by itself, where a
worker comes to an operation.  On the model clock a host that synchronises waits twice: for the
bytes (a mark), and then until the costs are known that the model needs to say when that was
(nodes of the model).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore.runtime.abc import Driver, Lane, Mark, Queue, hold
from kvcore.runtime.model._clock import ModelClock

if TYPE_CHECKING:
    from kvcore.errors import KVCoreError
    from kvcore.runtime.bell import Waitable
    from kvcore.runtime.core import Core
    from kvcore.runtime.profile import DeviceProfile
    from kvcore.runtime.queues._marks import Failure

__all__ = ["ModelDriver"]


class ModelDriver(Driver):
    """This machine, with the capacity and, if asked for, the times of a profile."""

    name = "cpu"

    def accept(self, profile: Any, clock: str) -> str | DeviceProfile | None:
        """Every profile and both clocks."""
        found: str | DeviceProfile | None = profile
        return found

    def attach(self, core: Core) -> None:
        """Make the clock, when the device has one."""
        super().attach(core)
        if core.settings.clock == "model":
            assert core.profile is not None
            self.clock: ModelClock | None = ModelClock(core.profile, core.lock, core.trace)

    def close(self) -> Sequence[KVCoreError]:
        """Nothing is held but arrays, which go by themselves."""
        return ()

    def take(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """Ordinary memory, whatever the space."""
        return np.empty(nbytes, np.uint8)

    def lane(self, queue: Queue) -> Lane | None:
        """None: the workers run what is queued."""
        return None

    def until(self, marks: Sequence[Mark], *, timed: bool = True) -> Iterator[Waitable]:
        """The marks; then, for the model's time of them, the work whose costs it must know."""
        clock = self.clock if timed else None
        for mark in marks:
            while mark.pending:
                yield mark
            while clock is not None and (node := clock.reach(mark.position)) is not None:
                yield node

    def wait_for(self, mark: Mark, seconds: float | None = None, *, timed: bool = True) -> None:
        """Hold this thread until the mark is settled, and its time known where that matters."""
        if seconds is None and (self.clock is None or not timed):
            if mark.pending:
                hold(mark)
        else:
            super().wait_for(mark, seconds, timed=timed)

    def look(self, mark: Mark) -> bool:
        """Whether the mark is reached, on the model clock by the model's time."""
        clock = self.clock
        if clock is None:
            return not mark.pending
        reached, node = clock.look(mark.position, charge=True)
        # A host function takes as long as it takes; the model waits for plans and copies only.
        while node is not None and not clock.calls_under_way:
            hold(node)
            reached, node = clock.look(mark.position, charge=False)
        if reached and mark.pending and not clock.calls_under_way:
            hold(mark)
        return reached and not mark.pending

    def give_up(self, mark: Mark, failure: Failure | None) -> None:
        """Settle the mark, for the model too."""
        with self.core.lock:
            if self.clock is not None:
                self.clock.kept(None, mark.position)
            super().give_up(mark, failure)

    def time_of(self, mark: Mark) -> float | None:
        """By the model's time line where there is one."""
        if self.clock is not None:
            return None if mark.pending else self.clock.time_of(mark)
        return super().time_of(mark)
