# SPDX-License-Identifier: Apache-2.0
from array import array
from collections.abc import Sequence
from typing import Any

def runs(
    address: int, sizes: Sequence[int], strides: Sequence[int], itemsize: int, limit: int
) -> array[int] | None: ...
def spread(
    address: int,
    offsets: Any,
    sizes: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    limit: int,
) -> array[int] | None: ...
