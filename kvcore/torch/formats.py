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
from kvcore.torch.device_alias import place

__all__ = [
    "Format",
    "check_nd",
    "empty_with_format",
    "empty_with_swapped_memory",
    "get_npu_format",
    "is_nz",
    "npu_format_cast",
    "npu_format_cast_",
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


def check_nd(**caches: Tensor) -> None:
    """Raise for a cache tagged FRACTAL_NZ, for operators that know ND ones only."""
    for name, cache in caches.items():
        if isinstance(cache, Tensor) and is_nz(cache):
            fail(name, "an ND cache", "one tagged FRACTAL_NZ")


def get_npu_format(tensor: Tensor) -> int:
    """29 (FRACTAL_NZ) or 2 (ND)."""
    return int(Format.FRACTAL_NZ if is_nz(tensor) else Format.ND)


def npu_format_cast(
    tensor: Tensor,
    acl_format: int | Tensor,
    *,
    customize_dtype: torch.dtype | int | None = None,
    input_dtype: torch.dtype | int | None = None,
) -> Tensor:
    """The tensor in another format: a new one with a copy of its bytes; itself when it has it.

    acl_format: 29 (FRACTAL_NZ), 2 (ND) or 0 (NCHW, the same as ND here); a tensor stands for its
    format.  customize_dtype, input_dtype: by what width the vendor's chooses the columns of
    FRACTAL_NZ; here the shape is that of the memory already, so they mean nothing.
    """
    nz = _wants_nz(tensor, acl_format, customize_dtype, input_dtype)
    if nz == is_nz(tensor):
        return tensor
    made = tensor.clone()
    _tag(made, nz)
    return made


def npu_format_cast_(
    tensor: Tensor,
    acl_format: int | Tensor,
    *,
    customize_dtype: torch.dtype | int | None = None,
    input_dtype: torch.dtype | int | None = None,
) -> Tensor:
    """Give the tensor's memory, and with it all views of it, another format; the tensor.

    acl_format: 29, 2 or 0 as in npu_format_cast.  A tensor instead is copied over this one, which
    keeps its own format.
    """
    nz = _wants_nz(tensor, acl_format, customize_dtype, input_dtype)
    if isinstance(acl_format, Tensor):
        if acl_format.shape != tensor.shape:
            fail("acl_format", f"a tensor of shape {list(tensor.shape)}", list(acl_format.shape))
        return tensor.copy_(acl_format)
    if nz != is_nz(tensor):
        _tag(tensor, nz)
    return tensor


def _wants_nz(tensor: Any, acl_format: Any, *dtypes: Any) -> bool:
    """Whether FRACTAL_NZ is asked for, arguments checked."""
    if not isinstance(tensor, Tensor):
        fail("tensor", "a tensor", type(tensor).__name__)
    if tensor.layout is not torch.strided:
        fail("tensor", "a dense (strided) tensor", f"layout {tensor.layout}")
    for name, dtype in zip(("customize_dtype", "input_dtype"), dtypes, strict=True):
        known = dtype is None or isinstance(dtype, torch.dtype)
        if not known and (isinstance(dtype, bool) or not isinstance(dtype, int)):
            fail(name, "a torch.dtype, a number or None", repr(dtype))
    if isinstance(acl_format, Tensor):
        return is_nz(acl_format)
    if isinstance(acl_format, bool) or acl_format not in list(Format):
        names = ", ".join(f"{f.value} ({f.name})" for f in Format)
        fail("acl_format", f"one of {names}, or a tensor", repr(acl_format))
    return bool(acl_format == Format.FRACTAL_NZ)


def _tag(tensor: Tensor, nz: bool) -> None:
    global _tagging
    _tagging = True
    setattr(tensor.untyped_storage(), TAG, Format.FRACTAL_NZ if nz else Format.ND)


def empty_with_format(
    size: Any, dtype: Any = None, device: Any = None, acl_format: int = Format.ND, **keywords: Any
) -> Tensor:
    """A tensor whose memory has that format: 29 (FRACTAL_NZ), 2 (ND) or 0 (NCHW).

    size: the shape as it lies in memory.  keywords: layout, pin_memory and base_addr, which the
    vendor's has too, mean nothing.
    """
    return npu_format_cast_(_empty(size, dtype, device), acl_format)


def empty_with_swapped_memory(size: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """Host memory that the device can read in place: here, memory like all other."""
    return _empty(size, dtype, device)


def _empty(size: Any, dtype: Any, device: Any) -> Tensor:
    if device is not None and str(device).partition(":")[0] not in ("npu", "cpu"):
        fail("device", "'npu', 'cpu' or None", repr(device))
    return place(torch.empty(tuple(size), dtype=dtype, device="cpu"), device)
