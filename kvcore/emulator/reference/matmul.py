# SPDX-License-Identifier: Apache-2.0
"""Batched products with transposed operands, as MLA uses them around its attention."""

from __future__ import annotations

from typing import Any

import torch

from kvcore.emulator.operators import Special
from kvcore.emulator.reference.refusals import none_of, refuse

__all__ = ["TABLE"]

_OPERATOR = "npu_transpose_batchmatmul"


def _transposed(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    scale: Any = None,
    perm_x1: Any = None,
    perm_x2: Any = None,
    perm_y: Any = None,
    batch_split_factor: int | None = 1,
) -> Any:
    left = x.permute(perm_x1 or [0, 1, 2]).float()
    right = weight.permute(perm_x2 or [0, 1, 2]).float()
    found = torch.matmul(left, right).permute(perm_y or [1, 0, 2]).to(x.dtype)
    parts = batch_split_factor or 1
    if parts == 1:
        return found
    return found.reshape(found.shape[0], parts, -1).transpose(0, 1)


def _check(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    scale: Any = None,
    perm_x1: Any = None,
    perm_x2: Any = None,
    perm_y: Any = None,
    batch_split_factor: int | None = 1,
) -> None:
    none_of(_OPERATOR, {"bias": bias, "scale": scale})
    for name, tensor in (("input", x), ("weight", weight)):
        if tensor.dim() != 3:
            refuse(_OPERATOR, f"{name}: expected three axes, got {list(tensor.shape)}")
    left = [x.shape[i] for i in perm_x1 or [0, 1, 2]]
    right = [weight.shape[i] for i in perm_x2 or [0, 1, 2]]
    if left[0] != right[0] or left[2] != right[1]:
        refuse(_OPERATOR, f"expected [B, M, K] times [B, K, N], got {left} times {right}")


TABLE = {"npu_transpose_batchmatmul": Special(_transposed, check=_check)}
