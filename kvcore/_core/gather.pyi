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
        sizes: dict[str, int],
        index_args: tuple[int, int, int],
        words: Callable[[str, int, int, int], Exception],
        warnings: tuple[str, ...] = (),
        soc: SoC | None = None,
    ) -> None: ...
