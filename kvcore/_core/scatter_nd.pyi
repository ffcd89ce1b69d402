# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence

from kvcore._core.lanes import Lane
from kvcore._core.paged import PagedSpec

MAX_LANE_LOOPS: int

class NdSpec(PagedSpec):
    def __init__(
        self,
        lane: Lane,
        sizes: Sequence[int],
        steps: Sequence[int],
        tokens: Sequence[tuple[int, ...]],
        num_tokens: int,
        num_slots: int,
        index_arg: int,
        words: Callable[[int, int, int], Exception],
    ) -> None: ...
