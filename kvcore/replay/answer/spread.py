# SPDX-License-Identifier: Apache-2.0
"""How far figures move from one workload to another: points of a sweep that differ by their seed.

It stands apart from a run's interval, which is of the sample alone, with the workload fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["spread_over_seeds"]

#: Name -> where it is in a report.
FIGURES: dict[str, tuple[str, ...]] = {
    "hit_rate": ("hit_rate",),
    "step_us": ("model_time_us", "step"),
    "tokens_per_s": ("tokens_per_s", "all"),
    "speed_up": ("answer", "speed_up"),
}


def spread_over_seeds(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By name of the points without their seed: how many seeds, and each figure's least and most.

    reports: by name as a sweep gives them, "policy=lru,seed=1".  Points of one seed have no spread
    and are left out; so are figures that one of the seeds does not have.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for name, report in reports.items():
        parts = name.split(",")
        left = [part for part in parts if not part.startswith("seed=")]
        if len(left) < len(parts):
            groups.setdefault(",".join(left) or "all", []).append(report)
    return {name: _spread(group) for name, group in groups.items() if len(group) > 1}


def _spread(reports: list[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"seeds": len(reports)}
    for name, path in FIGURES.items():
        values = [_value(report, path) for report in reports]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            found[name] = [min(known), max(known)]
    found["decisions"] = sorted({str(report.get("decision")) for report in reports})
    return found


def _value(report: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = report
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None
