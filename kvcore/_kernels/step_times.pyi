# SPDX-License-Identifier: Apache-2.0
from numpy import float64, int32
from numpy.typing import NDArray

def run(
    shares: NDArray[float64],
    before: NDArray[int32],
    ready: NDArray[float64],
    free_at: NDArray[float64],
    start: NDArray[float64],
    end: NDArray[float64],
    work: NDArray[int32],
) -> int: ...
