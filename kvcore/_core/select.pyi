# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence
from typing import Any

from numpy import int64
from numpy.typing import NDArray

from kvcore._core.plan import Plan, Spec
from kvcore._core.selected import IndexArray, SelectionLane
from kvcore.soc import SoC

class SelectSpec(Spec):
    def __init__(
        self,
        outputs: tuple[int, ...],
        sizes: dict[str, Any],
        lanes: Sequence[SelectionLane],
        index_args: Sequence[IndexArray],
        words: Callable[[str, int, int, int, int], Exception],
        warnings: tuple[str, ...] = (),
        soc: SoC | None = None,
    ) -> None: ...
    def stats(self, plan: Plan) -> dict[str, NDArray[int64]]: ...
