# SPDX-License-Identifier: Apache-2.0
"""A step's compute time as a table of measured values, over batch and context.

Between two points of an axis the time is interpolated linearly; beyond the first or the last it
continues along the two nearest points, and `beyond` says how far outside that is.  With one point
on an axis there is nothing to continue along: the time does not depend on it, and what lies off the
point is outside the table too.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvcore.errors import fail, shown
from kvcore.offload.checks import check_choice
from kvcore.replay.models.profile import BASES

__all__ = ["StepTable"]

MAX_POINTS = 1024
MAX_US = 1e9
#: How far off a single point, relatively, still is the point.
SAME = 0.1


@dataclass(frozen=True, slots=True)
class StepTable:
    """Microseconds of a step, transfers not counted.

    batches:  requests of a replica, ascending; contexts: mean tokens of each, ascending.
    us:       [batches][contexts].
    basis, source: as of every figure.
    Raises ParamInvalidError naming what is wrong with the table.
    """

    batches: tuple[float, ...]
    contexts: tuple[float, ...]
    us: tuple[tuple[float, ...], ...]
    basis: str
    source: str

    def __post_init__(self) -> None:
        for name, axis in (("batch", self.batches), ("context", self.contexts)):
            _check_axis(f"step_table.{name}", axis)
        check_choice("step_table.basis", self.basis, BASES)
        if not isinstance(self.source, str) or not self.source:
            fail("step_table.source", "where the times come from", shown(self.source)[:80])
        shape = f"{len(self.batches)} rows of {len(self.contexts)} numbers above 0"
        rows = self.us
        good = isinstance(rows, tuple) and len(rows) == len(self.batches)
        for row in rows if good else ():
            good = good and isinstance(row, tuple) and len(row) == len(self.contexts)
            good = good and all(_is_number(us) and 0 < us <= MAX_US for us in row)
        if not good:
            fail("step_table.us", shape, shown(rows)[:80])

    @classmethod
    def of(cls, data: Any) -> StepTable:
        """A table from a TOML file's: batch, context, us, basis and source."""
        if not isinstance(data, dict) or set(data) != {"batch", "context", "us", "basis", "source"}:
            fail("step_table", "a table of batch, context, us, basis and source", shown(data)[:80])
        rows = data["us"]
        us = tuple(_frozen(row) for row in rows) if isinstance(rows, list) else rows
        return cls(
            _frozen(data["batch"]), _frozen(data["context"]), us, data["basis"], data["source"]
        )

    def at(self, batch: float, context: float) -> float:
        """Microseconds for so many requests with so many tokens each on average; never below 0."""
        over = [_along(self.contexts, row, context) for row in self.us]
        return max(0.0, _along(self.batches, over, batch))

    def beyond(self, batch: float, context: float) -> tuple[float, float]:
        """How far outside the table on either axis, as a ratio to the nearest end; 1: inside."""
        return _ratio(self.batches, batch), _ratio(self.contexts, context)

    def scaled(self, factor: float) -> StepTable:
        """The same table with every time multiplied."""
        us = tuple(tuple(value * factor for value in row) for row in self.us)
        return StepTable(self.batches, self.contexts, us, self.basis, self.source)

    def to_dict(self) -> dict[str, Any]:
        """As a TOML file has it."""
        return {
            "batch": list(self.batches), "context": list(self.contexts),
            "us": [list(row) for row in self.us], "basis": self.basis, "source": self.source,
        }  # fmt: skip


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_axis(name: str, axis: Any) -> None:
    good = isinstance(axis, tuple) and 1 <= len(axis) <= MAX_POINTS
    good = good and all(_is_number(x) and 0 < x < 2**31 for x in axis)
    if not good or any(a >= b for a, b in pairwise(axis)):
        fail(name, f"1 to {MAX_POINTS} numbers above 0, ascending", shown(axis)[:80])


def _along(axis: Sequence[float], values: Sequence[float], x: float) -> float:
    if len(axis) == 1:
        return values[0]
    left = min(max(bisect.bisect_right(axis, x) - 1, 0), len(axis) - 2)
    share = (x - axis[left]) / (axis[left + 1] - axis[left])
    return values[left] + share * (values[left + 1] - values[left])


def _ratio(axis: Sequence[float], x: float) -> float:
    if x <= 0:
        return 1.0
    if len(axis) == 1 and abs(x / axis[0] - 1) <= SAME:
        return 1.0
    return max(1.0, x / axis[-1], axis[0] / x)
