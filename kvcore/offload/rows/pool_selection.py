# SPDX-License-Identifier: Apache-2.0
"""What one plan of a device pool decides: which rows are held, read and installed, and where."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Selection"]


class Selection:
    """One step's decision, the same for every layer of the group.

    ids:    int64 [n] the ids as given; negative ones ask for nothing.
    source: int32 [n] the place that holds the row, -1 where it is read from the host, -2 nothing.
    target: int32 [n] the place the row is installed in, or -1.
    hits, misses: how many of either.
    """

    __slots__ = (
        "_halves", "hits", "host_rows", "ids", "misses", "number", "previous", "source", "target",
    )  # fmt: skip
    hits: int
    host_rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    misses: int
    number: int
    previous: int
    source: NDArray[np.int32]
    target: NDArray[np.int32]

    def __init__(
        self,
        number: int,
        previous: int,
        ids: NDArray[np.int64],
        host_rows: NDArray[np.int64],
        source: NDArray[np.int32],
        target: NDArray[np.int32],
    ) -> None:
        self.number, self.previous = number, previous
        self.ids, self.host_rows = ids, host_rows
        self.source, self.target = source, target
        self.hits = self.misses = 0
        self._halves: dict[str, NDArray[np.int32]] = {}

    def places(self, kind: str) -> NDArray[np.int32]:
        """int32 [n]: what a move of this kind does with each row, in the form of ``source``."""
        if kind == "serve":
            return self.source
        if kind == "install":
            return self.target
        if kind not in self._halves:
            other = self.source == -1 if kind == "hits" else self.source >= 0
            self._halves[kind] = np.where(other, np.int32(-2), self.source)
        return self._halves[kind]

    def count(self, kind: str) -> int:
        """Rows that a move of this kind copies."""
        if kind == "install":
            return int(np.count_nonzero(self.target >= 0))
        return self.hits * (kind != "misses") + self.misses * (kind != "hits")

    def __repr__(self) -> str:
        return f"<Selection {self.number}: {self.hits} held, {self.misses} to read>"
