# SPDX-License-Identifier: Apache-2.0
"""A replay that moves no rows itself: the time of its steps is computed by the clock's arithmetic.

Steps between two events are not served one by one (`Run`): their contexts, rows and prices are
arrays with one row a step, and one call of the clock times them.  The sums are the same to the bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.offload.decode.result import StepResult
from kvcore.replay.clock.step_clock import NOTHING, RunTimes
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.report.step_trace import StepTrace
from kvcore.replay.report.totals import summed
from kvcore.replay.serving.decoding import Decoding
from kvcore.replay.serving.offloaded import Offloaded, StepLoad
from kvcore.replay.serving.runs import Run
from kvcore.replay.serving.scheduler import Running, Step

__all__ = ["Accounted", "RunLoad"]

Clocked = tuple[
    NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64],
    NDArray[np.float64],
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunLoad:
    """Consecutive steps of the same requests, each of which writes one token a step.

    who:        the requests.
    contexts:   int64 [steps, batch] tokens of each request.
    ages:       int64 [steps, batch] steps of each request since it was admitted.
    compute_us: [steps] compute time of the whole step.
    """

    who: Sequence[Running]
    contexts: NDArray[np.int64]
    ages: NDArray[np.int64]
    compute_us: NDArray[np.float64]


class Accounted(Offloaded):
    """Every request, block and step is counted, and none of their bytes exist."""

    how: str

    def __init__(self, model: ModelProfile | Deployment, options: OffloadOptions) -> None:
        super().__init__(model, options)
        self._trace = StepTrace(options.max_trace_events)
        # Steps are served one by one where each is traced, and where drafts are made: how many of
        # these are accepted differs from step to step.
        self.sums_steps: bool = not options.max_trace_events and not options.drafts

    @property
    def now_us(self) -> float:
        """The time of the steps' arithmetic."""
        return self.clock.now

    def _wait(self, us: float) -> None:
        self.clock.advance(us)

    def copy_block(self, source: int, target: int) -> int:
        """Account for a block that is copied; returns the bytes."""
        return self.options.block_size * self.model.row_bytes * self.model.layers

    def _prefill(self, step: Step, count: int, us: float | None) -> None:
        self.clock.advance(us or 0.0)
        if us:
            self._trace.add("prefill", self.now_us, us, prompt_tokens=count)

    def _step_us(self, result: StepResult | None, us: float) -> float:
        return us

    def _traced(self, us: float, batch: int, misses: float) -> None:
        if self.options.max_trace_events:
            self._trace.add(
                "decode step", self.now_us, us, batch=batch,
                misses=round(misses), host_blocks=self._scheduler.pool.used,
            )  # fmt: skip

    # -- many steps -------------------------------------------------------------------------

    @abstractmethod
    def _move_run(self, load: RunLoad) -> NDArray[np.float64]:
        """[steps, groups, (hits, misses, recent)] rows of the batch in each step."""

    def _looks(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """[steps] missed rows of a group by which a step's slope is measured; 0: it is not."""
        return np.zeros(len(rows))

    def _seen(self, load: RunLoad, moved: NDArray[np.float64], slopes: NDArray[np.float64]) -> None:
        """Note steps that were served; slopes: microseconds a missed row, where it was measured."""

    def steps_left(self, step: Step) -> int:
        """Steps until a request that decodes is aborted, at least 1."""
        return min(
            (self._decoding[r.request.index].abort_at - r.written for r in step.decode), default=1
        )

    def serve_run(self, run: Run) -> int:
        """Sum up a run of steps; returns how many of them began before the next arrival."""
        step = run.step
        if not step.decode:
            self.serve(step)
            return 1
        who = step.decode
        states = [self._decoding[running.request.index] for running in who]
        steps = np.arange(run.count)[:, None]
        contexts = np.array([running.written for running in who], np.int64) + steps
        ages = np.array([state.age for state in states], np.int64) + steps
        compute = self._compute.of_steps(contexts)
        load = RunLoad(who, contexts, ages, compute.us)
        rows = self._move_run(load)
        moved = self._looks(rows)
        times, slopes = self._time(run, load, rows, moved)
        count = len(times)
        load = RunLoad(who, contexts[:count], ages[:count], load.compute_us[:count])
        self._compute.note(load.contexts)
        self._seen(load, moved[:count], slopes)
        self._add(run, load, rows[:count], times)
        for n in range(count):
            for part in compute.assumed:
                self.totals.assumed_compute_us += float(part[n])
        self._feel_run(step, states, times)
        for state in states:
            state.age += count
        return count

    def _time(
        self, run: Run, load: RunLoad, rows: NDArray[np.float64], moved: NDArray[np.float64]
    ) -> tuple[RunTimes, NDArray[np.float64]]:
        """The times of the steps, and the slopes of some, from steps with fewer and more misses."""
        looked = moved > 0
        entries = np.where(looked, 3, 1)
        of = np.repeat(np.arange(run.count), entries)
        ends = np.cumsum(entries) - 1  # the entry of each step itself, behind its variations
        looks = np.ones(len(of), np.uint8)
        looks[ends] = 0
        priced, by = rows[of], moved[looked]
        for place, sign in ((2, -1), (1, 1)):
            shift = np.stack([-sign * by, sign * by, 0 * by], axis=1)
            priced[ends[looked] - place] += shift[:, None]
        waits = np.full(len(of), NOTHING)
        if run.step.prefill:
            waits[ends - entries + 1] = self._prompts_us(run)
        times = self.clock.steps(
            *self._clocked_run(priced, load, of), waits=waits, looks=looks, until_ms=run.until_ms
        )
        at = ends[looked & (ends < len(times))]
        slopes = (times.us[at - 1] - times.us[at - 2]) / (2 * by[: len(at)])
        return times[looks[: len(times)] == 0], slopes

    def _prompts_us(self, run: Run) -> NDArray[np.float64]:
        """[steps] microseconds of each step's prompt tokens; 0: another device computes them."""
        if self.options.prefill_tokens_per_s is None:
            return np.zeros(run.count)
        parts = [(start, tokens) for _, start, tokens in run.step.prefill]
        return np.array([
            self._prompts.of((start + n * tokens, tokens) for start, tokens in parts)
            for n in range(run.count)
        ])  # fmt: skip

    def _clocked_run(
        self, rows: NDArray[np.float64], load: RunLoad, of: NDArray[np.int64]
    ) -> Clocked:
        """The arguments of `StepClock.steps`; of: the step of the run that each entry is of."""
        batch = len(load.who)
        written = np.full(len(of), float(batch))
        pieces = np.full(len(of), float(self._write_policy.pieces(batch, batch)))
        us = load.compute_us[of]
        if self._in_order:
            # Each query of a request is served its rows; a row that several want is read once.
            wanted = np.minimum(load.contexts + 1, self.model.topk).sum(axis=1)[of]
            rows[:, :, 0] = np.maximum(0.0, wanted[:, None] - rows[:, :, 1])
            rows[:, :, 2] = 0.0
        else:
            us = us + self._plan_us
        return rows, written, written, pieces, us / self.model.layers

    def _add(self, run: Run, load: RunLoad, rows: NDArray[np.float64], times: RunTimes) -> None:
        """Add the steps to the totals and the time line."""
        totals, batch, count = self.totals, len(load.who), len(times)
        if run.step.prefill:
            tokens = sum(part[2] for part in run.step.prefill)
            nbytes = count * tokens * self.model.row_bytes * self.model.layers
            if self.options.prefill_tokens_per_s is None:
                totals.received_bytes += nbytes
            else:
                totals.prefill_us = summed(totals.prefill_us, self._prompts_us(run)[:count])
                totals.prefill_bytes += nbytes if self.sends_to_host else 0
        wanted = np.minimum(load.contexts + 1, self.model.topk).sum(axis=1)
        totals.wanted = summed(totals.wanted, wanted.astype(np.float64) * self.model.layers)
        sizes = np.array([len(group) for group in self.groups], np.float64)
        moved = (rows * sizes[:, None]).sum(axis=1)
        totals.add_run(
            times, batch, moved, self.model.row_bytes, self.model.layers, load.compute_us,
            sends=self.sends_to_host,
        )  # fmt: skip
        last = StepLoad(load.who, load.contexts[-1], np.ones(batch, np.int64), (), 0.0)
        totals.peak_device_bytes = max(totals.peak_device_bytes, self._held(last))
        totals.peak_host_blocks = max(self._scheduler.pool.peak_used, int(run.used[count - 1]))
        asked = moved[:, 0] + moved[:, 1]
        rates = np.where(asked > 0, moved[:, 0] / np.where(asked > 0, asked, 1.0), 1.0)
        points = (times.now_us, times.us, rates, run.used[:count])
        for now, us, rate, used in zip(*(values.tolist() for values in points), strict=True):
            self.timeline.add(now, us, rate, batch, used)

    def _feel_run(self, step: Step, states: Sequence[Decoding], times: RunTimes) -> None:
        """Note which output tokens were produced by the ends of the steps."""
        now, felt = times.now_us.tolist(), self.latencies
        for running, start, count in step.prefill:
            if start + len(now) * count >= running.known:
                felt.first(self._decoding[running.request.index].progress, now[-1])
        written = [running.written - running.request.input_length for running in step.decode]
        felt.many([state.progress for state in states], now, written)

    def verify(self, running: Running, count: int) -> None:
        """Do nothing: the request has no bytes."""

    def _last_look(self) -> None:
        self.totals.end_us = self.clock.now

    def save_trace(self, path: str) -> int:
        """Write a span a step for Perfetto; returns how many did not fit."""
        self._trace.save(path, f"{self.model.name} on {self.profile.name}, {self.how}")
        return self._trace.dropped
