# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence

from kvcore._core.lanes import Lane
from kvcore._core.paged import PagedSpec
from kvcore.soc import SoC

class GatherSpec(PagedSpec):
    def __init__(
        self,
        outputs: tuple[int, ...],
        lanes: Sequence[Lane],
        num_tokens: int,
        batch: int,
        columns: int,
        blocks: int,
        block_size: int,
        totals: bool,
        table_arg: int,
        length_arg: int,
        offset_arg: int | None,
        words: Callable[[str, int, int, int], Exception],
        warnings: tuple[str, ...] = (),
        soc: SoC | None = None,
    ) -> None: ...
