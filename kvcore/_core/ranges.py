# SPDX-License-Identifier: Apache-2.0
"""Exact byte ranges of the rows a run touched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core.overlap import merge

__all__ = ["count_pieces", "linear", "paged"]

Indices = NDArray[np.int64]


def _pieces(lane: Any, starts: Indices, steps: Any) -> Indices:
    for level in range(lane["levels"]):
        steps_here = np.arange(lane["n"][level], dtype=np.int64) * steps[level]
        starts = (starts[:, None] + steps_here).reshape(-1)
    return merge(starts, lane["bytes"])


def linear(lane: Any, base: int, slots: Indices) -> Indices:
    """Ranges of the tokens that have a slot, on the linear side."""
    tokens = np.flatnonzero(slots >= 0)
    inner = lane["tok_inner"]
    if inner:
        starts = tokens // inner * lane["tok_outer_stride"] + tokens % inner * lane["tok_stride"]
    else:
        starts = tokens * lane["tok_stride"]
    return _pieces(lane, starts + base, lane["tok_step"])


def paged(lane: Any, base: int, slots: Indices) -> Indices:
    """Ranges of the slots in use, on the paged side."""
    used = slots[slots >= 0]
    size = lane["block_size"]
    starts = used // size * lane["block_stride"] + used % size * lane["row_stride"]
    return _pieces(lane, starts + base, lane["page_step"])


def count_pieces(lane: Any, slots: Indices) -> int:
    """Contiguous pieces that a run copies in one lane, neighbours joined as the kernel does."""
    used = slots >= 0
    if lane["levels"]:
        per_token: int = math.prod(lane["n"])
        return int(used.sum()) * per_token
    bytes_ = lane["bytes"]
    if lane["tok_inner"] or lane["tok_stride"] != bytes_ or lane["row_stride"] != bytes_:
        return int(used.sum())
    joined = used[1:] & used[:-1] & (slots[1:] == slots[:-1] + 1)
    if not lane["flat"]:
        joined &= slots[1:] % lane["block_size"] != 0
    return int(used.sum() - joined.sum())
