# SPDX-License-Identifier: Apache-2.0
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from kvcore.runtime.queues._executor import Line
from kvcore.runtime.queues._marks import Op
from kvcore.runtime.watching._order import Order
from kvcore.runtime.watching._shadow import Shadow

@final
@disjoint_base
class Accessor:
    name: str
    stream: str
    site: Any
    number: float
    def __new__(cls, name: str, stream: str, site: Any, number: float) -> Self: ...

@disjoint_base
class Watch(Order):
    shadow: Shadow
    records: list[tuple[Accessor, str]]
    gone: deque[tuple[int, int, int]]
    roots: dict[int, Callable[[], object]]
    kept: dict[int, object]
    next_sweep: int
    def found(
        self,
        hits: Sequence[tuple[int, int, int, int]],
        record: Accessor,
        argument: str,
        write: bool,
        owner: object,
    ) -> None: ...
    def forget(self) -> None: ...
    def ran(self, line: Line, op: Op) -> None: ...
    def dropped(self, op: Op) -> None: ...
    def host_access(
        self, owner: object, ranges: npt.NDArray[np.int64], write: bool, name: str, site: Any
    ) -> None: ...
    def function_access(
        self,
        line: Line,
        op: Op,
        owner: object,
        ranges: npt.NDArray[np.int64],
        write: bool,
    ) -> None: ...

@final
@disjoint_base
class Gone:
    def __init__(self, gone: deque[tuple[int, int, int]], entry: tuple[int, int, int]) -> None: ...
    def __call__(self, reference: object) -> None: ...
