# SPDX-License-Identifier: Apache-2.0
"""aclnnGatherSelectionKvCache, a custom operator that is installed in addition to CANN."""

from __future__ import annotations

from typing import Any

from kvcore._core.plan import Plan
from kvcore.errors import fail
from kvcore.npu.call.arrays import Argument
from kvcore.npu.call.call import PLACEHOLDER_BYTES, OperatorCall, Placed, required
from kvcore.npu.call.memory import Room
from kvcore.npu.call.tensors import TensorHandles
from kvcore.npu.cann.library import Cann
from kvcore.soc import SoC

__all__ = ["SelectionCall"]

ROPE, CACHE, TABLE, STATUS, TOPK, FULL_ROPE, FULL_CACHE, FULL_TABLE, KV_LENS, Q_LENS = range(10)


class SelectionCall(OperatorCall):
    """Bring each row's blocks into its selection; the lengths are a new array on the device.

    The vendor's kernels leave alone a row without tokens, which kvcore's own empties, and read no
    more of the query lengths than the documents say: running totals have to be made lengths by
    the caller.
    """

    function = "aclnnGatherSelectionKvCache"
    outputs: frozenset[str] = frozenset(
        {
            *("selection_k_rope", "selection_kv_cache"),
            *("selection_kv_block_table", "selection_kv_block_status"),
        }
    )

    def __init__(self, plan: Plan, arguments: list[Argument | None], soc: SoC) -> None:
        super().__init__(plan, arguments, soc)
        self.block: Any = self.case.block
        if self.case.cumulative:
            fail("q_lens_cumulative", "False on an NPU (pass lengths)", True)
        self.without_rope: bool = self.case.infos[ROPE] is None
        if self.without_rope:
            self.arguments[ROPE] = self.arguments[FULL_ROPE] = None
        self.take_for((ROPE, CACHE, FULL_ROPE, FULL_CACHE), self.case.dtype)
        self.settle_strides({})
        self.ask_the_table()

    def may_copy(self, argument: Argument) -> bool:
        """Everything but the caches, which would be copied whole at each call."""
        return not argument.name.startswith("full_k_rope") and argument.name != "full_kv_cache"

    def is_empty(self) -> bool:
        """Whether there are no rows, or rows with a top-k of 0."""
        return self.argument("selection_topk_indices").size == 0

    def leave_empty(self, cann: Cann, stream: int) -> None:
        """With a top-k of 0 the status holds only the lengths, which become 0."""
        status = self.argument("selection_kv_block_status")
        if status.nbytes:
            cann.aclrtMemsetAsync(status.address, status.nbytes, 0, status.nbytes, stream)

    def answer_rows(self) -> int:
        """The number of rows of the table: each gets a length, 0 where the call has no such row."""
        return self.argument("selection_kv_block_table").shape[0]

    def phase_one(
        self, handles: TensorHandles, placed: Placed, room: Room, answer: Argument | None
    ) -> list[Any]:
        """The arguments in the order of the operator's definition; the block size goes by value."""
        cache = required(placed, CACHE)
        assert answer is not None
        assert cache.element is not None
        if self.without_rope:
            place = room.take("no rope", PLACEHOLDER_BYTES)
            rope = handles.empty(cache.element, place)
            full_rope = handles.empty(cache.element, place)
        else:
            rope = handles.tensor(required(placed, ROPE))
            full_rope = handles.tensor(required(placed, FULL_ROPE))
        return [
            rope,
            handles.tensor(cache),
            handles.tensor(required(placed, TABLE)),
            handles.tensor(required(placed, STATUS)),
            handles.tensor(required(placed, TOPK)),
            full_rope,
            handles.tensor(required(placed, FULL_CACHE)),
            handles.tensor(required(placed, FULL_TABLE)),
            handles.tensor(required(placed, KV_LENS)),
            handles.tensor(required(placed, Q_LENS)),
            self.block,
            handles.tensor(answer),
        ]
