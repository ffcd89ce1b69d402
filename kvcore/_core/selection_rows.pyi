# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
from numpy.typing import NDArray

def move_rows(given: list[tuple[Any, str, tuple[int, ...]]], old: NDArray[np.int64]) -> None: ...
def expire_rows(
    status: Any,
    name: str,
    shape: tuple[int, ...],
    rows: NDArray[np.int64],
    limits: NDArray[np.int64],
) -> int: ...
