# SPDX-License-Identifier: Apache-2.0
"""RmsNorm and its relatives: the last axes, as many as gamma has, are divided by their root mean
square and multiplied by gamma."""

from __future__ import annotations

from typing import Any

import torch

from kvcore.emulator.operators import Special
from kvcore.emulator.reference.refusals import refuse

__all__ = ["TABLE", "rms_norm"]


def rms_norm(x: Any, gamma: Any, epsilon: float) -> tuple[Any, Any]:
    """(float32 result, float32 reciprocal of the root mean square with axes of 1)."""
    axes = tuple(range(x.dim() - gamma.dim(), x.dim()))
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    return wide * rstd * gamma.float(), rstd


def _fits(operator: str, x: Any, gamma: Any) -> None:
    axes = gamma.dim()
    if not 1 <= axes <= x.dim() or tuple(x.shape[x.dim() - axes :]) != tuple(gamma.shape):
        refuse(
            operator,
            f"gamma: expected the last axes of {list(x.shape)}, got shape {list(gamma.shape)}",
        )


def _rms_norm(x: Any, gamma: Any, epsilon: float = 1e-6) -> tuple[Any, Any]:
    y, rstd = rms_norm(x, gamma, epsilon)
    return y.to(x.dtype), rstd


def _check(x: Any, gamma: Any, epsilon: float = 1e-6) -> None:
    _fits("npu_rms_norm", x, gamma)


def _gemma(x: Any, gamma: Any, epsilon: float = 1e-6) -> tuple[Any, Any]:
    y, rstd = rms_norm(x, 1 + gamma.float(), epsilon)
    return y.to(x.dtype), rstd


def _check_gemma(x: Any, gamma: Any, epsilon: float = 1e-6) -> None:
    _fits("npu_gemma_rms_norm", x, gamma)


def _add_rms_norm(x1: Any, x2: Any, gamma: Any, epsilon: float = 1e-6) -> tuple[Any, Any, Any]:
    total = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = rms_norm(total, gamma, epsilon)
    return y.to(x1.dtype), rstd, total


def _check_add(x1: Any, x2: Any, gamma: Any, epsilon: float = 1e-6) -> None:
    _fits("npu_add_rms_norm", x1, gamma)
    if x1.shape != x2.shape or x1.dtype != x2.dtype:
        refuse(
            "npu_add_rms_norm",
            f"x2: expected {list(x1.shape)} {x1.dtype}, got {list(x2.shape)} {x2.dtype}",
        )


TABLE = {
    "npu_rms_norm": Special(_rms_norm, check=_check),
    "npu_gemma_rms_norm": Special(_gemma, check=_check_gemma),
    "npu_add_rms_norm": Special(_add_rms_norm, check=_check_add),
}
