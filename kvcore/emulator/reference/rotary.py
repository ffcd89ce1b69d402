# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: pairs of elements are turned by the angle of their position.

"half" pairs element i with i + D/2, "interleave" elements 2i and 2i + 1.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcore.emulator.operators import Special
from kvcore.emulator.reference.refusals import one_of, refuse

__all__ = ["TABLE", "deinterleaved", "turned"]

_MODES = ("half", "interleave")


def _partner(x: Any, mode: str) -> Any:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def turned(x: Any, cos: Any, sin: Any, mode: str = "half") -> Any:
    """Float32 x * cos + partner * sin."""
    wide = x.float()
    return wide * cos.float() + _partner(wide, mode) * sin.float()


def deinterleaved(x: Any) -> Any:
    """Elements 0, 2, 4 ... in the first half, 1, 3, 5 ... in the second."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def _rotary_mul(x: Any, r1: Any, r2: Any, rotary_mode: str = "half", rotate: Any = None) -> Any:
    if rotate is None:
        return turned(x, r1, r2, rotary_mode).to(x.dtype)
    wide = x.float()  # rotate says which element each is paired with
    return (wide * r1.float() + (wide @ rotate.float()) * r2.float()).to(x.dtype)


def _check_rotary_mul(
    x: Any, r1: Any, r2: Any, rotary_mode: str = "half", rotate: Any = None
) -> None:
    one_of("npu_rotary_mul", "rotary_mode", rotary_mode, _MODES)
    if rotate is not None and list(rotate.shape) != [x.shape[-1]] * 2:
        refuse(
            "npu_rotary_mul",
            f"rotate: expected {[x.shape[-1]] * 2}, got {list(rotate.shape)}",
        )
    if x.shape[-1] % 2 or x.shape[-1] != r1.shape[-1] or r1.shape != r2.shape:
        refuse(
            "npu_rotary_mul",
            f"expected r1 and r2 alike with x's even last axis, got {list(x.shape)}, "
            f"{list(r1.shape)}, {list(r2.shape)}",
        )


def _interleave_rope(x: Any, cos: Any, sin: Any) -> Any:
    return turned(deinterleaved(x), cos, sin).to(x.dtype)


def _check_interleave_rope(x: Any, cos: Any, sin: Any) -> None:
    if x.dim() != 4 or x.shape[-1] % 2 or cos.shape != sin.shape or cos.shape[-1] != x.shape[-1]:
        refuse(
            "npu_interleave_rope",
            "expected x [B, N, S, D] with an even D, cos and sin [B or 1, 1 or N, S or 1, D], got "
            f"{list(x.shape)}, {list(cos.shape)}, {list(sin.shape)}",
        )


def _apply(
    query: Any, key: Any, cos: Any, sin: Any, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Any, Any]:
    for x in (query, key):
        x.copy_(turned(x, cos, sin, rotary_mode))
    return query, key


def _check_apply(
    query: Any, key: Any, cos: Any, sin: Any, layout: str = "BSND", rotary_mode: str = "half"
) -> None:
    one_of("npu_apply_rotary_pos_emb", "rotary_mode", rotary_mode, _MODES)
    one_of("npu_apply_rotary_pos_emb", "layout", layout, ("BSND", "BSH", "SBND", "BNSD", "TND"))
    for name, x in (("query", query), ("key", key)):
        if x.shape[-1] % 2 or x.shape[-1] != cos.shape[-1] or cos.shape != sin.shape:
            refuse(
                "npu_apply_rotary_pos_emb",
                f"{name}: expected an even last axis as cos and sin have, got {list(x.shape)}, "
                f"{list(cos.shape)}, {list(sin.shape)}",
            )


def _mrope(
    positions: Any,
    query: Any,
    key: Any,
    cos_sin_cache: Any,
    head_size: int,
    *,
    mrope_section: Any = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Any, Any]:
    cos, sin = cos_sin_cache[positions.long()].float().chunk(2, -1)  # [(3,) tokens, rotary / 2]
    if mrope_section and any(mrope_section):
        parts = [part.split(list(mrope_section), -1) for part in (cos, sin)]
        cos, sin = (torch.cat([p[axis][axis] for axis in range(3)], -1) for p in parts)
    elif positions.dim() == 2:
        cos, sin = cos[0], sin[0]
    mode = rotary_mode or "half"
    if mode == "half":
        cos, sin = (torch.cat((part, part), -1).unsqueeze(1) for part in (cos, sin))
    else:
        cos, sin = (part.repeat_interleave(2, -1).unsqueeze(1) for part in (cos, sin))
    width = cos.shape[-1]
    made = []
    for x in (query, key):
        heads = x.reshape(x.shape[0], -1, head_size)
        front = turned(heads[..., :width], cos, sin, mode).to(x.dtype)
        made.append(torch.cat((front, heads[..., width:]), -1).reshape(x.shape))
    return made[0], made[1]


def _check_mrope(
    positions: Any,
    query: Any,
    key: Any,
    cos_sin_cache: Any,
    head_size: int,
    *,
    mrope_section: Any = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> None:
    one_of("npu_mrope", "rotary_mode", rotary_mode, (None, *_MODES))
    one_of("npu_mrope", "cache_mode", cache_mode, (None, "default"))
    sections = bool(mrope_section) and any(mrope_section)
    half = cos_sin_cache.shape[-1] // 2
    if sections and (positions.dim() != 2 or positions.shape[0] != 3):
        refuse("npu_mrope", f"positions: expected [3, tokens], got {list(positions.shape)}")
    if sections and (len(mrope_section) != 3 or sum(mrope_section) != half):
        refuse("npu_mrope", f"mrope_section: expected three numbers of sum {half}")
    for name, x in (("query", query), ("key", key)):
        if x.dim() != 2 or x.shape[-1] % head_size or x.shape[0] != positions.shape[-1]:
            refuse(
                "npu_mrope",
                f"{name}: expected [{positions.shape[-1]}, heads * {head_size}], got "
                f"{list(x.shape)}",
            )
    if 2 * half > head_size:
        refuse("npu_mrope", f"cos_sin_cache: expected at most {head_size} columns, got {2 * half}")


TABLE = {
    "npu_rotary_mul": Special(_rotary_mul, check=_check_rotary_mul),
    "npu_interleave_rope": Special(_interleave_rope, check=_check_interleave_rope),
    "npu_apply_rotary_pos_emb": Special(
        _apply, check=_check_apply, writes=("query", "key"), returns=("query", "key")
    ),
    "npu_mrope": Special(_mrope, check=_check_mrope),
}
