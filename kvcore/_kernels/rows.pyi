# SPDX-License-Identifier: Apache-2.0
from numpy import int64, uint8
from numpy.typing import NDArray

def scatter(
    tokens: NDArray[uint8],
    cache: NDArray[uint8],
    slots: NDArray[int64],
    n_threads: int = 1,
) -> None: ...
def gather(
    tokens: NDArray[uint8],
    cache: NDArray[uint8],
    slots: NDArray[int64],
    n_threads: int = 1,
) -> None: ...
