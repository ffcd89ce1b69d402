# SPDX-License-Identifier: Apache-2.0
"""HiFloat8: the 256 codes, without needing the ``en_dtypes`` package.

A code is a sign, a prefix that says how many exponent bits follow, an exponent in sign and
magnitude whose leading one is not stored, and the rest as mantissa:

    prefix  exponent bits  mantissa bits  magnitudes
    11      4              1              2**+-8 to 2**+-15
    10      3              2              2**+-4 to 2**+-7
    01      2              3              2**+-2, 2**+-3
    001     1              3              2**+-1
    0001    0              3              2**0
    0000    -              3              2**(m - 23), m = 1 to 7

0x00 is the only zero, 0x80 NaN, 0x6f and 0xef are infinities (in place of 1.5 * 2**15).
Source: Luo et al., "Ascend HiFloat8 Format for Deep Learning", arXiv 2409.16626.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcore.errors import fail

__all__ = ["CODES", "LIMITS", "VALUES", "decode", "encode"]

# prefix, its length, exponent bits; longest code range first
_FORMS = ((0b11, 2, 4), (0b10, 2, 3), (0b01, 2, 2), (0b001, 3, 1), (0b0001, 4, 0))
_INFINITY = 0x6F
_NAN = 0x80


def _magnitude(code: int) -> float:
    """The value of a code below 0x80, an infinity's as if it were a number."""
    for prefix, length, exponent_bits in _FORMS:
        rest_bits = 7 - length
        if code >> rest_bits != prefix:
            continue
        mantissa_bits = rest_bits - exponent_bits
        mantissa = 1 + (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        if exponent_bits == 0:
            return mantissa
        field = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        leading = 1 << (exponent_bits - 1)
        exponent = leading | (field & (leading - 1))
        return math.ldexp(mantissa, -exponent if field & leading else exponent)
    return math.ldexp(1.0, code - 23) if code else 0.0


_MAGNITUDES = [_magnitude(code) for code in range(0x80)]
_ASCENDING = sorted(range(0x80), key=_MAGNITUDES.__getitem__)


def _values() -> NDArray[np.float32]:
    half = np.array(_MAGNITUDES, np.float32)
    half[_INFINITY] = np.inf
    values = np.concatenate([half, -half])
    values[_NAN] = np.nan
    return values


def _limits() -> NDArray[np.float32]:
    ladder = np.array([_MAGNITUDES[code] for code in _ASCENDING])
    return np.asarray((ladder[:-1] + ladder[1:]) / 2, np.float32)  # exact


#: float32 [256]: the value of each code.
VALUES = _values()
#: uint8 [128]: the codes below 0x80 by ascending magnitude.
CODES = np.array(_ASCENDING, np.uint8)
#: float32 [127]: the midpoints between neighbours in that order.
LIMITS = _limits()
for _table in (VALUES, CODES, LIMITS):
    _table.flags.writeable = False


def decode(codes: ArrayLike) -> NDArray[np.float32]:
    """float32 values of HiFloat8 codes; exact.

    codes: uint8 of any shape (or an en_dtypes array).  Raises ParamInvalidError on other types.
    """
    array: NDArray[Any] = np.asarray(codes)
    if array.dtype.name == "hifloat8":
        array = array.view(np.uint8)
    if array.dtype != np.uint8:
        fail("codes", "uint8 codes", array.dtype)
    return np.asarray(VALUES[array])


def encode(values: ArrayLike) -> NDArray[np.uint8]:
    """HiFloat8 codes of float values: the nearest, ties away from zero.

    values: float16, float32 or float64 of any shape.  Magnitudes from 1.25 * 2**15 on become
    infinite, those below 2**-23 zero, and -0.0 the one zero.  Raises ParamInvalidError on other
    types.
    """
    array: NDArray[Any] = np.asarray(values)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        fail("values", "float16, float32 or float64", array.dtype)
    codes = CODES[np.searchsorted(LIMITS, np.abs(array), side="right")]
    signs = np.where(np.signbit(array) & (codes != 0), np.uint8(0x80), np.uint8(0))
    return np.where(np.isnan(array), np.uint8(_NAN), codes | signs)
