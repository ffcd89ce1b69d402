# SPDX-License-Identifier: Apache-2.0
"""Fit a deployment's free figures to measured rows, and say what the rows do not determine.

Least squares over the relative errors of the rows marked ``fit``, by Gauss and Newton's steps from
the deployment's own values; figures that are positive move by factors, shares between 0 and 1.  Of
figures that the rows do not tell apart the combination that they do determine is fitted, by the
smallest change from where the fit began.  A row's time is the replay's (`RowRuns`); how it changes
with a figure of time comes from the run's mean step, with a parameter of ids from another run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.replay.clock.mean_step import MeanStep
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.deployments.figures import DeploymentFigure
from kvcore.replay.prediction.measurements import MeasuredRow, Measurements
from kvcore.replay.prediction.rows import RowRuns, check_rows
from kvcore.replay.report.offloaded import OffloadReport
from kvcore.replay.traces.made_ids import MadeIds

__all__ = ["Calibration", "Parameter", "calibrated", "refitted"]

MOST_STEPS = 12
SETTLED = 1e-5
#: Share of the largest singular value below which a combination is not determined.
RANK = 1e-3
#: A figure that is 0 begins here, so that it can move by factors.
SMALL = 1e-6
#: Part of a parameter in what is not determined, from which on it is named.
LOOSE = 0.01
LONGEST = 1.0  # of a step, in the fit's own units
NUDGE = 0.02
#: A step of the fit that lowers the squares by less, relatively, is the last.
LEAST_GAIN = 1e-3


@dataclass(frozen=True, slots=True)
class Parameter:
    """A free figure; mode: whose it is, None: everybody's."""

    key: str
    mode: str | None

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1."""
        return self.key in ("ids.overlap", "ids.reuse", "serve_overlap", "draft_misses")

    def __str__(self) -> str:
        return self.key if self.mode is None else f"{self.key} ({self.mode})"

    def to_unit(self, value: float) -> float:
        """The value on the scale that the fit moves on."""
        if self.is_share:
            value = min(max(value, SMALL), 1 - SMALL)
            return math.log(value / (1 - value))
        if self.key == "ids.distance":
            return math.log(max(value - 1, SMALL))
        return math.log(max(value, SMALL))

    def from_unit(self, unit: float) -> float:
        """The other way round."""
        unit = min(max(unit, -30.0), 30.0)
        if self.is_share:
            return 1 / (1 + math.exp(-unit))
        return math.exp(unit) + (self.key == "ids.distance")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a fit found.

    values:     of each parameter; start: where it began.
    rows:       that it was fitted to; residuals: (model - measured) / measured of each.
    rank:       how many combinations of the parameters the rows determine.
    loose:      parameters that no row determines by itself, with their parts in what is loose.
    table_rows: rows that are points of the table of steps.
    """

    measurements: Measurements
    deployment: Deployment
    parameters: tuple[Parameter, ...]
    values: tuple[float, ...]
    start: tuple[float, ...]
    rows: tuple[MeasuredRow, ...]
    residuals: tuple[float, ...]
    rank: int
    loose: tuple[str, ...]
    table_rows: tuple[MeasuredRow, ...]

    def of_mode(self, mode: str) -> Deployment:
        """The fitted deployment of a mode."""
        return _with(self.measurements, self.deployment, mode, self.parameters, self.values)


def parameters_of(measurements: Measurements) -> tuple[Parameter, ...]:
    """The free figures, those of each mode by themselves."""
    modes = dict.fromkeys(row.mode for row in measurements.of("fit"))
    found: list[Parameter] = []
    for key in measurements.free:
        if key in measurements.per_mode:
            found += [Parameter(key, mode) for mode in modes]
        else:
            found.append(Parameter(key, None))
    return tuple(found)


def start_of(measurements: Measurements, parameter: Parameter) -> float:
    """What the deployment says of a parameter before it is fitted."""
    own = measurements.deployment_of(parameter.mode or measurements.mode)
    name = parameter.key.removeprefix("ids.")
    if name == parameter.key:
        return own.number(name)
    assert own.ids is not None
    return float(own.ids.to_dict()[name])


def _with(
    measurements: Measurements,
    base: Deployment,
    mode: str,
    parameters: Sequence[Parameter],
    values: Sequence[float],
    rows: int = 1,
    residuals: Sequence[float] = (),
) -> Deployment:
    """The deployment of a mode with these values."""
    figures: dict[str, DeploymentFigure] = {}
    ids: dict[str, float] = {}
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.mode not in (None, mode):
            continue
        name = parameter.key.removeprefix("ids.")
        if name != parameter.key:
            ids[name] = value
            continue
        figures[name] = DeploymentFigure(
            value, "fitted", measurements.name, rows, tuple(float(x) for x in residuals)
        )
    own = measurements.deployment_of(mode, base)
    made = None
    if ids:
        assert own.ids is not None
        made = MadeIds(
            own.ids.kind, {**own.ids.values, **ids}, "fitted", f"{measurements.name}, {rows} rows"
        )
    return own.with_figures(figures, ids=made)


def calibrated(measurements: Measurements, runs: RowRuns | None = None) -> Calibration:
    """Fit what is free to the rows marked ``fit``.

    runs: where rows are served; kept for the rows that are predicted.
    Raises ParamInvalidError when the rows determine nothing of what is free, and where nothing is
    free.
    """
    if runs is None:
        # The slope of a parameter of ids would be drowned by what two draws differ in.
        runs = RowRuns(alike=any(key.startswith("ids.") for key in measurements.free))
    table = measurements.table()
    base = measurements.deployment if table is None else (
        measurements.deployment.with_figures({}, table=table)
    )  # fmt: skip
    rows = measurements.of("fit")
    parameters = parameters_of(measurements)
    if not parameters and table is None:
        fail("free", "figures to fit, or rows of a table", "neither")
    if parameters and not rows:
        fail("rows", f"rows to fit {', '.join(map(str, parameters))} to", "none with use = 'fit'")
    check_rows(measurements)
    start = [start_of(measurements, parameter) for parameter in parameters]
    if not parameters:
        return Calibration(
            measurements, base, (), (), (), (), (), 0, (), tuple(measurements.of("table"))
        )
    fit = _Fit(measurements, base, rows, parameters, runs)
    units = np.array([p.to_unit(v) for p, v in zip(parameters, start, strict=True)])
    units, errors, slopes = fit.solved(units)
    rank, loose = _determined(slopes, parameters)
    if rank == 0:
        names = ", ".join(map(str, parameters))
        fail("rows", f"rows whose time depends on {names}", "rows that determine none of them")
    values = fit.values(units)
    residuals = tuple(float(error) for error in errors)
    deployment = _with(
        measurements, base, measurements.mode, parameters, values, len(rows), residuals
    )
    return Calibration(
        measurements, deployment, parameters, values, tuple(start), tuple(rows), residuals, rank,
        loose, tuple(measurements.of("table")),
    )  # fmt: skip


class _Fit:
    """Errors of the rows, and their slopes, at values of the parameters."""

    def __init__(
        self,
        measurements: Measurements,
        base: Deployment,
        rows: Sequence[MeasuredRow],
        parameters: Sequence[Parameter],
        runs: RowRuns,
    ) -> None:
        self._of, self._base, self._rows = measurements, base, rows
        self._parameters, self._runs = parameters, runs

    def values(self, units: NDArray[np.float64]) -> tuple[float, ...]:
        """The parameters' values."""
        return tuple(
            p.from_unit(float(unit)) for p, unit in zip(self._parameters, units, strict=True)
        )

    def _deployment(self, row: MeasuredRow, units: NDArray[np.float64]) -> Deployment:
        return _with(self._of, self._base, row.mode, self._parameters, self.values(units))

    def _runs_at(self, units: NDArray[np.float64]) -> list[OffloadReport]:
        return [self._runs.run(row, self._deployment(row, units)) for row in self._rows]

    def _errors(self, reports: Sequence[OffloadReport]) -> NDArray[np.float64]:
        return np.array([
            (report.step_us or 0.0) / (row.ms * 1e3) - 1
            for row, report in zip(self._rows, reports, strict=True)
        ])  # fmt: skip

    def solved(
        self, units: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """(units, errors there, slopes [rows, parameters] there)."""
        reports = self._runs_at(units)
        errors = self._errors(reports)
        for _ in range(MOST_STEPS):
            slopes = self._slopes(units, reports, errors)
            step = _bounded(-_solve(slopes, errors))
            gained = 0.0
            while float(np.abs(step).max()) > SETTLED:
                tried = units + step
                found = self._runs_at(tried)
                now = self._errors(found)
                gained = 1 - float(now @ now) / float(errors @ errors)
                if gained > 0:
                    units, reports, errors = tried, found, now
                    break
                step = step / 4
            if gained < LEAST_GAIN:
                break
        return units, errors, self._slopes(units, reports, errors)

    def _slopes(
        self,
        units: NDArray[np.float64],
        reports: Sequence[OffloadReport],
        errors: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        slopes = np.zeros((len(self._rows), len(self._parameters)))
        for column, parameter in enumerate(self._parameters):
            moved = units.copy()
            moved[column] += NUDGE
            if parameter.key.startswith("ids."):
                slopes[:, column] = (self._errors(self._runs_at(moved)) - errors) / NUDGE
                continue
            for line, (row, report) in enumerate(zip(self._rows, reports, strict=True)):
                mean = self._runs.mean(row, report)
                before = mean.us(self._deployment(row, units))
                after = mean.us(self._deployment(row, moved))
                slopes[line, column] = (after / before - 1) * (1 + errors[line]) / NUDGE
        return slopes


def _solve(slopes: NDArray[np.float64], errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """The shortest step of those that come nearest to the errors."""
    return np.asarray(np.linalg.lstsq(slopes, errors, rcond=RANK)[0], np.float64)


def _bounded(step: NDArray[np.float64]) -> NDArray[np.float64]:
    """The step, no longer than one may be."""
    by = min(1.0, LONGEST / max(float(np.abs(step).max()), 1e-12))
    return np.asarray(step * by, np.float64)


def _determined(
    slopes: NDArray[np.float64], parameters: Sequence[Parameter]
) -> tuple[int, tuple[str, ...]]:
    """How many combinations the rows determine, and which parameters are loose."""
    _, sizes, directions = np.linalg.svd(slopes)
    largest = float(sizes[0]) if len(sizes) else 0.0
    if largest < 1e-9:
        return 0, tuple(map(str, parameters))
    rank = int((sizes > RANK * largest).sum())
    loose = (np.abs(directions[rank:]) > LOOSE).any(axis=0)
    return rank, tuple(str(p) for p, free in zip(parameters, loose, strict=True) if free)


def refitted(
    parameters: Sequence[Parameter],
    means: Sequence[tuple[MeasuredRow, MeanStep, float]],
    deployments: Mapping[str, Deployment],
) -> dict[str, Deployment]:
    """The deployments by mode, their free figures of time fitted anew to mean steps.

    means: (row, its mean step, the step's microseconds as the unchanged figures had it) of the
           rows that were fitted.
    deployments: by mode, with some figure changed.
    Parameters of ids stay as they are.  For sensitivities, where nothing is served again.
    """
    free = [p for p in parameters if not p.key.startswith("ids.")]
    if not free or not means:
        return dict(deployments)
    first = next(iter(deployments.values()))
    units = np.array([
        p.to_unit(deployments.get(p.mode or "", first).number(p.key))
        for p in free
    ])  # fmt: skip

    def at(units: NDArray[np.float64]) -> dict[str, Deployment]:
        found = {}
        for mode, deployment in deployments.items():
            values = {
                p.key: p.from_unit(float(unit))
                for p, unit in zip(free, units, strict=True)
                if p.mode in (None, mode)
            }
            found[mode] = deployment.replace(basis="assumed", source="refitted", **values)
        return found

    def errors(units: NDArray[np.float64]) -> NDArray[np.float64]:
        now = at(units)
        return np.array([mean.us(now[row.mode]) / us - 1 for row, mean, us in means])

    best = errors(units)
    for _ in range(MOST_STEPS):
        slopes = np.empty((len(means), len(free)))
        for column in range(len(free)):
            moved = units.copy()
            moved[column] += NUDGE
            slopes[:, column] = (errors(moved) - best) / NUDGE
        step = _bounded(-_solve(slopes, best))
        now = errors(units + step)
        if float(now @ now) >= float(best @ best) * (1 - 1e-9):
            break
        units, best = units + step, now
    return at(units)
