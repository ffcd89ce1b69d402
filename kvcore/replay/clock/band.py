# SPDX-License-Identifier: Apache-2.0
"""How far the time of a run's step moves when its assumed figures change.

Every assumed figure that the time of a step depends on is divided and multiplied by `FACTOR`, one
at a time, and the run's mean step is timed again (`MeanStep`).  Where ids are made by the
generator, their misses count as one more such figure.  The changes are taken as independent of one
another: the band is the root of the sum of their squares, upwards and downwards apart.  A figure on
which both sides of a comparison depend moves both of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcore.replay.clock.mean_step import MeanStep
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.deployments.figures import DeploymentFigure
from kvcore.replay.options import PREFILL_TOKENS_PER_S

if TYPE_CHECKING:
    from kvcore.replay.report.offloaded import OffloadReport

__all__ = ["FACTOR", "MISSES", "Band", "ratio_band", "step_band"]

#: By how much an assumed figure may be off, either way.
FACTOR = 1.5
#: Shares cannot exceed one.
SHARES = ("serve_overlap", "draft_misses")
#: What the band calls the rows that made ids miss.
MISSES = "misses of the made ids"
PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Band:
    """Relative changes of a figure: 0.1 is a tenth more.

    by:  (lowest, highest) change by assumed figure, the one that matters most first.
    low, high: of all of them together.
    """

    low: float
    high: float
    by: Mapping[str, tuple[float, float]]

    @property
    def decides(self) -> str | None:
        """The figure that moves it most; None: nothing is assumed, or nothing moves it."""
        found = next(iter(self.by), None)
        return found if found is not None and any(self.by[found]) else None

    def around(self, value: float) -> tuple[float, float]:
        """The bounds of a value."""
        return value * max(0.0, 1 + self.low), value * (1 + self.high)

    def to_dict(self) -> dict[str, Any]:
        """Of types that JSON has."""
        return {
            "factor": FACTOR, "low": self.low, "high": self.high, "decides": self.decides,
            "by": {key: list(both) for key, both in self.by.items()},
        }  # fmt: skip


def step_band(report: OffloadReport, context: float) -> Band:
    """The band of the time of a step of a run.

    context: tokens of a request on average while it decodes.
    """
    mean = MeanStep.of(report, context)
    before = mean.us(report.deployment)
    return _band({
        key: [change.mean(mean).us(change.deployment) / before - 1 for change in sides]
        for key, sides in _changes(report)
        if key != PREFILL
    })  # fmt: skip


def ratio_band(report: OffloadReport, other: OffloadReport, context: float) -> Band:
    """The band of the ratio of two runs' tokens a second: ``report`` over ``other``.

    Both are of the same deployment, so a figure that both depend on moves both, and the band has
    what it does to their ratio.  Where requests arrive by time the ratio is that of decoding alone.
    """
    runs = (report, other)
    means = [MeanStep.of(run, context) for run in runs]
    before = [mean.us(run.deployment) for mean, run in zip(means, runs, strict=True)]

    def moved(change: _Change) -> float:
        longer = []
        for run, mean, us in zip(runs, means, before, strict=True):
            decode, prefill = _shares(run)
            step = change.mean(mean).us(change.deployment) / us - 1
            longer.append(1 + decode * step + prefill * (1 / change.prefill - 1))
        return longer[1] / longer[0] - 1

    return _band({key: [moved(change) for change in sides] for key, sides in _changes(report)})


def _shares(run: OffloadReport) -> tuple[float, float]:
    """Shares of decoding and of prefill in the time that tokens a second are counted over."""
    totals = run.totals
    if run.options.arrivals == "time" or not totals.end_us:
        return 1.0, 0.0
    return totals.decode_us / totals.end_us, totals.prefill_us / totals.end_us


@dataclass(frozen=True, slots=True)
class _Change:
    """Another value of one figure: misses and prefill's rate by factors, others in the figures."""

    deployment: Deployment
    misses: float = 1.0
    prefill: float = 1.0

    def mean(self, mean: MeanStep) -> MeanStep:
        return mean if self.misses == 1 else mean.scaled_misses(self.misses)


def _changes(report: OffloadReport) -> Iterator[tuple[str, list[_Change]]]:
    """Each assumed figure by name, with the changes that divide and multiply it by `FACTOR`."""
    deployment, options = report.deployment, report.options
    factors = (1 / FACTOR, FACTOR)
    for key in deployment.assumed():
        value = deployment.number(key)
        if value:
            yield key, [_Change(_changed(deployment, key, value * by)) for by in factors]
    table = deployment.table
    if table is not None and table.basis == "assumed":
        yield (
            "step_table",
            [_Change(deployment.with_figures({}, table=table.scaled(by))) for by in factors],
        )
    ids = deployment.ids
    if options.ids is None and (ids is None or ids.basis == "assumed" or options.turnover):
        yield MISSES, [_Change(deployment, misses=by) for by in factors]
    given = deployment.figures.get("prefill")
    if options.prefill_tokens_per_s == PREFILL_TOKENS_PER_S or (
        given is not None
        and given.basis == "assumed"
        and options.prefill_tokens_per_s == given.number
    ):
        yield PREFILL, [_Change(deployment, prefill=by) for by in factors]


def _changed(deployment: Deployment, key: str, value: float) -> Deployment:
    figure = DeploymentFigure(min(value, 1.0) if key in SHARES else value, "assumed", "moved")
    return deployment.with_figures({key: figure})


def _band(moves: Mapping[str, list[float]]) -> Band:
    by = {key: (min(0.0, *changes), max(0.0, *changes)) for key, changes in moves.items()}
    ordered = sorted(by, key=lambda key: (-max(-by[key][0], by[key][1]), key))
    low, high = (math.sqrt(math.fsum(both[side] ** 2 for both in by.values())) for side in (0, 1))
    return Band(-low, high, {key: by[key] for key in ordered})
