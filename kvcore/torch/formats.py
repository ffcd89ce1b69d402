# SPDX-License-Identifier: Apache-2.0
"""FRACTAL_NZ as a tag on memory.

On the device a tensor carries its format, and operators without a cache_mode go by it.  Here the
tag is kept on the tensor's storage, so that views and slices have it too and copies do not.  No
byte moves: a cache in FRACTAL_NZ has its physical shape, ``[nb, H*D // c0, bs, c0]``, in both.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from kvcore.errors import fail

__all__ = [
    "Format",
    "empty_with_format",
    "empty_with_swapped_memory",
    "get_npu_format",
    "is_nz",
    "npu_format_cast",
]

TAG = "_kvcore_format"
#: Whether a tag was ever given: asking for one costs as much as moving a token.
_tagging = False


class Format(enum.IntEnum):
    """The formats that a tag can name (acl/acl_base_rt.h)."""

    NCHW = 0
    ND = 2
    FRACTAL_NZ = 29


def is_nz(tensor: Tensor) -> bool:
    """Whether the tensor's memory is tagged FRACTAL_NZ."""
    if not _tagging or tensor.layout is not torch.strided:
        return False
    return getattr(tensor.untyped_storage(), TAG, None) == Format.FRACTAL_NZ


def get_npu_format(tensor: Tensor) -> int:
    """29 (FRACTAL_NZ) or 2 (ND)."""
    return int(Format.FRACTAL_NZ if is_nz(tensor) else Format.ND)


def npu_format_cast(tensor: Tensor, acl_format: int) -> Tensor:
    """29 tags the tensor's memory, and all views of it, as FRACTAL_NZ and returns the tensor.

    2 (ND) or 0 (NCHW) gives an untagged tensor: this one, or a copy of a tagged one, as on the
    device, where a cast makes a tensor of its own.
    """
    global _tagging
    if not isinstance(tensor, Tensor):
        fail("tensor", "a tensor", type(tensor).__name__)
    if isinstance(acl_format, bool) or acl_format not in list(Format):
        names = ", ".join(f"{f.value} ({f.name})" for f in Format)
        fail("acl_format", f"one of {names}", repr(acl_format))
    if acl_format == Format.FRACTAL_NZ:
        _tagging = True
        setattr(tensor.untyped_storage(), TAG, Format.FRACTAL_NZ)
        return tensor
    return tensor.clone() if is_nz(tensor) else tensor


def empty_with_format(
    size: Any, dtype: Any = None, device: Any = None, acl_format: int = Format.ND, **keywords: Any
) -> Tensor:
    """A tensor whose memory has that format: 29 (FRACTAL_NZ), 2 (ND) or 0 (NCHW).

    size: the shape as it lies in memory.  keywords: layout, pin_memory and base_addr, which the
    vendor's has too, mean nothing.
    """
    return npu_format_cast(_empty(size, dtype, device), acl_format)


def empty_with_swapped_memory(size: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """Host memory that the device can read in place: here, memory like all other."""
    return _empty(size, dtype, device)


def _empty(size: Any, dtype: Any, device: Any) -> Tensor:
    if device is not None and str(device).partition(":")[0] not in ("npu", "cpu"):
        fail("device", "'npu', 'cpu' or None", repr(device))
    return torch.empty(tuple(size), dtype=dtype)
