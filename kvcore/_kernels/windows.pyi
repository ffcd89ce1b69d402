# SPDX-License-Identifier: Apache-2.0
from numpy import float32, uint8, uint32
from numpy.typing import NDArray

MEANS: tuple[str, ...]

def set_hifloat8(
    values: NDArray[float32], limits: NDArray[uint32], codes: NDArray[uint8]
) -> None: ...
