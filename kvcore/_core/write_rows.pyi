# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
from numpy.typing import NDArray

def write_rows(
    jobs: list[tuple[Any, str, tuple[int, ...], NDArray[np.int64], NDArray[Any]]],
) -> None: ...
