# SPDX-License-Identifier: Apache-2.0
"""Offload sampled: some requests and layers are real, the others are estimated from them.

A seeded sample of requests and layers is served by the decode engine before the replay, without a
clock (`Rehearsal`).  In the replay all requests take their shares of misses from the sample
(`MissTable`), the clock computes the time of each step, and `interval_of` gives the intervals of
the figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore.offload.decode.result import StepResult
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.serving.accounted import Accounted, RunLoad
from kvcore.replay.serving.decoding import Decoding
from kvcore.replay.serving.interval import Interval, Usage, interval_of
from kvcore.replay.serving.miss_table import classes_of
from kvcore.replay.serving.offloaded import StepLoad
from kvcore.replay.serving.real_decode import RealDecode
from kvcore.replay.serving.rehearsal import Elsewhere, Rehearsal
from kvcore.replay.serving.scheduler import Running
from kvcore.replay.traces.reader import TraceRequest

__all__ = ["OffloadedSampled"]

#: The cost of a miss is measured in one step of so many, with its misses moved by this share.
LOOK_EVERY = 8
MOVED = 0.05


class OffloadedSampled(Accounted):
    """The sample is served first; the replay itself moves no rows.

    rehearsal: one that another replay has served to its end, of the same requests and options
               except for arrivals; None: this replay serves the sample.
    part, elsewhere: arguments of `Rehearsal`.
    """

    how = "sampled"

    def __init__(
        self,
        model: ModelProfile | Deployment,
        options: OffloadOptions,
        *,
        rehearsal: Rehearsal | None = None,
        part: tuple[int, int] = (0, 1),
        elsewhere: Elsewhere | None = None,
    ) -> None:
        super().__init__(model, options)
        self._usage = Usage()
        self._served, self._part, self._elsewhere = rehearsal, part, elsewhere

    def _take(self, requests: Sequence[TraceRequest]) -> None:
        self._requests = len(requests)
        self.rehearsal: Rehearsal = self._served or Rehearsal(
            self.model, self.options, self.profile, self.pool_entries, requests,
            self.ids, part=self._part, elsewhere=self._elsewhere,
        )  # fmt: skip
        self.real: RealDecode = self.rehearsal.real
        self.totals.real_rows = self.rehearsal.rows

    def prepare(self) -> bool:
        """Serve a step of the sample."""
        if not self.rehearsal.step():
            return False
        self.totals.real_rows = self.rehearsal.rows
        return True

    # -- a step -----------------------------------------------------------------------------

    def _move(
        self, load: StepLoad, states: Sequence[Decoding]
    ) -> tuple[NDArray[np.float64], StepResult | None]:
        ages = np.array([state.age for state in states], np.int64)
        wanted = load.tokens * np.minimum(load.contexts + load.tokens, self.model.topk)
        places = classes_of(load.contexts, ages)
        table = self.rehearsal.table
        shares = table.shares(places, [running.request.index for running in load.who])
        rows = np.zeros((len(self.model.groups), 3))
        rows += (shares * wanted[:, None]).sum(axis=0)
        self._usage.add(places, wanted, self._slope(load, rows))
        return rows, None

    def _move_run(self, load: RunLoad) -> NDArray[np.float64]:
        wanted = np.minimum(load.contexts + 1, self.model.topk)
        places = classes_of(load.contexts, load.ages)
        who = [running.request.index for running in load.who]
        shares = self.rehearsal.table.shares_of_steps(places, who)
        rows = (shares * wanted[:, :, None]).sum(axis=1)
        return np.repeat(rows[:, None], len(self.model.groups), axis=1)

    def _looks(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        due = (self.totals.steps + np.arange(len(rows))) % LOOK_EVERY == 0
        return np.where(due, np.minimum(MOVED * rows[:, 0, 1], rows[:, 0, 0]), 0.0)

    def _seen(self, load: RunLoad, moved: NDArray[np.float64], slopes: NDArray[np.float64]) -> None:
        wanted = np.minimum(load.contexts + 1, self.model.topk)
        places = classes_of(load.contexts, load.ages)
        self._usage.add(places, wanted, None)
        for n, slope in zip(np.flatnonzero(moved > 0), slopes.tolist(), strict=True):
            self._usage.add_slope(places[n], wanted[n], slope)

    def _slope(self, load: StepLoad, rows: NDArray[np.float64]) -> float | None:
        """Microseconds of this step for each row that a group misses, where that is measured."""
        if self.totals.steps % LOOK_EVERY or not rows[0, 1]:
            return None
        moved = min(MOVED * rows[0, 1], rows[0, 0])
        if moved <= 0:
            return None
        us = [
            self.clock.peek(*self._clocked(rows + np.array((-by, by, 0.0)), load)).us
            for by in (-moved, moved)
        ]
        slope: float = (us[1] - us[0]) / (2 * moved)
        return slope

    @property
    def interval(self) -> Interval:
        """The 95% intervals of the figures."""
        return interval_of(
            self.rehearsal.table,
            self._usage,
            steps=self.totals.steps,
            step_us=self.totals.decode_us / max(1, self.totals.steps),
            requests=self._requests,
            complete=self.options.sample_layers >= len(self.model.groups),
        )

    def verify(self, running: Running, count: int) -> None:
        """Do nothing: the sample is verified when it is served."""

    def _last_look(self) -> None:
        super()._last_look()
        self.rehearsal.close()
