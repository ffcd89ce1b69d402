# SPDX-License-Identifier: Apache-2.0
"""Rows by index: the generic scatter that clients also write caches with.

Any dtype, rank and strides: what moves is bytes.  No SoC rules are applied, since the operator is
none of the KV-cache operators; a negative index writes nothing, of repeated ones the last wins.
Indices and updates are read when the plan runs, whatever their shape and strides.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvcore._core.arrays import ArrayInfo
from kvcore._core.lanes import make_lane
from kvcore._core.plan import Operator, Plan, Spec
from kvcore._core.scatter_nd import NdSpec
from kvcore.errors import ParamInvalidError, fail
from kvcore.ops import checks
from kvcore.soc import SoC
from kvcore.strides import join, moving_strides

__all__ = ["plan_scatter_nd_update"]

ARGUMENTS = ("self", "indices", "updates")
SELF, INDICES, UPDATES = range(3)


def plan_scatter_nd_update(target: Tensor, indices: Tensor, updates: Tensor) -> Plan:
    """A plan of ``target[indices[i, 0], ..., indices[i, a-1]] = updates[i]`` for every i.

    target:  [d0, d1, ...], written; any strides.  indices: [..., a] int32 or int64, 1 <= a <= rank
    of target.  updates: [..., *target.shape[a:]], of target's dtype.

    ParamInvalidError, with nothing written, for an index that is not below the size of its axis.
    """
    if indices.dim() < 1 or not 1 <= indices.shape[-1] <= target.dim():
        axes = f"[..., a] with 1 <= a <= {target.dim()} (axes of self)"
        fail("indices", f"shape {axes}", list(indices.shape))
    if indices.dtype not in (torch.int32, torch.int64):
        fail("indices", "dtype int32 or int64", str(indices.dtype).removeprefix("torch."))
    wanted = (*indices.shape[:-1], *target.shape[indices.shape[-1] :])
    if tuple(updates.shape) != wanted:
        fail("updates", f"shape {list(wanted)}", list(updates.shape))
    if updates.dtype is not target.dtype:
        fail("updates", f"dtype {target.dtype} as self", updates.dtype)
    return _SCATTER_ND.plan((target, indices, updates), ())


def _fault(
    lead: tuple[int, ...], sizes: tuple[int, ...], token: int, axis: int, seen: int
) -> ParamInvalidError:
    """The error of an index that is not below the size of its axis."""
    place = [int(i) for i in np.unravel_index(token, lead)] if lead else []
    expected = f"an index < {sizes[axis]} (axis {axis} of self)"
    return ParamInvalidError(
        f"indices{[*place, axis]}: expected {expected}, got {seen}",
        argument="indices",
        seen=seen,
        expected=expected,
    )


def _resolve(infos: tuple[ArrayInfo | None, ...], params: tuple[()], soc: SoC | None) -> Spec:
    target, indices, updates = (
        checks.need(info, name) for info, name in zip(infos, ARGUMENTS, strict=True)
    )
    checks.output(target)
    *lead, depth = indices.shape
    sizes = target.shape[:depth]
    # Only strides of axes of two and more lead anywhere.
    used = moving_strides(sizes, target.strides[:depth])
    row_bytes = target.itemsize * math.prod(target.shape[depth:])
    unit = math.gcd(*used) or max(row_bytes, 1)
    steps = [step // unit for step in used]
    highest = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    lane = make_lane(
        UPDATES,
        SELF,
        tok_stride=0,
        block_stride=0,
        row_stride=unit,
        levels=list(
            zip(
                target.shape[depth:],
                updates.strides[len(lead) :],
                target.strides[depth:],
                strict=True,
            )
        ),
        item_bytes=target.itemsize,
    )
    tokens = join(zip(lead, updates.strides[: len(lead)], strict=True))
    if tokens:
        lane = lane._replace(tok_stride=tokens[-1][1])
    if len(tokens) == 2:
        lane = lane._replace(tok_inner=tokens[1][0], tok_outer_stride=tokens[0][1])
    return NdSpec(
        lane,
        sizes,
        steps,
        tokens,
        math.prod(lead),
        0 if 0 in sizes else highest + 1,
        INDICES,
        partial(_fault, tuple(lead), sizes),
    )


_SCATTER_ND = Operator("npu_scatter_nd_update_", ARGUMENTS, _resolve)
