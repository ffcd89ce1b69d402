# SPDX-License-Identifier: Apache-2.0
"""The misses of requests that are only counted, estimated from those of the sampled ones.

A pool belongs to one request and group, so what a request misses depends on its own ids: on how
many tokens it has (a context below the pool's size misses little) and for how many steps it has
been served (a pool begins empty).  Real selections are sorted by both, in classes.  A sampled
request takes its own share of misses; the others take that of their class over the sample, or of
the nearest class that the sample has seen.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["CLASSES", "MissTable", "classes_of"]

AGES = 26  # 0 and 1, then two classes to a doubling
CONTEXTS = 96  # four classes to a doubling
CLASSES = CONTEXTS * AGES


class MissTable:
    """Shares of hits, misses and recent rows by class of context and age.

    First `learn` the sample's selections, then `settle` once, then read `shares`.
    """

    def __init__(self) -> None:
        self._own: dict[int, dict[int, NDArray[np.float64]]] = {}
        self.totals: NDArray[np.float64] = np.zeros((CLASSES, 4))  # wanted, hits, misses, recent
        self.nearest: NDArray[np.int64] = np.zeros(CLASSES, np.int64)
        # What `shares` returns once the table is settled: by class, and of each sampled request.
        self._shares = shares_of(self.totals)
        self._own_shares: dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}

    @property
    def samples(self) -> int:
        """The number of sampled requests that the table has learned from."""
        return len(self._own)

    def learn(
        self, request: int, context: int, age: int, wanted: int, rows: NDArray[np.float64]
    ) -> None:
        """Add a real selection: hits, misses and recent rows of ``wanted``, repeats counted."""
        place = int(classes_of(np.array([context]), np.array([age]))[0])
        own = self._own.setdefault(request, {})
        seen = own.setdefault(place, np.zeros(4))
        seen[0] += wanted
        seen[1:] += rows

    @property
    def learned(self) -> dict[int, dict[int, NDArray[np.float64]]]:
        """By request and class: wanted rows, hits, misses and recent rows."""
        return self._own

    def settle(self) -> None:
        """Sum up what was learned, in an order that does not depend on the order of serving."""
        for _, own in sorted(self._own.items()):
            for place, seen in own.items():
                self.totals[place] += seen
        known = np.flatnonzero(self.totals[:, 0])
        if len(known):
            self.nearest = nearest_of(np.arange(CLASSES), known)
        self._shares = shares_of(self.totals[self.nearest])
        for request, own in self._own.items():
            classes = sorted(own)
            rows = np.array([own[place] for place in classes])
            self._own_shares[request] = np.array(classes), shares_of(rows)

    def shares(self, places: NDArray[np.int64], requests: list[int]) -> NDArray[np.float64]:
        """[n, 3] hits, misses and recent rows by wanted row; all misses before any was learned.

        places: classes; requests: whose, for the shares of the sampled ones' own.
        """
        rows = self.totals[self.nearest[places]]
        for i, request in enumerate(requests):
            own = self._own.get(request)
            if own is not None:
                seen = own.get(int(places[i]))
                if seen is not None:
                    rows[i] = seen
        return shares_of(rows)

    def shares_of_steps(
        self, places: NDArray[np.int64], requests: list[int]
    ) -> NDArray[np.float64]:
        """[steps, n, 3] shares as `shares` has them, of classes [steps, n]."""
        found = self._shares[places]
        for i, request in enumerate(requests):
            own = self._own_shares.get(request)
            if own is not None:
                known, shares = own
                column = places[:, i]
                at = np.minimum(np.searchsorted(known, column), len(known) - 1)
                mine = known[at] == column
                found[mine, i] = shares[at[mine]]
        return found

    def without_each(self) -> Iterator[NDArray[np.float64]]:
        """[CLASSES, 4] the totals without each sampled request in turn.

        All are the same array: use one before the next is taken.
        """
        rest = self.totals.copy()
        for _, own in sorted(self._own.items()):
            places = list(own)
            kept = rest[places]
            rest[places] -= np.array(list(own.values()))
            rest[places] *= rest[places, :1] > 0.5  # (rows are whole numbers: no remainder of sums)
            yield rest
            rest[places] = kept


def shares_of(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n, 3] of rows [n, (wanted, hits, misses, recent)]."""
    wanted = rows[:, :1]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(wanted > 0, rows[:, 1:] / wanted, (0.0, 1.0, 0.0))


def nearest_of(places: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each class the nearest of the known classes, of which there must be at least one."""
    # The age first: an empty pool and a filled one differ more than two lengths do.
    distance = 16 * np.abs(places[:, None] % AGES - known % AGES) + np.abs(
        places[:, None] // AGES - known // AGES
    )
    found: NDArray[np.int64] = known[distance.argmin(axis=1)]
    return found


def classes_of(contexts: NDArray[np.int64], ages: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class of each request, by its tokens and its steps since admission."""
    context = np.floor(4 * np.log2(np.maximum(contexts, 1))).astype(np.int64)
    age = np.where(ages > 1, np.floor(2 * np.log2(np.maximum(ages, 1))), ages).astype(np.int64)
    places: NDArray[np.int64] = np.minimum(context, CONTEXTS - 1) * AGES
    places += np.minimum(age, AGES - 1)
    return places
