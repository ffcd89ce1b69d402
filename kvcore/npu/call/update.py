# SPDX-License-Identifier: Apache-2.0
"""KVCacheOperation without ATB: a key-only ScatterPaKvCache over the layer's slice.

ATB has no C interface for it.  Two ways have the same effect: a copy per request, or a scatter
whose slots are the rows' places.  The scatter is one launch whatever the batch, where copies are
one descriptor a request (and a descriptor costs as much as many rows); it is chosen for that.
What it rests on: past[layer], seen as [batch, max_seq, 1, hidden], is a paged cache of ``batch``
blocks of ``max_seq`` rows, and position p of request b is slot b * max_seq + p.

The slots follow from token_offset and seq_len, so their values are needed on the host: given
there they cost nothing; from the device they are copied back, and the call waits for its stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore._core.plan import Plan
from kvcore.dtypes import BY_NAME
from kvcore.npu.call.arrays import Argument
from kvcore.npu.call.call import PLACEHOLDER_BYTES, OperatorCall, Placed, required
from kvcore.npu.call.memory import Room
from kvcore.npu.call.tensors import TensorHandles
from kvcore.soc import SoC
from kvcore.strides import dense_strides

__all__ = ["UpdateCall"]

NEW_KV, LAYER_ID, PAST, TOKEN_OFFSET, SEQ_LEN = range(5)


class UpdateCall(OperatorCall):
    """Append each request's tokens to one layer."""

    function = "aclnnScatterPaKvCache"
    outputs: frozenset[str] = frozenset({"past"})
    host_values: tuple[str, ...] = ("layer_id", "token_offset", "seq_len")

    def __init__(self, plan: Plan, arguments: list[Argument | None], soc: SoC) -> None:
        super().__init__(plan, arguments, soc)
        self.layer: int = self.case.layer
        self.take_for((NEW_KV, PAST), self.case.dtype)
        # The slice of a layer must be contiguous; the layers may lie apart.
        self.settle_strides({"past": 1})
        self.ask_the_table()
        self.slots: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def is_empty(self) -> bool:
        """Whether the call has no tokens."""
        return self.argument("new_kv").size == 0

    def values(self, found: dict[str, Any]) -> None:
        """Layer and slots of this run, from values that have been checked."""
        if "layer_id" in found:
            self.layer = int(found["layer_id"][0])
        offsets = found["token_offset"].astype(np.int64)
        lengths = found["seq_len"].astype(np.int64)
        max_seq = self.argument("past").shape[2]
        first = np.arange(len(lengths)) * max_seq + offsets - lengths
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        slots = np.repeat(first, lengths) + within
        bound = len(lengths) * max_seq
        self.slots = slots.astype(np.int32 if bound < 2**31 else np.int64)

    def returned(self) -> Any:
        """The array that the call returns: the caller's own cache."""
        return self.argument("past").source

    def phase_one(
        self, handles: TensorHandles, placed: Placed, room: Room, answer: Argument | None
    ) -> list[Any]:
        """The arguments of a key-only scatter: 0-dim tensors stand in the value's place."""
        past, new = required(placed, PAST), required(placed, NEW_KV)
        assert past.element is not None
        _, batch, max_seq, hidden = past.shape
        item = past.itemsize
        cache_shape = (batch, max_seq, 1, hidden)
        cache = past.seen_as(
            cache_shape, dense_strides(cache_shape, item), self.layer * past.strides[0]
        )
        key_shape = (new.size // hidden, 1, hidden)
        key = new.seen_as(key_shape, dense_strides(key_shape, item))
        kind = BY_NAME[self.slots.dtype.name]
        like = new._replace(name="slots", itemsize=kind.itemsize, element=kind)
        shape = self.slots.shape
        slots = like.seen_as(shape, self.slots.strides).placed(room.put(self.slots))
        place = room.take("no value", PLACEHOLDER_BYTES)
        return [
            handles.tensor(key),
            handles.tensor(cache),
            handles.tensor(slots),
            handles.scalar(past.element, place),
            handles.scalar(past.element, place),
            None,
            None,
            None,
            b"Norm",
            b"None",
            None,
            None,
        ]
