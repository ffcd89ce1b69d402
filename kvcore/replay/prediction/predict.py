# SPDX-License-Identifier: Apache-2.0
"""Measured rows beside what the replay says of them, and what that is worth.

Rows that figures were fitted to and rows that are predicted are kept apart.  Beside each prediction
stand two models that know next to nothing (`nulls`), how far it moves with every assumed figure,
the fit taken anew each time, and how far it moves if two points more of the rows are held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.replay.clock.mean_step import MeanStep
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.deployments.figures import DeploymentFigure
from kvcore.replay.prediction.calibration import Calibration, parameters_of, refitted
from kvcore.replay.prediction.measurements import MeasuredRow, Measurements
from kvcore.replay.prediction.rows import RowRuns, check_rows, row_command
from kvcore.replay.report.offloaded import OffloadReport

__all__ = ["FACTOR", "Predicted", "Prediction", "predict"]

#: Assumed figures are multiplied and divided by this.
FACTOR = 1.5
#: By so much more of the queries' rows held.
POINTS = 0.02
SHARES = ("serve_overlap", "draft_misses")


@dataclass(frozen=True, slots=True)
class Predicted:
    """A row and what the replay says of it.

    ms:      of a step; error: (ms - measured) / measured.
    ratio:   of tokens a second to the row that it is measured against; None: to none.
    nulls:   what simpler models say, in ms: "misses only" (all but computation is proportional to
             the misses), "same as NAME" (the fitted row of offload that is nearest).
    points:  relative change of the step if two points more of the rows were held; None: no offload.
    moved:   relative change of the step by assumed figure: (divided, multiplied).
    """

    row: MeasuredRow
    report: OffloadReport
    mean: MeanStep
    deployment: Deployment
    ratio: float | None = None
    nulls: Mapping[str, float] = field(default_factory=dict)
    points: float | None = None
    moved: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """The step's time."""
        return (self.report.step_us or 0.0) / 1e3

    @property
    def error(self) -> float:
        """Relative error of the step's time."""
        return self.ms / self.row.ms - 1

    @property
    def ratio_error(self) -> float | None:
        """Relative error of the ratio."""
        if self.ratio is None or self.row.ratio is None:
            return None
        return self.ratio / self.row.ratio - 1

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all replicas, by the measured batch and the replay's tokens a step."""
        return (self.report.decode_tokens_per_s or 0.0) * self.deployment.parallel.dp

    @property
    def parts_ms(self) -> dict[str, float]:
        """Computation, planning and serving of a step."""
        totals = self.report.totals
        steps = max(1, totals.steps) * 1e3
        return {
            "compute": totals.compute_us / steps, "plan": totals.plan_us / steps,
            "serve": totals.serve_us / steps,
        }  # fmt: skip

    @property
    def hit_rate_of_queries(self) -> float | None:
        """Share of the rows that the queries asked for, repeats counted, that were not read."""
        wanted = self.mean.wanted(self.deployment)
        return 1 - self.mean.misses / wanted if wanted and self.mean.offload else None

    def to_dict(self) -> dict[str, Any]:
        """Of types that JSON has."""
        row, figures = self.row, self.report.to_dict()
        return {
            "name": row.name, "mode": row.mode, "use": row.use, "batch": row.batch,
            "policy": row.policy, "pool": row.pool, "measured_ms": row.ms, "ms": self.ms,
            "error": self.error, "parts_ms": self.parts_ms,
            "hit_rate": figures["hit_rate"], "hit_rate_of_queries": self.hit_rate_of_queries,
            "tokens_per_s": self.tokens_per_s, "measured_ratio": row.ratio, "ratio": self.ratio,
            "ratio_error": self.ratio_error, "against": row.against,
            "independent": row.independent, "because": row.because,
            "nulls_ms": dict(self.nulls), "two_points_more_hits": self.points,
            "sensitivity": {key: list(both) for key, both in self.moved.items()},
            "bytes": figures["bytes"], "memory": figures["memory"], "steps": figures["steps"],
            "model_time_us": figures["model_time_us"], "deployment": figures["deployment"],
            "command": row_command(row, self.deployment, "TRACE"),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """All rows of a file of measurements.

    free: how many figures were fitted, and to how many rows.
    """

    measurements: Measurements
    rows: tuple[Predicted, ...]
    free: int
    fitted: int

    def of(self, *uses: str) -> list[Predicted]:
        """The rows of some uses."""
        return [row for row in self.rows if row.row.use in uses]

    @property
    def independent(self) -> int:
        """How many predictions nothing that was fitted to follows into."""
        return sum(found.row.independent for found in self.of("predict"))

    @property
    def verdict(self) -> str:
        """What the errors are worth, in words."""
        predicted = len(self.of("predict"))
        said = f"{self.free} free figures, fitted to {self.fitted} rows"
        if self.free and self.free >= self.fitted:
            said += ": as many, so the errors of the rows fitted say nothing"
        if not predicted or self.free >= self.fitted + predicted:
            return f"{said}; fitted, predicts nothing"
        return f"{said}; {predicted} predictions, {self.independent} of them independent"

    def to_dict(self) -> dict[str, Any]:
        """Of types that JSON has."""
        of = self.measurements
        return {
            "kind": "prediction", "name": of.name, "source": of.source,
            "deployment": of.deployment.name, "hash": of.deployment.digest,
            "free": list(map(str, parameters_of(of))), "rows_fitted": self.fitted,
            "independent": self.independent, "verdict": self.verdict,
            "assumed": dict(of.assumed), "factor": FACTOR,
            "rows": [row.to_dict() for row in self.rows],
        }  # fmt: skip


def predict(
    measurements: Measurements,
    calibration: Calibration | None = None,
    runs: RowRuns | None = None,
) -> Prediction:
    """Every row as the replay has it, by the deployment's own figures.

    calibration: take the figures of this fit instead.
    runs: where rows are served.
    Raises ParamInvalidError for a row that cannot be served, before any is.
    """
    check_rows(measurements)
    runs = RowRuns() if runs is None else runs

    def deployment_of(mode: str) -> Deployment:
        return measurements.deployment_of(mode) if calibration is None else (
            calibration.of_mode(mode)
        )  # fmt: skip

    found = []
    for row in measurements.rows:
        deployment = deployment_of(row.mode)
        report = runs.run(row, deployment)
        found.append(Predicted(row, report, runs.mean(row, report), deployment))
    modes = {row.mode: deployment_of(row.mode) for row in measurements.rows}
    moved = _moved(measurements, found, modes)
    by_name = {one.row.name: one for one in found}
    rows = tuple(
        Predicted(
            one.row, one.report, one.mean, one.deployment,
            _ratio(one, by_name),
            dict(_nulls(one, found)) if one.row.use in ("predict", "show") else {},
            _two_points(one),
            moved.get(one.row.name, {}),
        )
        for one in found
    )  # fmt: skip
    free = len(parameters_of(measurements))
    return Prediction(measurements, rows, free, len(measurements.of("fit")))


def _ratio(one: Predicted, others: Mapping[str, Predicted]) -> float | None:
    if one.row.against is None:
        return None
    other = others[one.row.against]
    if not one.ms or not other.ms:
        return None
    # As the source has it: by the batches that were measured.
    return (one.row.batch / one.ms) / (other.row.batch / other.ms)


def _two_points(one: Predicted) -> float | None:
    if not one.mean.offload:
        return None
    better = one.mean.with_hit_rate(one.deployment, POINTS)
    return better.us(one.deployment) / one.mean.us(one.deployment) - 1


def _nulls(one: Predicted, rows: list[Predicted]) -> Iterator[tuple[str, float]]:
    """What models say that know no more than the fitted rows of offload."""
    fitted = [r for r in rows if r.row.use == "fit" and r.mean.offload and r.mean.misses]
    if not one.mean.offload or not fitted:
        return
    costs = [(r.row.ms * 1e3 - r.mean.compute_us(r.deployment), r.mean.misses) for r in fitted]
    squares = sum(misses * misses for _, misses in costs)
    each = sum(us * misses for us, misses in costs) / squares
    yield "misses only", (one.mean.compute_us(one.deployment) + each * one.mean.misses) / 1e3
    same = min(
        fitted,
        key=lambda r: (r.row.mode != one.row.mode, abs(r.row.batch / one.row.batch - 1)),
    )
    yield f"same as {same.row.name}", same.row.ms


def _moved(
    measurements: Measurements, rows: list[Predicted], modes: Mapping[str, Deployment]
) -> dict[str, dict[str, tuple[float, float]]]:
    """By predicted row and assumed figure, how far the step moves, the fit taken anew."""
    parameters = parameters_of(measurements)
    fitted = [
        (one.row, one.mean, one.mean.us(one.deployment)) for one in rows if one.row.use == "fit"
    ]
    judged = [one for one in rows if one.row.use == "predict"]
    found: dict[str, dict[str, tuple[float, float]]] = {one.row.name: {} for one in judged}
    if not judged:
        return found
    free = {parameter.key for parameter in parameters}
    base = modes[measurements.mode]
    for key in base.assumed():
        if key in free or not base.number(key):
            continue
        sides = []
        for by in (1 / FACTOR, FACTOR):
            value = base.number(key) * by
            figure = DeploymentFigure(
                min(value, 1.0) if key in SHARES else value, "assumed", "moved"
            )
            changed = {
                mode: deployment.with_figures({key: figure}) for mode, deployment in modes.items()
            }
            again = refitted(parameters, fitted, changed)
            sides.append(
                [
                    one.mean.us(again[one.row.mode]) / one.mean.us(one.deployment) - 1
                    for one in judged
                ]
            )
        for one, low, high in zip(judged, *sides, strict=True):
            found[one.row.name][key] = (low, high)
    # The ids are made: their misses are no figure, and move together.
    sides = []
    for by in (1 / FACTOR, FACTOR):
        means = [(row, mean.scaled_misses(by), us) for row, mean, us in fitted]
        again = refitted(parameters, means, modes)
        sides.append(
            [
                one.mean.scaled_misses(by).us(again[one.row.mode]) / one.mean.us(one.deployment) - 1
                for one in judged
            ]
        )
    for one, low, high in zip(judged, *sides, strict=True):
        found[one.row.name]["misses of all rows"] = (low, high)
    return found
