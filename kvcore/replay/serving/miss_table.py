# SPDX-License-Identifier: Apache-2.0
"""What requests that are only accounted miss, by what the sampled ones missed.

A pool belongs to one request and group, so what a request misses depends on its own ids: on how
many tokens it has (a context below the pool's size misses little) and for how many steps it has
been served (a pool begins empty).  Real selections are sorted by both, in classes; the others take
the share of misses of their class, or of the nearest class that has been seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["MissTable"]

AGES = 14  # 0, 1, 2-3, 4-7, ...
CONTEXTS = 96  # four classes to a doubling


class MissTable:
    """Shares of hits, misses and recent rows by class of context and age.

    samples: selections learned of the sample, those of substitutes not counted.
    """

    def __init__(self) -> None:
        # [class, (wanted, hits, misses, recent)] of the sample, and of the substitutes who stand in
        # for it in the classes of which the sample says nothing yet.
        self._sampled = np.zeros((CONTEXTS * AGES, 4))
        self._stand_in = np.zeros((CONTEXTS * AGES, 4))
        self._nearest = np.zeros(CONTEXTS * AGES, np.int64)
        self.samples = 0

    def learn(
        self,
        context: int,
        age: int,
        wanted: int,
        rows: tuple[float, float, float],
        *,
        substitute: bool = False,
    ) -> None:
        """A real selection: hits, misses and recent rows of ``wanted``, repeats counted.

        substitute: of a request that is not in the sample.
        """
        place = int(_classes(np.array([context]), np.array([age]))[0])
        table = self._stand_in if substitute else self._sampled
        known = self._sampled[place].any() or self._stand_in[place].any()
        table[place] += (wanted, *rows)
        self.samples += not substitute
        if not known and table[place].any():
            self._find_nearest()

    def shares(self, contexts: NDArray[np.int64], ages: NDArray[np.int64]) -> NDArray[np.float64]:
        """[n, 3] hits, misses and recent rows by wanted row; all misses before any was learned."""
        places = self._nearest[_classes(contexts, ages)]
        rows = self._sampled[places]
        rows = np.where(rows.any(axis=1, keepdims=True), rows, self._stand_in[places])
        wanted = rows[:, :1]
        with np.errstate(invalid="ignore"):
            return np.where(wanted > 0, rows[:, 1:] / wanted, (0.0, 1.0, 0.0))

    def _find_nearest(self) -> None:
        known = np.flatnonzero(self._sampled.any(axis=1) | self._stand_in.any(axis=1))
        every = np.arange(CONTEXTS * AGES)
        # The age first: an empty pool and a filled one differ more than two lengths do.
        distance = 16 * np.abs(every[:, None] % AGES - known % AGES) + np.abs(
            every[:, None] // AGES - known // AGES
        )
        self._nearest = known[distance.argmin(axis=1)]


def _classes(contexts: NDArray[np.int64], ages: NDArray[np.int64]) -> NDArray[np.int64]:
    context = np.floor(4 * np.log2(np.maximum(contexts, 1))).astype(np.int64)
    age = np.where(ages > 0, np.floor(np.log2(np.maximum(ages, 1))) + 1, 0).astype(np.int64)
    places: NDArray[np.int64] = np.minimum(context, CONTEXTS - 1) * AGES
    places += np.minimum(age, AGES - 1)
    return places
