# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence

from numpy import int64
from numpy.typing import NDArray

from kvcore._core.lanes import Lane, Level
from kvcore._core.plan import Plan, Spec
from kvcore.soc import SoC

INT64_MAX: int

class PagedSpec(Spec):
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    def row_accesses(
        self, plan: Plan, page_offset: int
    ) -> tuple[list[tuple[int, NDArray[int64]]], list[tuple[int, NDArray[int64]]]]: ...

class SlotSpec(PagedSpec):
    def __init__(
        self,
        outputs: tuple[int, ...],
        lanes: Sequence[Lane],
        num_tokens: int,
        block_size: int,
        num_slots: int,
        words: Callable[[int, int], Exception],
        slot_arg: int,
        warnings: tuple[str, ...] = (),
        soc: SoC | None = None,
    ) -> None: ...

class RangeSpec(PagedSpec):
    def __init__(
        self,
        outputs: tuple[int, ...],
        lanes: Sequence[Lane],
        num_tokens: int,
        block_size: int,
        gathers: bool,
        outer: Sequence[Level] = (),
    ) -> None: ...

class AppendSpec(PagedSpec):
    def __init__(
        self,
        outputs: tuple[int, ...],
        lanes: Sequence[Lane],
        sizes: dict[str, int],
        layer: int | None,
        index_args: tuple[int, int, int],
        words: Callable[[str, int, int, int], Exception],
        warnings: tuple[str, ...] = (),
        soc: SoC | None = None,
    ) -> None: ...
