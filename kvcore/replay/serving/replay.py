# SPDX-License-Identifier: Apache-2.0
"""Serve a request trace: one loop for all strategies.

In each step the scheduler decides which requests are admitted, prefilled, decoded and preempted,
over a pool of blocks.  The strategy writes the bytes, or counts them, and returns the number of
accepted tokens.  When a request is finished, and before its blocks are given back, rows of it are
compared with their expected bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Generic, TypeVar, Unpack, cast, overload

from kvcore.errors import fail
from kvcore.replay.models.profile import ModelShape
from kvcore.replay.options import OffloadOptions
from kvcore.replay.report.offloaded import OffloadReport
from kvcore.replay.report.report import Outcome, Report
from kvcore.replay.serving.accounted import Accounted
from kvcore.replay.serving.in_full import OffloadedInFull
from kvcore.replay.serving.on_device import OnDevice
from kvcore.replay.serving.resident import Resident, ResidentOptions
from kvcore.replay.serving.runs import run_of
from kvcore.replay.serving.sampled import OffloadedSampled
from kvcore.replay.serving.strategy import Strategy
from kvcore.replay.serving.tiered import Tiered
from kvcore.replay.traces.reader import TraceRequest, check_requests

if TYPE_CHECKING:
    from kvcore.replay.deployments.deployment import Deployment
    from kvcore.replay.models.profile import ModelProfile
    from kvcore.replay.report.resident import ReplayReport
    from kvcore.replay.serving.scheduler import Running, Scheduler

__all__ = ["OffloadReplay", "Replay"]

R = TypeVar("R", bound=Report)


class Replay(Generic[R]):
    """A trace, a scheduler, and a strategy that serves what is scheduled.

    requests: served in this order.
    serving:  a `Strategy`; or a `ModelShape`, with the options of `Resident`: real caches on this
              machine.
    Raises ParamInvalidError for a trace that cannot be served; DeviceOutOfMemoryError for
    caches that do not fit.
    """

    @overload
    def __init__(
        self: Replay[ReplayReport],
        requests: Sequence[TraceRequest],
        serving: ModelShape,
        **options: Unpack[ResidentOptions],
    ) -> None: ...
    @overload
    def __init__(self, requests: Sequence[TraceRequest], serving: Strategy[R]) -> None: ...

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        serving: ModelShape | Strategy[R],
        **options: Unpack[ResidentOptions],
    ) -> None:
        requests = check_requests(requests)
        if not isinstance(serving, Strategy):
            serving = cast("Strategy[R]", Resident(serving, **options))
        elif options:
            fail(next(iter(options)), "no option together with a strategy", "one")
        self.serving = serving
        self._num_requests = len(requests)
        self._total_tokens = sum(request.total_tokens for request in requests)
        self._finished = self._aborted = 0
        self._copied_bytes = 0
        self.scheduler: Scheduler = serving.begin(requests)

    # -- progress -------------------------------------------------------------------------

    @property
    def seen_tokens(self) -> int:
        """Tokens of the trace that are, or were, in the cache, of `total_tokens`."""
        return self.scheduler.counters.seen_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of the trace: prompts and outputs."""
        return self._total_tokens

    @property
    def finished_requests(self) -> int:
        """Requests that have left, finished or aborted, of `total_requests`."""
        return self._finished + self._aborted

    @property
    def total_requests(self) -> int:
        """Requests of the trace."""
        return self._num_requests

    # -- a run ----------------------------------------------------------------------------

    def run(
        self,
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[Replay[R]], None] | None = None,
    ) -> R:
        """Step until all requests have left, or ``stop()`` is true between two steps.

        progress: called after each step.
        """
        begin = perf_counter_ns()
        interrupted = False
        try:
            while self.step():
                if progress is not None:
                    progress(self)
                if stop():
                    interrupted = self.finished_requests < self._num_requests
                    break
        finally:
            self.close()
            self.serving.times.elapsed_ns += perf_counter_ns() - begin
        return self.report(interrupted=interrupted)

    def close(self) -> None:
        """Give back the memory and the threads of a modelled device."""
        self.serving.close()

    def report(self, *, interrupted: bool = False) -> R:
        """The figures so far."""
        return self.serving.report(
            Outcome(
                total_requests=self._num_requests,
                finished_requests=self._finished,
                aborted_requests=self._aborted,
                total_tokens=self._total_tokens,
                counters=self.scheduler.counters,
                copied_bytes=self._copied_bytes,
                verified_samples=self.serving.verified,
                mismatches=tuple(self.serving.mismatches),
                interrupted=interrupted,
            )
        )

    # -- a step ---------------------------------------------------------------------------

    def step(self) -> bool:
        """Prepare, or plan, serve and check one step; False when there is nothing left to do.

        Where the strategy sums steps, a whole run of steps like the planned one is served at once.
        """
        serving, scheduler, times = self.serving, self.scheduler, self.serving.times
        if serving.prepare():
            return True
        begin = perf_counter_ns()
        now = serving.now_ms
        step = scheduler.plan(now)
        if step is None:
            return False
        if now is not None and not scheduler.running and not step.preempted:
            serving.idle_until(scheduler.next_arrival_ms or now)
            return True
        for running in step.admitted:
            serving.admitted(running)
        for source, target in step.copies:
            self._copied_bytes += serving.copy_block(source, target)
        if serving.sums_steps:
            run = run_of(scheduler, step, serving.steps_left(step), now)
            times.schedule_ns += perf_counter_ns() - begin
            count = serving.serve_run(run)
            begin = perf_counter_ns()
            finished = scheduler.commit_run(run, count)
        else:
            times.schedule_ns += perf_counter_ns() - begin
            accepted = serving.serve(step)
            begin = perf_counter_ns()
            finished = scheduler.commit(step, accepted)
        times.schedule_ns += perf_counter_ns() - begin
        for running in finished:
            self._leave(running, finished=True)
        for running in [r for r in scheduler.running if serving.is_aborted(r)]:
            self._leave(running, finished=False)
        return True

    def _leave(self, running: Running, *, finished: bool) -> None:
        serving = self.serving
        serving.leaving(running, finished=finished)
        if finished:
            begin = perf_counter_ns()
            # The samples are shared out evenly over the requests, in the order they finish.
            share, before = (
                serving.verify_samples * done // self._num_requests
                for done in (self._finished + 1, self._finished)
            )
            if share > before:
                serving.verify(running, share - before)
            serving.times.verify_ns += perf_counter_ns() - begin
        serving.left(running, finished=finished)
        self.scheduler.retire(running)
        if finished:
            self._finished += 1
        else:
            self._aborted += 1


#: The strategies of offload, by the fidelity that asks for them.
OFFLOADED: dict[str, type[Accounted] | type[OffloadedInFull]] = {
    "full": OffloadedInFull,
    "sampled": OffloadedSampled,
}


class OffloadReplay(Replay[OffloadReport]):
    """A replay with the full cache on the host, as ``options`` say: `Replay` with its strategy.

    With ``policy="none"`` the full cache is on the device: the baseline.  With ``tiers`` too, and
    the prefixes of prompts are kept in slower tiers beside.

    model: one with a top-k, or a deployment, from which all times come then; any with
           ``policy="none"``.
    """

    serving: OffloadedInFull | Accounted

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        model: ModelProfile | Deployment,
        options: OffloadOptions,
    ) -> None:
        if not isinstance(options, OffloadOptions):
            fail("options", "OffloadOptions", type(options).__name__)
        # An unknown fidelity is refused by OffloadedSampled.
        strategy: type[Accounted] | type[OffloadedInFull] = OFFLOADED.get(
            str(options.fidelity), OffloadedSampled
        )
        if options.tiers is not None:
            strategy = Tiered
        elif options.policy == "none":
            strategy = OnDevice
        super().__init__(requests, strategy(model, options))

    @classmethod
    def served_by(
        cls, requests: Sequence[TraceRequest], serving: OffloadedInFull | OffloadedSampled
    ) -> OffloadReplay:
        """A replay by a strategy that is there already."""
        replay = cls.__new__(cls)
        Replay.__init__(replay, requests, serving)
        return replay

    def save_trace(self, path: str) -> int:
        """Write the spans for Perfetto; returns how many did not fit ``max_trace_events``.

        ``full``: every operation of every stream.  ``sampled``: a span a step.
        """
        return self.serving.save_trace(path)
