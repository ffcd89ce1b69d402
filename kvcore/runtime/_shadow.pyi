# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

HIT_WRITE: int
HIT_READ: int

@disjoint_base
class Shadow:
    @property
    def num_live(self) -> int: ...
    @property
    def num_segments(self) -> int: ...
    def record(self, lane: int, count: int) -> int: ...
    def access(
        self,
        ranges: npt.NDArray[np.int64],
        write: bool,
        record: int,
        lane: int,
        host: int,
        vector: npt.NDArray[np.int64],
    ) -> list[tuple[int, int, int, int]] | None: ...
    def clear(self, start: int, end: int) -> None: ...
    def reset(self) -> None: ...
    def sweep(self, host: int, floor: npt.NDArray[np.int64]) -> list[int]: ...
    def segments(self) -> list[tuple[int, int, int, list[int]]]: ...
