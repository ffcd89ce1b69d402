# SPDX-License-Identifier: Apache-2.0
"""How far a run's step would move if the figures that nobody knows were others.

Every assumed figure that the time of a step depends on is divided and multiplied by `FACTOR`, one
at a time, and the run's mean step timed anew (`MeanStep`); made ids count as one more, by their
misses.  The moves are taken as independent of one another: the band is the root of the sum of
their squares, upwards and downwards apart.  What a comparison hangs on moves both of its sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcore.replay.clock.mean_step import MeanStep
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.deployments.figures import DeploymentFigure

if TYPE_CHECKING:
    from kvcore.replay.report.offloaded import OffloadReport

__all__ = ["FACTOR", "MISSES", "Band", "ratio_band", "step_band"]

#: By how much an assumed figure may be off, either way.
FACTOR = 1.5
#: Shares cannot exceed one.
SHARES = ("serve_overlap", "draft_misses")
#: What the band calls the rows that made ids miss.
MISSES = "misses of the made ids"


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
    """Of the time of a step of a run.

    context: tokens of a request on average while it decodes.
    """
    mean = MeanStep.of(report, context)
    before = mean.us(report.deployment)
    return _band({
        key: [then.us(deployment) / before - 1 for deployment, (then,) in sides]
        for key, sides in _changes(report.deployment, (mean,))
    })  # fmt: skip


def ratio_band(report: OffloadReport, other: OffloadReport, context: float) -> Band:
    """Of tokens a second of a run by those of another, of the same deployment.

    A figure that both depend on moves both: what is left is what it does to their ratio.  The part
    of either run's time that is no decoding stays.
    """
    runs = (report, other)
    means = tuple(MeanStep.of(run, context) for run in runs)
    before = [mean.us(run.deployment) for mean, run in zip(means, runs, strict=True)]
    shares = [_decode_share(run) for run in runs]

    def moved(deployment: Deployment, then: tuple[MeanStep, ...]) -> float:
        longer = [
            1 + share * (mean.us(deployment) / us - 1)
            for mean, us, share in zip(then, before, shares, strict=True)
        ]
        return longer[1] / longer[0] - 1

    return _band({
        key: [moved(deployment, then) for deployment, then in sides]
        for key, sides in _changes(report.deployment, means)
    })  # fmt: skip


def _decode_share(run: OffloadReport) -> float:
    totals = run.totals
    if run.options.arrivals == "time" or not totals.end_us:
        return 1.0
    return totals.decode_us / totals.end_us


def _changes(
    deployment: Deployment, means: tuple[MeanStep, ...]
) -> Iterator[tuple[str, list[tuple[Deployment, tuple[MeanStep, ...]]]]]:
    """Each figure that is assumed, with what it makes of the deployment or of the steps."""
    factors = (1 / FACTOR, FACTOR)
    for key in deployment.assumed():
        value = deployment.number(key)
        if not value:
            continue
        yield key, [(_changed(deployment, key, value * by), means) for by in factors]
    table = deployment.table
    if table is not None and table.basis == "assumed":
        yield (
            "step_table",
            [(deployment.with_figures({}, table=table.scaled(by)), means) for by in factors],
        )
    if deployment.ids is None or deployment.ids.basis == "assumed":
        yield MISSES, [(deployment, tuple(m.scaled_misses(by) for m in means)) for by in factors]


def _changed(deployment: Deployment, key: str, value: float) -> Deployment:
    figure = DeploymentFigure(min(value, 1.0) if key in SHARES else value, "assumed", "moved")
    return deployment.with_figures({key: figure})


def _band(moves: Mapping[str, list[float]]) -> Band:
    by = {key: (min(0.0, *changes), max(0.0, *changes)) for key, changes in moves.items()}
    ordered = sorted(by, key=lambda key: (-max(-by[key][0], by[key][1]), key))
    low, high = (math.sqrt(math.fsum(both[side] ** 2 for both in by.values())) for side in (0, 1))
    return Band(-low, high, {key: by[key] for key in ordered})
