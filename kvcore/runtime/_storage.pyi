# SPDX-License-Identifier: Apache-2.0
from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

@final
class Ledger:
    used: int
    peak: int
    capacity: int
    allocations: int
    frees: int
    def __init__(self, capacity: int) -> None: ...
    def take(self, nbytes: int) -> bool: ...
    def untake(self, nbytes: int) -> None: ...

@final
class Storage:
    ledger: Ledger
    owner: object
    space: str
    nbytes: int
    array: Any
    freed: bool
    origin: Any
    def __init__(
        self, ledger: Ledger, owner: object, space: str, nbytes: int, array: object
    ) -> None: ...
    def release(self) -> bool: ...

@disjoint_base
class BufferCore:
    storage: Storage
    def _bind(self, storage: Storage) -> None: ...

def total_bytes(ranges: npt.NDArray[np.int64]) -> int: ...
def move(pieces: npt.NDArray[np.int64]) -> None: ...
