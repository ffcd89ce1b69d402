# SPDX-License-Identifier: Apache-2.0
"""Quantisation to 8-bit integers."""

from __future__ import annotations

from typing import Any

import torch

from kvcore.emulator.operators import Special
from kvcore.emulator.reference.refusals import none_of, one_of, refuse

__all__ = ["TABLE", "to_int8"]

#: The numbers by which torch's operators name types: int8 and qint8, uint8 and quint8, int32 and
#: qint32.
_INT8, _UINT8, _INT32 = (1, 12), (0, 13), (3, 14)


def to_int8(x: Any) -> Any:
    """Rounded to even, and held within -128 .. 127."""
    return torch.round(x).clamp(-128, 127).to(torch.int8)


def _along(values: Any, x: Any, axis: int) -> Any:
    """One value for each index of an axis; several axes or one value are broadcast as they are."""
    if values.dim() != 1 or values.numel() == 1:
        return values.float()
    shape = [1] * x.dim()
    shape[axis] = -1
    return values.float().view(shape)


def _quantize(
    x: Any, scales: Any, zero_points: Any, dtype: int, axis: int = 1, div_mode: bool = True
) -> Any:
    if not div_mode and axis == -1 and scales.dim() == 1:
        scale = scales.float()
        zero = 0 if zero_points is None else zero_points.float()
    else:
        scale = _along(scales, x, axis)
        zero = 0 if zero_points is None else _along(zero_points, x, axis)
    wide = x.float()
    found = torch.round(wide / scale) + zero if div_mode else torch.round(wide * scale + zero)
    if dtype in _INT32:
        return found.double().clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32)
    if dtype in _UINT8:
        return found.clamp(0, 255).to(torch.uint8)
    return found.clamp(-128, 127).to(torch.int8)


def _check_quantize(
    x: Any, scales: Any, zero_points: Any, dtype: int, axis: int = 1, div_mode: bool = True
) -> None:
    one_of("npu_quantize", "dtype", int(dtype), _INT8 + _UINT8 + _INT32)
    if not -x.dim() <= axis < x.dim():
        refuse("npu_quantize", f"axis: expected an axis of {list(x.shape)}, got {axis}")
    if scales.dim() == 1 and scales.numel() not in (1, x.shape[axis]):
        refuse(
            "npu_quantize",
            f"scales: expected 1 or {x.shape[axis]} values, got {scales.numel()}",
        )


def _dynamic_quant(
    x: Any,
    *,
    smooth_scales: Any = None,
    group_index: Any = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Any, Any]:
    wide = x.float() if smooth_scales is None else x.float() * smooth_scales.float()
    if quant_mode == "pertoken":
        most = wide.abs().amax(-1, keepdim=True)
    elif quant_mode == "perchannel":
        most = wide.abs().amax(-2, keepdim=True)
    else:
        most = wide.abs().amax()
    scale = most / 127
    found = to_int8(torch.where(scale > 0, wide / scale, torch.zeros_like(wide)))
    axis = {"pertoken": -1, "perchannel": -2}.get(quant_mode)
    return found, scale.reshape(1) if axis is None else scale.squeeze(axis)


def _check_dynamic_quant(
    x: Any,
    *,
    smooth_scales: Any = None,
    group_index: Any = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> None:
    operator = "npu_dynamic_quant"
    none_of(operator, {"group_index": group_index, "dst_type_max": dst_type_max})
    one_of(operator, "dst_type", None if dst_type is None else int(dst_type), (None, *_INT8))
    one_of(operator, "quant_mode", quant_mode, ("pertoken", "pertensor", "perchannel"))
    if x.dim() < 2:
        refuse(operator, f"input: expected two axes or more, got {list(x.shape)}")
    if smooth_scales is not None and tuple(smooth_scales.shape) != (x.shape[-1],):
        refuse(
            operator,
            f"smooth_scales: expected [{x.shape[-1]}], got {list(smooth_scales.shape)}",
        )


TABLE = {
    "npu_quantize": Special(_quantize, check=_check_quantize),
    "npu_dynamic_quant": Special(_dynamic_quant, check=_check_dynamic_quant),
}
