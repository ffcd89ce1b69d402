# SPDX-License-Identifier: Apache-2.0
"""What the requests and layers that are only accounted would have hit and missed.

Real requests teach, the others ask.  How much a pool holds depends on how long it has been filled,
so both go by a request's age in steps, in classes that double.  Shares become whole rows with what
is left over carried along: totals do not drift, and the same calls give the same numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["MissModel", "Rows"]

MAX_CLASS = 16
#: Rows of a selection: (hits, misses, recent).
Rows = tuple[int, int, int]


class MissModel:
    """Shares of hits, misses and recent rows, by age class and group."""

    def __init__(self, num_groups: int) -> None:
        # [class, group, (hits, misses, recent)] rows of the real ones so far.
        self._seen: NDArray[np.int64] = np.zeros((MAX_CLASS + 1, num_groups, 3), np.int64)
        self._carried: NDArray[np.float64] = np.zeros((num_groups, 2))

    def learn(self, age: int, group: int, rows: Rows) -> None:
        """A real selection, ``age`` steps after its request was admitted."""
        self._seen[_class(age), group] += rows

    def estimate(self, age: int, group: int, wanted: int) -> Rows:
        """What a selection of ``wanted`` rows would have been.

        From the real ones of that age and group; else of that age; else of the nearest age.
        Before any was seen, every row is a miss.
        """
        seen = self._seen[_class(age), group]
        if not seen.any():
            seen = self._nearest(_class(age))
        total = int(seen.sum())
        if not total:
            return 0, wanted, 0
        carried = self._carried[group] + wanted * seen[1:] / total
        misses, recent = (int(x) for x in np.floor(carried + 1e-9))
        misses = min(misses, wanted)
        recent = min(recent, wanted - misses)
        self._carried[group] = carried - (misses, recent)
        return wanted - misses - recent, misses, recent

    def _nearest(self, place: int) -> NDArray[np.int64]:
        by_class: NDArray[np.int64] = self._seen.sum(axis=1)
        known = np.flatnonzero(by_class.any(axis=1))
        if len(known):
            place = int(known[np.abs(known - place).argmin()])
        found: NDArray[np.int64] = by_class[place]
        return found


def _class(age: int) -> int:
    # 0 | 1 | 2, 3 | 4 .. 7 | ...
    return min(age.bit_length(), MAX_CLASS)
