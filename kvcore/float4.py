# SPDX-License-Identifier: Apache-2.0
"""Packed float4: two elements a byte, the low nibble first.

ml_dtypes and en_dtypes hold float4 one element a byte; caches hold it packed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail

__all__ = ["pack_float4", "unpack_float4"]


def pack_float4(x: Any) -> NDArray[np.uint8]:
    """[..., D] float4 codes, one a byte, to uint8 [..., D // 2]; D even.

    x: a float4 array of ml_dtypes or en_dtypes (float4_e2m1fn, ...), or uint8 codes 0..15.
    Element 2i goes to the low nibble of byte i, element 2i + 1 to the high one.
    """
    array = np.asarray(x)
    if array.dtype.itemsize != 1 or not (
        array.dtype == np.uint8 or array.dtype.name.startswith("float4")
    ):
        fail("x", "float4 (one byte an element) or uint8 codes", f"dtype {array.dtype.name}")
    if array.ndim == 0 or array.shape[-1] % 2:
        fail("x", "a last axis of even size", list(array.shape))
    codes: NDArray[np.uint8] = array.view(np.uint8)
    if array.dtype == np.uint8:
        if codes.size and codes.max() > 15:
            fail("x", "codes 0..15", int(codes.max()))
    else:
        codes = codes & np.uint8(15)
    packed: NDArray[np.uint8] = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def unpack_float4(x: Any, dtype: Any = None) -> NDArray[Any]:
    """uint8 [..., D // 2] to codes [..., D], one a byte; the inverse of pack_float4.

    dtype: a one-byte float4 dtype (ml_dtypes.float4_e2m1fn) to view the result as; None leaves
    uint8 codes.
    """
    array = np.asarray(x)
    if array.dtype != np.uint8:
        fail("x", "packed float4 as uint8", f"dtype {array.dtype.name}")
    if array.ndim == 0:
        fail("x", "at least one axis", "a 0-d array")
    codes = np.empty((*array.shape[:-1], array.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = array & 15
    codes[..., 1::2] = array >> 4
    if dtype is None:
        return codes
    kind = np.dtype(dtype)
    if kind.itemsize != 1:
        fail("dtype", "a dtype of one byte an element", kind.name)
    return codes.view(kind)
