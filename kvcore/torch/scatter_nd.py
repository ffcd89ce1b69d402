# SPDX-License-Identifier: Apache-2.0
"""Rows by index: the generic scatter that clients also write caches with.

Any dtype and any rank: what moves is bytes.  No SoC rules are applied, since the operator is
none of the KV-cache operators; a negative index writes nothing, of repeated ones the last wins.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcore._core.arrays import ArrayInfo
from kvcore._core.lanes import make_lane
from kvcore._core.paged import SlotSpec
from kvcore._core.plan import Operator, Plan, Spec
from kvcore.errors import ParamInvalidError, fail
from kvcore.ops import checks
from kvcore.soc import SoC

__all__ = ["plan_scatter_nd_update"]

ARGUMENTS = ("self", "indices", "updates")
SELF, INDICES, UPDATES = range(3)
MAX_LOOPS = 3


def plan_scatter_nd_update(target: Tensor, indices: Tensor, updates: Tensor) -> Plan:
    """A plan of ``target[indices[i, 0], ..., indices[i, a-1]] = updates[i]`` for every i.

    target:  [d0, d1, ...], written.  indices: [..., a] int32 or int64, a <= rank of target.
    updates: [..., *target.shape[a:]], of target's dtype.
    """
    if indices.dim() < 1 or not 1 <= indices.shape[-1] <= target.dim():
        axes = f"[..., a] with 1 <= a <= {target.dim()} (axes of self)"
        fail("indices", f"shape {axes}", list(indices.shape))
    if indices.dtype not in (torch.int32, torch.int64):
        fail("indices", "dtype int32 or int64", str(indices.dtype).removeprefix("torch."))
    depth = indices.shape[-1]
    wanted = (*indices.shape[:-1], *target.shape[depth:])
    if tuple(updates.shape) != wanted:
        fail("updates", f"shape {list(wanted)}", list(updates.shape))
    if updates.dtype is not target.dtype:
        fail("updates", f"dtype {target.dtype} as self", updates.dtype)
    rows = math.prod(indices.shape[:-1])
    flat = indices.reshape(rows, depth)
    slots = flat[:, 0] if depth == 1 else _flatten(flat, target.shape[:depth])
    source = updates.reshape(rows, *target.shape[depth:])
    return _SCATTER_ND.plan((target, slots, source), (depth,))


def _flatten(indices: Tensor, sizes: Any) -> Tensor:
    """Row-major places of index tuples; -1 where an index is negative."""
    sizes_ = torch.tensor(tuple(sizes))
    wide = indices.to(torch.int64)
    beyond = (wide >= sizes_).nonzero()
    if len(beyond):
        row, axis = beyond[0].tolist()
        _refuse(row, axis, int(wide[row, axis]), int(sizes_[axis]))
    places = torch.zeros(len(wide), dtype=torch.int64)
    for axis, size in enumerate(sizes):
        places = places * size + wide[:, axis]
    return places.where((wide >= 0).all(1), -1)


def _refuse(row: int, axis: int, seen: int, size: int) -> None:
    raise _fault(size, axis, row, seen)


def _fault(size: int, axis: int, row: int, seen: int) -> ParamInvalidError:
    expected = f"an index < {size} (axis {axis} of self)"
    return ParamInvalidError(
        f"indices[{row}, {axis}]: expected {expected}, got {seen}",
        argument="indices",
        seen=seen,
        expected=expected,
    )


def _resolve(infos: tuple[ArrayInfo | None, ...], params: tuple[int], soc: SoC | None) -> Spec:
    (depth,) = params
    target, slots, updates = (
        checks.need(info, name) for info, name in zip(infos, ARGUMENTS, strict=True)
    )
    checks.output(target)
    sizes, steps = target.shape[:depth], target.strides[:depth]
    # The last indexed axis is the row within a block; what lies before it must be one axis.
    blocks, block_stride = (1, 0) if depth == 1 else (sizes[-2], steps[-2])
    for axis in range(depth - 2):
        if sizes[axis] > 1 and steps[axis] != sizes[axis + 1] * steps[axis + 1]:
            fail("self", "leading axes that lie one after the other", f"strides {target.strides}")
        blocks *= sizes[axis]
    lane = make_lane(
        UPDATES,
        SELF,
        tok_stride=updates.strides[0],
        block_stride=block_stride,
        row_stride=steps[-1],
        levels=list(
            zip(target.shape[depth:], updates.strides[1:], target.strides[depth:], strict=True)
        ),
        item_bytes=target.itemsize,
    )
    if len(lane.levels) > MAX_LOOPS:
        fail("self", f"rows of at most {MAX_LOOPS} strided axes", f"strides {target.strides}")
    return SlotSpec(
        (SELF,),
        [lane],
        slots.shape[0],
        max(sizes[-1], 1),
        blocks * sizes[-1],
        partial(_fault, sizes[0], 0),
        INDICES,
    )


_SCATTER_ND = Operator("npu_scatter_nd_update_", ARGUMENTS, _resolve)
