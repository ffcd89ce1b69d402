# SPDX-License-Identifier: Apache-2.0
"""What a replay leaves to its strategy: bytes, time, and the report.

`kvcore.replay.serving.replay.Replay` asks the scheduler what each step does and keeps the order of
a step.  A strategy has the caches and the clock.  There are five: `Resident` (real caches on this
machine), `OffloadedInFull` and `OffloadedSampled` (the full cache on the host of a modelled
device), `OnDevice` (the same without offload) and `Tiered` (that, with slower tiers for prompts).
`prepare` is called until it returns False; then a step calls, in this order::

    admitted, copy_block, serve           # then the scheduler's commit
    leaving, verify, left                 # of each request that has finished or is aborted

A strategy that sums steps (``sums_steps``) is called with a whole run of steps (`serve_run`)
between two events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from kvcore.replay.report.report import Mismatch, Outcome, Report
    from kvcore.replay.serving.runs import Run
    from kvcore.replay.serving.scheduler import Running, Scheduler, Step
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["Strategy", "Timings"]

R_co = TypeVar("R_co", bound="Report", covariant=True)


@dataclass(slots=True)
class Timings:
    """Nanoseconds on this machine.

    schedule_ns: scheduling, and computing slots; generate_ns: making bytes; scatter_ns: in the
    operator; verify_ns: checks; elapsed_ns: the whole run.
    """

    schedule_ns: int = 0
    generate_ns: int = 0
    scatter_ns: int = 0
    verify_ns: int = 0
    elapsed_ns: int = 0


class Strategy(ABC, Generic[R_co]):
    """One way to serve a trace; made for one replay.

    verify_samples: tokens that are read back when requests finish, over the whole trace.
    times:          where the time on this machine went; the replay adds scheduling and checks.
    verified, mismatches: samples compared so far, and rows of them that were wrong.
    sums_steps:     whether runs of steps are served together; set it to False before the first
                    step to serve them one by one.
    """

    sums_steps: bool = False

    verify_samples: int
    times: Timings
    verified: int
    mismatches: list[Mismatch]

    @abstractmethod
    def begin(self, requests: Sequence[TraceRequest]) -> Scheduler:
        """Take what the requests need, and return their scheduler.

        Raises ParamInvalidError for what cannot be served, DeviceOutOfMemoryError for caches that
        do not fit; before any work.
        """

    def prepare(self) -> bool:
        """Do a part of what comes before the first step; False when there is nothing left."""
        return False

    @property
    def now_ms(self) -> float | None:
        """The time by which requests arrive; None: all are there from the start."""
        return None

    def idle_until(self, ms: float) -> None:
        """Wait: no request is there before ``ms``.  Called only where `now_ms` is not None."""
        raise NotImplementedError

    @abstractmethod
    def admitted(self, running: Running) -> None:
        """A request begins, or goes on after a preemption."""

    @abstractmethod
    def copy_block(self, source: int, target: int) -> int:
        """Copy a block before it is written; returns the bytes."""

    @abstractmethod
    def serve(self, step: Step) -> Sequence[int] | None:
        """Write what the step writes.

        Returns the number of accepted tokens of each decoding request; None: one of each.
        """

    def steps_left(self, step: Step) -> int:
        """Steps like this one, at least 1, until a request of it is aborted."""
        raise NotImplementedError

    def serve_run(self, run: Run) -> int:
        """Serve a run of steps, each of which writes one token of each request.

        Returns how many were served, at least 1; the next one would begin after an arrival.
        Called only where steps are summed.
        """
        raise NotImplementedError

    def is_aborted(self, running: Running) -> bool:
        """Whether the request is aborted now, before its end."""
        return False

    def leaving(self, running: Running, *, finished: bool) -> None:
        """The request has finished, or else is aborted; it still holds its blocks."""

    @abstractmethod
    def verify(self, running: Running, count: int) -> None:
        """Read ``count`` tokens of a request that has finished and compare them."""

    def left(self, running: Running, *, finished: bool) -> None:
        """The request is about to give its blocks back."""

    def close(self) -> None:
        """Give memory and threads back.  Caches of this process need none."""

    @abstractmethod
    def report(self, outcome: Outcome) -> R_co:
        """The figures so far."""
