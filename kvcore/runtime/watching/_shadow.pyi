# SPDX-License-Identifier: Apache-2.0
from typing import final

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from kvcore.runtime.watching._segments import SegmentMap
from kvcore.runtime.watching._vectors import Vector

HIT_WRITE: int
HIT_READ: int

@final
@disjoint_base
class Shadow(SegmentMap):
    @property
    def num_live(self) -> int: ...
    def access(
        self,
        ranges: npt.NDArray[np.int64],
        write: bool,
        lane: int,
        count: int,
        host: int,
        vector: Vector,
    ) -> list[tuple[int, int, int, int]] | None: ...
    def reset(self) -> None: ...
    def sweep(self, host: int, floor: Vector) -> list[int]: ...
    def segments(self) -> list[tuple[int, int, int, list[int]]]: ...
