# SPDX-License-Identifier: Apache-2.0
from typing import Self

from numpy import float64, int32, uint8
from numpy.typing import NDArray

class TimeLine:
    layers: int
    operations: int
    depth: int
    rows: int
    event: float
    def __new__(
        cls,
        order: NDArray[int32],
        before: NDArray[int32],
        row_of: NDArray[int32],
        depth: int,
        event: float,
    ) -> Self: ...
    @property
    def now(self) -> float: ...
    def advance(self, us: float) -> None: ...
    def run(
        self,
        shares: NDArray[float64],
        costs: NDArray[float64],
        waits: NDArray[float64],
        looks: NDArray[uint8],
        until: float,
        out: NDArray[float64],
    ) -> int: ...
