# SPDX-License-Identifier: Apache-2.0
"""aclnnGatherPaKvCache."""

from __future__ import annotations

from typing import Any

from kvcore._core.plan import Plan
from kvcore.npu.call.arrays import Argument
from kvcore.npu.call.call import OperatorCall, Placed, optional, required
from kvcore.npu.call.memory import Room
from kvcore.npu.call.tensors import TensorHandles
from kvcore.soc import SoC

__all__ = ["GatherCall"]

KEY_CACHE, VALUE_CACHE, TABLES, SEQ_LENS, KEY, VALUE, SEQ_OFFSET = range(7)


class GatherCall(OperatorCall):
    """The tokens of each request; the mode goes by its string, whatever the tensors' format."""

    function = "aclnnGatherPaKvCache"
    outputs: frozenset[str] = frozenset({"key", "value"})

    def __init__(self, plan: Plan, arguments: list[Argument | None], soc: SoC) -> None:
        super().__init__(plan, arguments, soc)
        self.cache_mode: Any = self.case.cache_mode
        self.totals: Any = self.case.totals
        for lane, kind in zip(self.case.lanes, self.case.dtypes, strict=True):
            self.take_for(lane, kind)
        self.settle_strides(self._free_axes())
        self.ask_the_table()

    def _free_axes(self) -> dict[str, int]:
        if self.soc.profile.gather.outer_strides:
            return {
                one.name: len(one.shape) - 1
                for i, one in enumerate(self.arguments)
                if one is not None and i in (KEY_CACHE, VALUE_CACHE, KEY, VALUE)
            }
        # Only the kernel for Norm caches looks at the block stride.
        return {"key_cache": 1, "value_cache": 1} if self.cache_mode == "Norm" else {}

    def may_copy(self, argument: Argument) -> bool:
        """Everything but the caches, which would be copied whole at each call."""
        return not argument.name.endswith("_cache")

    def is_empty(self) -> bool:
        """Whether there are no tokens, no requests, or no bytes in a token."""
        outputs = [self.argument("key"), self.argument("value")]
        return self.argument("block_tables").shape[0] == 0 or all(one.size == 0 for one in outputs)

    def phase_one(
        self, handles: TensorHandles, placed: Placed, room: Room, answer: Argument | None
    ) -> list[Any]:
        """The arguments in the operator's order; is_seq_lens_cumsum is always passed."""
        return [
            handles.tensor(required(placed, KEY_CACHE)),
            handles.tensor(required(placed, VALUE_CACHE)),
            handles.tensor(required(placed, TABLES)),
            handles.tensor(required(placed, SEQ_LENS)),
            handles.tensor(required(placed, KEY)),
            handles.tensor(required(placed, VALUE)),
            optional(handles, placed[SEQ_OFFSET]),
            self.cache_mode.encode(),
            self.totals,
        ]
