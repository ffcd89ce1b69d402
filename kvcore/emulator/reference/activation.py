# SPDX-License-Identifier: Apache-2.0
"""Gated activations."""

from __future__ import annotations

from typing import Any

import torch

from kvcore.emulator.operators import Special
from kvcore.emulator.reference.refusals import refuse

__all__ = ["TABLE"]


def _swiglu(x: Any, dim: int = -1) -> Any:
    gate, value = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * value).to(x.dtype)


def _check_swiglu(x: Any, dim: int = -1) -> None:
    if not -x.dim() <= dim < x.dim() or x.shape[dim] % 2:
        refuse("npu_swiglu", f"dim: expected an even axis of {list(x.shape)}, got {dim}")


def _silu(x: Any) -> Any:
    return torch.nn.functional.silu(x.float()).to(x.dtype)


def _fast_gelu(x: Any) -> Any:
    wide = x.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


TABLE = {
    "npu_swiglu": Special(_swiglu, check=_check_swiglu),
    "npu_silu": Special(_silu),
    "npu_fast_gelu": Special(_fast_gelu),
}
