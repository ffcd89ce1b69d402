# SPDX-License-Identifier: Apache-2.0
"""Packed float4: two elements a byte, the low nibble first.

ml_dtypes and en_dtypes hold float4 one element a byte; caches hold it packed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import ParamInvalidError, fail

__all__ = ["pack_float4", "unpack_float4"]


def pack_float4(x: Any) -> NDArray[np.uint8]:
    """[..., D] float4 codes, one a byte, to uint8 [..., D // 2]; D even.

    x: a float4 array of ml_dtypes or en_dtypes (float4_e2m1fn, ...), or uint8 codes 0..15.
    Element 2i goes to the low nibble of byte i, element 2i + 1 to the high one.

    >>> import numpy as np, kvcore
    >>> kvcore.pack_float4(np.array([1, 2, 3, 15], np.uint8)).tolist()  # 2 * 16 + 1, 15 * 16 + 3
    [33, 243]
    """
    array = _host_array(x)
    if array.dtype != np.uint8 and not _is_float4(array.dtype):
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

    >>> import numpy as np, kvcore
    >>> kvcore.unpack_float4(np.array([33, 243], np.uint8)).tolist()
    [1, 2, 3, 15]
    """
    array = _host_array(x)
    if array.dtype != np.uint8:
        fail("x", "packed float4 as uint8", f"dtype {array.dtype.name}")
    if array.ndim == 0:
        fail("x", "at least one axis", "a 0-d array")
    codes = np.empty((*array.shape[:-1], array.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = array & 15
    codes[..., 1::2] = array >> 4
    if dtype is None:
        return codes
    try:
        kind = np.dtype(dtype)
    except Exception as error:
        seen = f"{dtype!r} ({type(error).__name__})"
        raise _not_float4(seen) from error
    if not _is_float4(kind):
        raise _not_float4(kind.name)
    return codes.view(kind)


def _not_float4(seen: str) -> ParamInvalidError:
    expected = "a float4 dtype of one byte an element, or None"
    return ParamInvalidError(
        f"dtype: expected {expected}, got {seen}", argument="dtype", seen=seen, expected=expected
    )


def _is_float4(kind: np.dtype[Any]) -> bool:
    return kind.itemsize == 1 and kind.name.startswith("float4")


def _host_array(x: Any) -> NDArray[Any]:
    if isinstance(x, np.ma.MaskedArray):
        fail("x", "an array without a mask", "a MaskedArray")
    try:
        return np.asarray(x)
    except Exception as error:  # tensors on devices, ragged lists, objects of any kind
        seen = f"{type(x).__name__} ({type(error).__name__}: {error})"
        raise ParamInvalidError(
            f"x: expected an array, got {seen}", argument="x", seen=seen, expected="an array"
        ) from error
