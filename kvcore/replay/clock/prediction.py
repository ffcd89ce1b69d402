# SPDX-License-Identifier: Apache-2.0
"""Steps of a published deployment, predicted; and how many requests fit a device.

The model of a decode step, one die's, in microseconds::

    step  = compute + layers * serve(misses) + draft layers * serve(misses of the last selection)
            + groups * plan
    serve = max(HBM's share, the link's share)    # each: latency + pieces * piece + bytes / rate

as the guide has the order: attention waits until its rows are served, what is installed trails on
a second stream.  A serve is one kernel that reads held rows from device memory and missing ones
from the host, and writes all of them; the shares are those of the runtime's model clock.

Two figures are calibrated and no more: each mode's fixed part of a step on its row without
offload, and the cost of a scattered read of host memory on one row.  All other rows are predicted.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcore.errors import fail
from kvcore.replay.clock.capacity import decode_bytes, most_requests
from kvcore.replay.models.profile import ModelFigure, ModelProfile, read_text
from kvcore.runtime.profile import DeviceProfile

__all__ = [
    "Deployment",
    "Prediction",
    "PublishedRow",
    "calibrate",
    "decode_bytes",
    "most_requests",
    "predict",
    "sensitivity",
]

FIGURES = ("dies", "context", "drafts", "accepted", "plan_group", "query_misses", "serve_lanes")
USES = ("calibrates the mode", "calibrates host reads", "predicted")
#: Hit rate of the last selection alone: what the layer that makes drafts has for a pool.
LAST_SELECTION = 0.5885
#: Figures of a device that a serve rests on.
SERVE_FIGURES = (
    "hbm_bandwidth",
    "hbm_latency",
    "hbm_descriptor",
    "h2d_bandwidth",
    "h2d_latency",
    "compute_latency",
)
MOST_PIECE_US = 1000.0


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One measured row: pool is the entries of a request and group, 0 without offload."""

    mode: str
    pool: int
    batch: int
    ms: float
    use: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """A published table, and the figures it takes to predict it."""

    name: str
    model: ModelProfile
    device: DeviceProfile
    figures: Mapping[str, ModelFigure]
    rows: tuple[PublishedRow, ...]

    def value(self, key: str) -> float:
        """A figure's number."""
        value = self.figures[key].value
        assert isinstance(value, int | float)
        return value

    @classmethod
    def glm_5_2(cls) -> Deployment:
        """GLM-5.2 on two A3 nodes, as its offload guide has it."""
        return cls.load(Path(__file__).with_name("published_glm_5_2.toml"))

    @classmethod
    def load(cls, path: str | Path) -> Deployment:
        """Read a TOML file of the form of the one that ships.  Raises ParamInvalidError."""
        try:
            data = tomllib.loads(read_text(path))
        except tomllib.TOMLDecodeError as error:
            fail("deployment", "a TOML file", f"{path}: {error}")
        figures: dict[str, ModelFigure] = {}
        for key in FIGURES:
            entry = data.get(key)
            if not isinstance(entry, dict) or set(entry) != {"value", "basis", "source"}:
                fail(key, "a table of value, basis and source", repr(entry))
            value = entry["value"]
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                fail(key, "a number of at least 0", repr(value))
            figures[key] = ModelFigure(value, str(entry["basis"]), str(entry["source"]))
        try:
            rows = tuple(PublishedRow(**row) for row in data.get("rows", ()))
        except TypeError as error:
            fail("rows", "mode, pool, batch, ms and use", str(error))
        for row in rows:
            if row.use not in USES:
                fail("rows.use", "one of " + ", ".join(USES), repr(row.use))
        if sum(row.use == "calibrates host reads" for row in rows) != 1:
            fail("rows", "one row that calibrates host reads", len(rows))
        model, device = ModelProfile.find(data["model"]), DeviceProfile.named(data["device"])
        return cls(str(data["name"]), model, device, figures, rows)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A row and what was made of it.

    ms:      the step's time; parts: its compute, plan and serve, in ms.
    error:   (predicted - published) / published.
    tokens_per_s: batch * accepted / step.
    """

    row: PublishedRow
    ms: float
    parts: tuple[float, float, float]
    tokens_per_s: float

    @property
    def error(self) -> float:
        """Relative error of the step's time."""
        return self.ms / self.row.ms - 1


@dataclass(frozen=True, slots=True)
class _Step:
    """The parts of a step on one die."""

    deployment: Deployment
    misses: Mapping[int, float]  # by pool
    piece_us: float

    def serve_us(self, requests: float, miss: float) -> float:
        d, device = self.deployment, self.deployment.device
        queries = 1 + d.value("drafts")
        rows = requests * queries * d.model.topk
        missed = requests * d.model.topk * miss * (1 + (queries - 1) * d.value("query_misses"))
        lanes, row_bytes = d.value("serve_lanes"), d.model.row_bytes
        hbm = (
            device.value("hbm_latency")
            + rows * lanes * device.value("hbm_descriptor")
            + (2 * rows - missed) * row_bytes * 1e-3 / device.value("hbm_bandwidth")
        )
        link = (
            device.value("h2d_latency")
            + missed * lanes * self.piece_us
            + missed * row_bytes * 1e-3 / device.value("h2d_bandwidth")
        )
        return max(device.value("compute_latency"), hbm, link)

    def parts(self, row: PublishedRow, fixed_us: float) -> tuple[float, float, float]:
        """Microseconds: compute, plans, serves."""
        d, model = self.deployment, self.deployment.model
        requests = row.batch / d.value("dies")
        compute = fixed_us + requests * model.request_us(
            int(d.value("context")), int(d.value("drafts"))
        )
        if not row.pool:
            return compute, 0.0, 0.0
        serve = model.layers * self.serve_us(requests, self.misses[row.pool])
        serve += model.draft_layers * self.serve_us(requests, 1 - LAST_SELECTION)
        return compute, len(model.groups) * d.value("plan_group"), serve


def calibrate(
    deployment: Deployment, hit_rates: Mapping[int, float]
) -> tuple[dict[str, float], float]:
    """What is fitted: us of each mode's fixed part of a step, us of a scattered host read.

    hit_rates: by entries of the pool, for every pool of the rows.
    Raises ParamInvalidError where a row cannot be calibrated: what the model has without host
    reads is more than was published.
    """
    for row in deployment.rows:
        if row.pool and row.pool not in hit_rates:
            fail("hit_rates", f"a rate for {row.pool} entries", sorted(hit_rates))
    misses = {pool: 1 - rate for pool, rate in hit_rates.items()}
    fixed = {
        row.mode: row.ms * 1e3 - _Step(deployment, misses, 0.0).parts(row, 0.0)[0]
        for row in deployment.rows
        if row.use == "calibrates the mode"
    }
    return fixed, _host_read_us(deployment, misses, fixed)


def predict(deployment: Deployment, hit_rates: Mapping[int, float]) -> list[Prediction]:
    """Every row of the table; see ``calibrate``."""
    fixed, piece_us = calibrate(deployment, hit_rates)
    step = _Step(deployment, {pool: 1 - rate for pool, rate in hit_rates.items()}, piece_us)
    found = []
    for row in deployment.rows:
        parts = step.parts(row, fixed[row.mode])
        us = sum(parts)
        tokens = row.batch * deployment.value("accepted") / us * 1e6
        compute, plan, serve = (part / 1e3 for part in parts)
        found.append(Prediction(row, us / 1e3, (compute, plan, serve), tokens))
    return found


def _host_read_us(
    deployment: Deployment, misses: Mapping[int, float], fixed: Mapping[str, float]
) -> float:
    (row,) = (row for row in deployment.rows if row.use == "calibrates host reads")

    def over(piece_us: float) -> float:
        return sum(_Step(deployment, misses, piece_us).parts(row, fixed[row.mode])) - row.ms * 1e3

    low, high = 0.0, MOST_PIECE_US
    if over(low) > 0:
        fail(
            f"row {row.mode}, {row.pool}",
            f"at most {row.ms:g} ms without host reads",
            f"{row.ms + over(low) / 1e3:.2f} ms",
        )
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if over(middle) > 0 else (middle, high)
    return low


def sensitivity(
    deployment: Deployment, hit_rates: Mapping[int, float], factor: float = 1.5
) -> Iterator[tuple[str, float, list[float]]]:
    """How the predicted rows move with each figure that is assumed, calibrated anew each time.

    Yields (figure, factor, relative change of each predicted row); hit rates move by their
    misses.  A factor that leaves nothing to calibrate gives NaN.
    """
    predicted = [p.row.use == "predicted" for p in predict(deployment, hit_rates)]
    before = [p.ms for p in predict(deployment, hit_rates)]
    for name, changed, rates in _changes(deployment, hit_rates, (1 / factor, factor)):
        label, by = name
        try:
            after = [p.ms for p in predict(changed, rates)]
        except ValueError:
            after = [math.nan] * len(before)
        moved = [a / b - 1 for a, b, keep in zip(after, before, predicted, strict=True) if keep]
        yield label, by, moved


def _changes(
    d: Deployment, rates: Mapping[int, float], factors: tuple[float, ...]
) -> Iterator[tuple[tuple[str, float], Deployment, Mapping[int, float]]]:
    def number(figure: Any) -> float:
        assert isinstance(figure.value, int | float)
        return figure.value

    for by in factors:
        for key in d.model.assumed():
            if key.startswith("step_") and key != "step_fixed":  # that one is calibrated
                values: dict[str, Any] = {key: number(d.model[key]) * by}
                model = d.model.replace(**values)
                yield (f"model {key}", by), replace(d, model=model), rates
        for key in SERVE_FIGURES:
            if d.device[key].basis == "assumed":
                values = {key: number(d.device[key]) * by}
                device = d.device.replace(**values)
                yield (f"device {key}", by), replace(d, device=device), rates
        for key, figure in d.figures.items():
            if figure.basis == "assumed":
                figures = {**d.figures, key: replace(figure, value=number(figure) * by)}
                yield (f"deployment {key}", by), replace(d, figures=figures), rates
        for pool, rate in rates.items():
            moved = {**rates, pool: 1 - min(1.0, (1 - rate) * by)}
            yield (f"misses of {pool} entries", by), d, moved
