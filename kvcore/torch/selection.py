# SPDX-License-Identifier: Apache-2.0
"""npu_gather_selection_kv_cache: query lengths that clients pass in either of two ways."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import kvcore
from kvcore._core.arrays import read
from kvcore._core.plan import Plan
from kvcore.soc import current
from kvcore.torch.calls import Call
from kvcore.torch.formats import check_nd

__all__ = ["are_totals", "select"]

INDEX_DTYPES = (torch.int32, torch.int64)


def select(soc: Any, *arrays: Tensor, selection_topk_block_size: int = 64) -> Call:
    """The call of npu_gather_selection_kv_cache; its arguments are the operator's."""
    table, topk, q_lens = arrays[2], arrays[4], arrays[9]
    read(q_lens, "full_q_actual_seq")
    check_nd(
        selection_k_rope=arrays[0],
        selection_kv_cache=arrays[1],
        full_k_rope=arrays[5],
        full_kv_cache=arrays[6],
    )
    choice = _Lengths(
        partial(
            kvcore.plan_gather_selection_kv_cache,
            *arrays,
            selection_topk_block_size=selection_topk_block_size,
            # What holds at the call holds when it runs, in whichever thread that is.
            soc=current() if soc is None else soc,
        ),
        q_lens,
        topk,
    )
    plan = choice.made(totals=False)
    lengths = table.new_empty((table.shape[0],), dtype=torch.int32)
    return Call(plan, lengths, lengths, choice=choice)


class _Lengths:
    """The plan for query lengths and the one for running totals.

    The lengths decide when the call runs, since they are the device's and may be written until
    then.
    """

    def __init__(self, make: partial[Plan], q_lens: Tensor, topk: Tensor) -> None:
        self._make = make
        self._q_lens = q_lens
        self._topk = topk
        self._made: dict[bool, Plan] = {}

    def made(self, totals: bool) -> Plan:
        """The plan of that kind."""
        if totals not in self._made:
            self._made[totals] = self._make(q_lens_cumulative=totals)
        return self._made[totals]

    def plan(self) -> Plan:
        """The plan that the lengths ask for now."""
        return self.made(are_totals(self._q_lens, self._topk))

    def prepare(self) -> None:
        """Make both."""
        self.made(True)


def are_totals(q_lens: Tensor, topk: Tensor) -> bool:
    """Whether query lengths are running totals.

    Clients pass either.  They are totals when one exceeds S, which no length may, and they rise
    from 0 in steps of 0 to S, which lengths that broke the rule would hardly do.
    """
    if not q_lens.numel():
        return False
    if q_lens.dim() != 1 or topk.dim() not in (3, 4) or q_lens.dtype not in INDEX_DTYPES:
        return False
    steps = topk.shape[1] if topk.dim() == 4 else topk.shape[0] // len(q_lens)
    totals: list[int] = q_lens.tolist()
    rises = [b - a for a, b in zip([0, *totals[:-1]], totals, strict=True)]
    return max(totals) > steps and all(0 <= rise <= steps for rise in rises)
