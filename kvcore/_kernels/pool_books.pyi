# SPDX-License-Identifier: Apache-2.0
from typing import Any, Self

from numpy import int32, int64
from numpy.typing import NDArray

class Books:
    capacity: int
    num_ids: int
    max_wanted: int
    used: int
    hits: int
    misses: int
    fault_index: int
    def __new__(cls, capacity: int, num_ids: int, max_wanted: int, *rest: int) -> Self: ...
    def plan(self, ids: NDArray[Any], source: NDArray[int32], target: NDArray[int32]) -> int: ...
    def plan_rows(
        self,
        ids: NDArray[Any],
        table: NDArray[int64],
        block_size: int,
        num_blocks: int,
        wide: NDArray[int64],
        rows: NDArray[int64],
        source: NDArray[int32],
        target: NDArray[int32],
    ) -> int: ...
    def place_of(self, id: int) -> int: ...
    def forget(self, first: int, end: int) -> int: ...
    def reset(self) -> None: ...
    def tokens(self, out: NDArray[int32]) -> None: ...

class Mapped(Books): ...
class Previous(Mapped): ...
class Lru(Mapped): ...

class Fifo(Books):
    ways: int
    sets: int
    def __new__(cls, capacity: int, num_ids: int, max_wanted: int, ways: int) -> Self: ...

class Arc(Mapped):
    target: int
    def sizes_of_lists(self) -> tuple[int, int, int, int]: ...
