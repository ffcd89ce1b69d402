# SPDX-License-Identifier: Apache-2.0
"""The mean step of a run, timed again with other figures of its deployment.

Which rows a run moves does not depend on how long that takes: batch, contexts, hits and misses stay
the same when a figure of time changes.  So one step with a run's means shows how far its time
moves, without serving anything again.  It is used for ratios: the run's own time is multiplied by
the time of the mean step with the other figures, divided by its time with the run's figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvcore.offload.decode.write_policy import make_write_policy
from kvcore.replay.clock.in_order import InOrderClock
from kvcore.replay.clock.step_clock import StepClock
from kvcore.replay.deployments.deployment import Deployment

if TYPE_CHECKING:
    from kvcore.replay.report.offloaded import OffloadReport

__all__ = ["MeanStep", "mean_compute_us"]

#: Steps until the next one takes as long as the one before.
SETTLED = 4


def mean_compute_us(deployment: Deployment, batch: float, context: float, drafts: int) -> float:
    """Microseconds that a step computes for so many requests of so many tokens each."""
    model = deployment.model
    if deployment.table is not None:
        scale = (1 + drafts) / (1 + deployment.number("step_drafts"))
        return deployment.table.at(batch * scale, context)
    return model.step_fixed_us() + batch * model.request_us(round(context), drafts)


@dataclass(frozen=True, slots=True)
class MeanStep:
    """A step with the means of a run.

    batch, context: requests, and tokens of each.
    tokens: tokens that all requests together write in the step, drafts included.
    hits, misses, recent: rows of a layer, over the batch.
    pieces: number of copies in which the new rows go to the host.
    """

    batch: float
    context: float
    drafts: int
    tokens: float
    hits: float
    misses: float
    recent: float
    pieces: float
    offload: bool

    @classmethod
    def of(cls, report: OffloadReport, context: float) -> MeanStep:
        """The mean step of a run whose requests had ``context`` tokens on average in decode."""
        totals, options = report.totals, report.options
        steps = max(1, totals.steps)
        layers = report.model.layers * steps
        batch, tokens = totals.request_steps / steps, totals.written / steps
        pieces = make_write_policy(options.write_policy).pieces(round(tokens), max(1, round(batch)))
        return cls(
            batch, context, options.drafts, tokens, totals.hits / layers, totals.misses / layers,
            totals.recent / layers, pieces, options.policy != "none",
        )  # fmt: skip

    def wanted(self, deployment: Deployment) -> float:
        """Rows of a layer that the queries of all requests ask for, repeats counted."""
        return self.tokens * min(self.context, deployment.model.topk)

    def with_hit_rate(self, deployment: Deployment, points: float) -> MeanStep:
        """The same step when ``points`` (0.02: two points) more of the queries' rows are held."""
        moved = min(self.misses, points * self.wanted(deployment))
        return replace(self, hits=self.hits + moved, misses=self.misses - moved)

    def scaled_misses(self, factor: float) -> MeanStep:
        """The same step with so many times the misses, as far as there are rows."""
        moved = min(self.hits, self.misses * (factor - 1))
        return replace(self, hits=self.hits - moved, misses=self.misses + moved)

    def compute_us(self, deployment: Deployment) -> float:
        """Microseconds of the step's computation, by a deployment's figures."""
        return mean_compute_us(deployment, self.batch, self.context, self.drafts)

    def us(self, deployment: Deployment) -> float:
        """Microseconds of the whole step, by a deployment's figures."""
        model, compute = deployment.model, self.compute_us(deployment)
        lanes = sum(n > 0 for n in model.shape.row_bytes)
        held = (self.hits, self.misses, self.recent)
        if deployment.serve == "in order":
            if self.offload:
                held = (max(0.0, self.wanted(deployment) - self.misses), self.misses, 0.0)
            rows = np.tile(np.array(held), (len(model.groups), 1))
            clock = InOrderClock(deployment, lanes=lanes)
            return clock.step(rows, self.tokens, 0, 0, compute / model.layers).us
        # A model that attends to everything has no groups: all its layers are alike.
        groups = model.groups or (tuple(range(model.layers)),)
        rows = np.tile(np.array(held), (len(groups), 1))
        plan = deployment.own("plan_group") * len(model.groups) if self.offload else 0.0
        ahead = StepClock(model, deployment.device, groups, lanes=lanes)
        sent, pieces = (self.tokens, self.pieces) if self.offload else (0.0, 0.0)
        us = 0.0
        for _ in range(SETTLED):
            us = ahead.step(rows, self.tokens, sent, pieces, (compute + plan) / model.layers).us
        return us
