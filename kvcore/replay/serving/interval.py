# SPDX-License-Identifier: Apache-2.0
"""How sure a sampled replay is: 95% intervals of the hit rate and of the time of a step.

They describe the sampling alone, with the workload fixed: how far the figures of another sample of
as many requests would lie from these.  They are made by the delete-one jackknife: the figure is
computed again without each sampled request in turn, and the spread of the results gives its
variance.  The time of a step follows the misses by the slope that was measured during the run
(`Usage`).

Two more parts enter, each with its sign unknown.  Requests take the shares of a class of contexts
and ages, so the figure is computed again with classes twice as wide, and the half-width grows by
the change.  And the time of a step is `StepClock`'s arithmetic, which lies within `CLOCK` of the
engine's own clock, as tests show.  Where all requests and all layers are in the sample no row is
estimated, and only that last part is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.replay.serving.miss_table import (
    AGES,
    CLASSES,
    MissTable,
    nearest_of,
    shares_of,
)

__all__ = ["FEWEST", "Interval", "Usage", "interval_of", "quantile"]

#: With fewer sampled requests their spread is not known well enough for an interval.
FEWEST = 8
#: How far the arithmetic of a step is from the clock of launched operations, at most.
CLOCK = 0.01
NORMAL = 1.959963984540054  # 97.5% of a normal distribution


@dataclass(frozen=True, slots=True)
class Interval:
    """Half-widths of the 95% intervals; None: there are too few sampled requests.

    requests: requests in the sample; of: requests of the trace.
    """

    requests: int
    of: int
    hit_rate: float | None
    step_us: float | None


class Usage:
    """The rows that the replay took from each class, and the cost of a miss there.

    wanted: [classes] rows that requests of the class wanted, over the run.
    """

    def __init__(self) -> None:
        self.wanted: NDArray[np.float64] = np.zeros(CLASSES)
        self._slope = np.zeros(CLASSES)
        self._sloped = np.zeros(CLASSES)

    def add(
        self, places: NDArray[np.int64], wanted: NDArray[np.int64], slope: float | None
    ) -> None:
        """Add requests of steps; slope: microseconds a missed row, None where not measured."""
        np.add.at(self.wanted, places, wanted)
        if slope is not None:
            self.add_slope(places, wanted, slope)

    def add_slope(self, places: NDArray[np.int64], wanted: NDArray[np.int64], slope: float) -> None:
        """Add the microseconds of a missed row in a step where they were measured."""
        np.add.at(self._slope, places, slope * wanted)
        np.add.at(self._sloped, places, wanted)

    def cost(self) -> NDArray[np.float64]:
        """[classes] microseconds, over the run, by share of misses of the class."""
        total = float(self._sloped.sum())
        mean = float(self._slope.sum()) / total if total else 0.0
        with np.errstate(invalid="ignore", divide="ignore"):
            each = np.where(self._sloped > 0, self._slope / self._sloped, mean)
        return self.wanted * each


def interval_of(
    table: MissTable, usage: Usage, *, steps: int, step_us: float, requests: int, complete: bool
) -> Interval:
    """The interval of a run.

    step_us: mean of a step; requests: of the trace.
    complete: whether every group of the sampled requests was real.
    """
    n = table.samples
    if n == requests and complete:
        return Interval(n, requests, 0.0, CLOCK * step_us)
    if n < FEWEST or not steps:
        return Interval(n, requests, None, None)
    figures = _Figures(table, usage, steps)
    each = np.array([figures.of(totals) for totals in table.without_each()])
    variance = (n - 1) / n * ((each - each.mean(axis=0)) ** 2).sum(axis=0)
    if complete:
        variance *= 1 - n / requests
    half = quantile(n - 1) * np.sqrt(variance)
    half += np.abs(figures.of(_widened(table.totals)) - figures.of(table.totals))
    return Interval(n, requests, float(half[0]), float(half[1]) + CLOCK * step_us)


class _Figures:
    """Hit rate, and microseconds a step up to a constant, of a table's totals."""

    def __init__(self, table: MissTable, usage: Usage, steps: int) -> None:
        self._used = np.flatnonzero(usage.wanted)
        self._wanted = usage.wanted[self._used]
        self._cost = usage.cost()[self._used] / steps
        self._nearest = table.nearest[self._used]

    def of(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """[hit rate, us]."""
        nearest = self._nearest
        gone = totals[nearest, 0] <= 0
        if gone.any():
            nearest = nearest.copy()
            nearest[gone] = nearest_of(self._used[gone], np.flatnonzero(totals[:, 0] > 0))
        shares = shares_of(totals[nearest])
        hits, misses = self._wanted @ shares[:, 0], self._wanted @ shares[:, 1]
        asked = hits + misses
        return np.array([hits / asked if asked else 1.0, self._cost @ shares[:, 1]])


def _widened(totals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Totals of classes twice as wide in context and in age."""
    by = totals.reshape(-1, 2, AGES // 2, 2, 4)
    return np.broadcast_to(by.sum(axis=(1, 3), keepdims=True), by.shape).reshape(totals.shape)


def quantile(freedom: int) -> float:
    """97.5% of Student's t (Cornish and Fisher's expansion; within 0.2% from 7 degrees on)."""
    z, v = NORMAL, float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / v ** (k + 1) for k, term in enumerate(terms))
