# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence

from kvcore._core.lanes import WindowLane
from kvcore._core.plan import Spec
from kvcore.soc import SoC

class WindowsSpec(Spec):
    def __init__(
        self,
        outputs: tuple[int, ...],
        lanes: Sequence[WindowLane],
        sizes: dict[str, int],
        kind: int,
        index_args: tuple[int, int, int, int],
        words: Callable[[str, int, int, int], Exception],
        warnings: tuple[str, ...] = (),
        soc: SoC | None = None,
    ) -> None: ...
    @property
    def batch(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
