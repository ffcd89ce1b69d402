# SPDX-License-Identifier: Apache-2.0
"""Sums over the steps of an offloaded replay, and their course over the model's time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcore.replay.clock.step_clock import RunTimes, StepTimes

__all__ = ["OffloadTotals", "Timeline", "summed"]

POINTS = 512


class Timeline:
    """Steps over time, in at most ``2 * POINTS`` points: when all are used, pairs are joined.

    A point has its end in us, and of its steps the number and the means of: us a step, hit rate,
    batch, host blocks in use.
    """

    def __init__(self) -> None:
        self._points: list[list[float]] = []
        self._each = 1

    def add(self, now_us: float, us: float, hit_rate: float, batch: int, blocks: int) -> None:
        """Add one step to the line."""
        new = [now_us, 1.0, us, hit_rate, float(batch), float(blocks)]
        if self._points and self._points[-1][1] < self._each:
            self._points[-1] = _joined(self._points[-1], new)
            return
        if len(self._points) == 2 * POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_joined(a, b) for a, b in pairs]
            self._each *= 2
        self._points.append(new)

    def to_dict(self) -> dict[str, list[float]]:
        """The points as columns, a list each."""
        names = ("end_us", "steps", "step_us", "hit_rate", "batch", "host_blocks")
        return {name: [p[i] for p in self._points] for i, name in enumerate(names)}


def _joined(a: list[float], b: list[float]) -> list[float]:
    n = a[1] + b[1]
    return [b[0], n, *((x * a[1] + y * b[1]) / n for x, y in zip(a[2:], b[2:], strict=True))]


@dataclass(slots=True)
class OffloadTotals:
    """Sums over a run; a row is a token in a layer; times are microseconds of the model.

    decode_us:   time of the steps that decode; serve_us, exposed_us, link_us, plan_us: see
                 `StepTimes`; assumed_compute_us: the part of compute_us by assumed figures.
    wanted:      rows that the queries of a step want, each query counted by itself.
    accepted:    tokens generated; written: the same with rejected drafts.
    """

    steps: int = 0
    request_steps: int = 0
    accepted: int = 0
    written: int = 0
    hits: float = 0.0
    misses: float = 0.0
    recent: float = 0.0
    wanted: float = 0.0
    real_rows: int = 0
    decode_us: float = 0.0
    compute_us: float = 0.0
    assumed_compute_us: float = 0.0
    serve_us: float = 0.0
    exposed_us: float = 0.0
    plan_us: float = 0.0
    link_us: float = 0.0
    prefill_us: float = 0.0
    idle_us: float = 0.0
    end_us: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    hit_bytes: float = 0.0
    prefill_bytes: int = 0
    received_bytes: int = 0
    peak_device_bytes: int = 0
    peak_host_blocks: int = 0
    busy: dict[str, float] = field(default_factory=dict)

    def add_step(
        self,
        us: float,
        times: StepTimes,
        batch: int,
        accepted: int,
        written: int,
        rows: tuple[float, float, float],
        row_bytes: int,
        num_layers: int,
        compute_us: float,
        *,
        sends: bool = True,
    ) -> None:
        """Add one step.

        rows:  hits, misses and recent rows, over all layers.
        sends: whether its new rows go to the host.
        """
        self.steps += 1
        self.request_steps += batch
        self.accepted += accepted
        self.written += written
        self.hits += rows[0]
        self.misses += rows[1]
        self.recent += rows[2]
        self.decode_us += us
        self.compute_us += compute_us
        self.serve_us += times.serve_us
        self.exposed_us += times.exposed_us
        self.link_us += times.link_us
        self.plan_us += times.plan_us
        self.hit_bytes += rows[0] * row_bytes
        self.h2d_bytes += rows[1] * row_bytes
        self.d2h_bytes += sends * written * row_bytes * num_layers

    def add_run(
        self,
        times: RunTimes,
        batch: int,
        rows: NDArray[np.float64],
        row_bytes: int,
        num_layers: int,
        compute_us: NDArray[np.float64],
        *,
        sends: bool = True,
    ) -> None:
        """Add steps of one token of each request, in the order of `add_step`; rows: [steps, 3]."""
        count = len(times)
        self.steps += count
        self.request_steps += count * batch
        self.accepted += count * batch
        self.written += count * batch
        hits, misses, recent = rows.T
        for name, values in (
            ("hits", hits), ("misses", misses), ("recent", recent), ("decode_us", times.us),
            ("compute_us", compute_us), ("serve_us", times.serve_us),
            ("exposed_us", times.exposed_us), ("link_us", times.link_us),
            ("plan_us", times.plan_us), ("hit_bytes", hits * row_bytes),
            ("h2d_bytes", misses * row_bytes),
        ):  # fmt: skip
            setattr(self, name, summed(getattr(self, name), values))
        self.d2h_bytes += sends * count * batch * row_bytes * num_layers


def summed(total: float, values: NDArray[np.float64]) -> float:
    """The total with the values added one by one, so that the sum is that of single steps."""
    for value in values.tolist():
        total += value
    return total
