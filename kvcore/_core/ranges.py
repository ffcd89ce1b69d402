# SPDX-License-Identifier: Apache-2.0
"""Exact byte ranges of the rows a run touched."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core.overlap import merge

__all__ = ["linear", "paged"]

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
