# SPDX-License-Identifier: Apache-2.0
"""Element types as the oracle sees them: bits, values, means.

Shares nothing with the package: the sizes, the HiFloat8 code table and the rounding are worked
out here from public descriptions, so that a fault in the package's own tables shows up.

HiFloat8 source: Luo et al., "Ascend HiFloat8 Format for Deep Learning", arXiv 2409.16626.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Bytes of one stored item.  A float4 item is a packed pair.
ITEMSIZE: dict[str, int] = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "hifloat8": 1,
    "float8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float4_e2m1": 1,
    "float4_e1m2": 1,
}
FLOAT4 = ("float4_e2m1", "float4_e1m2")
FLOATS = ("float16", "bfloat16", "float32", "hifloat8", "float8_e5m2", "float8_e4m3fn")
#: Types whose numpy array can carry the type itself (hifloat8 only with en_dtypes).
TYPED: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in ITEMSIZE if name.startswith(("int", "uint"))
} | {
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
try:
    import en_dtypes
except ImportError:
    pass
else:
    TYPED["hifloat8"] = np.dtype(en_dtypes.hifloat8)


def raw_dtype(name: str) -> np.dtype[Any]:
    """The unsigned numpy type as wide as one stored item of that type."""
    return np.dtype(f"u{ITEMSIZE[name]}")


def bits(array: Array) -> Array:
    """The same memory seen as unsigned integers; no copy."""
    return array.view(f"u{array.dtype.itemsize}")


def logical_name(array: Array, named: str | None) -> str | None:
    """The element type of an argument: what ``named`` says of a raw array, else its own.

    None: not a type the operators move, or ``named`` does not fit the array.
    """
    own = next((name for name, dtype in TYPED.items() if dtype == array.dtype), None)
    if named is None:
        return own
    if named not in ITEMSIZE or own is None:
        return None
    if own == named:
        return own
    raw = array.dtype.kind == "u" and array.dtype.itemsize == ITEMSIZE[named]
    return named if raw else None


# -- HiFloat8 ---------------------------------------------------------------------------------


def scaled(value: float) -> int:
    """A float32's number, exactly, in units of the least above zero: quicker than fractions."""
    exactly = Fraction(float(value)) * 2**149
    assert exactly.denominator == 1
    return int(exactly)


def hifloat8_value(code: int) -> float:
    """The number one HiFloat8 byte stands for.

    After the sign bit comes the dot, a prefix code that says how many bits the exponent has
    (11: 4, 10: 3, 01: 2, 001: 1, 0001: 0, 0000: denormal).  The exponent is sign and
    magnitude, its leading one not stored; the rest is the fraction.
    """
    if code == 0x00:
        return 0.0
    if code == 0x80:
        return math.nan
    sign = -1.0 if code & 0x80 else 1.0
    body = code & 0x7F
    if body == 0x6F:
        return sign * math.inf
    if body < 8:
        return sign * 2.0 ** (body - 23)
    dots = ((0b11, 2, 4), (0b10, 2, 3), (0b01, 2, 2), (0b001, 3, 1), (0b0001, 4, 0))
    prefix_bits, exponent_bits = next(
        (prefix_bits, exponent_bits)
        for prefix, prefix_bits, exponent_bits in dots
        if body >> (7 - prefix_bits) == prefix
    )
    fraction_bits = 7 - prefix_bits - exponent_bits
    fraction = body & ((1 << fraction_bits) - 1)
    exponent = 0
    if exponent_bits:
        field = (body >> fraction_bits) & ((1 << exponent_bits) - 1)
        magnitude_bits = exponent_bits - 1
        exponent = (1 << magnitude_bits) | (field & ((1 << magnitude_bits) - 1))
        if field >> magnitude_bits:
            exponent = -exponent
    return sign * (1.0 + fraction / (1 << fraction_bits)) * 2.0**exponent


HIFLOAT8 = np.array([hifloat8_value(code) for code in range(256)], np.float32)

# Codes of the non-negative numbers in ascending order; infinity stands where the next number
# of that exponent would be, so the same midpoint rule says what overflows.
_ASCENDING = np.array(
    [*sorted(set(range(128)) - {0x6F}, key=lambda code: float(HIFLOAT8[code])), 0x6F], np.uint8
)
_LADDER = np.append(HIFLOAT8[_ASCENDING[:-1]].astype(np.float64), 1.5 * 2.0**15)
_MIDPOINTS = (_LADDER[:-1] + _LADDER[1:]) / 2


def encode_hifloat8(values: Array) -> Array:
    """float32 to HiFloat8 bytes: nearest, ties away from zero; one zero and one NaN."""
    magnitude = np.abs(values.astype(np.float64))
    magnitude_code = _ASCENDING[np.searchsorted(_MIDPOINTS, magnitude, side="right")]
    sign = np.where(np.signbit(values) & (magnitude_code != 0), 0x80, 0).astype(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x80), magnitude_code | sign).astype(np.uint8)


# -- values and bits ----------------------------------------------------------------------------


def decode(raw: Array, name: str) -> Array:
    """Unsigned bits to float32 values; exact."""
    if name == "hifloat8":
        return np.asarray(HIFLOAT8[raw])
    with np.errstate(invalid="ignore"):
        return np.ascontiguousarray(raw).view(TYPED[name]).astype(np.float32)


def encode(values: Array, name: str) -> Array:
    """float32 values to unsigned bits, rounded once to the type."""
    if name == "hifloat8":
        return encode_hifloat8(values)
    with np.errstate(all="ignore"):
        return bits(np.ascontiguousarray(values.astype(np.float32).astype(TYPED[name])))


def is_nan(raw: Array, name: str) -> Array:
    """Which bit patterns are NaN in that type (never for integers and float4)."""
    if name not in FLOATS:
        return np.zeros(raw.shape, bool)
    return np.isnan(decode(raw, name))


def mean_of_rows(rows: Array, name: str) -> tuple[Array, Array]:
    """Mean of ``rows[w, D]`` (raw bits, w > 0) over w.

    Returns the raw bits ``[D]`` and the mask of NaN results, whose payload nobody promises.
    """
    count = rows.shape[0]
    if name in FLOATS:
        total = np.zeros(rows.shape[1], np.float32)
        with np.errstate(all="ignore"):
            for row in rows:
                total = total + decode(row, name)
            mean = total / np.float32(count)
        return encode(mean, name), np.isnan(mean)
    if name in FLOAT4:
        raise ValueError(f"no mean of {name}")
    signed = name.startswith("int")
    out = np.empty(rows.shape[1], raw_dtype(name))
    for column in range(rows.shape[1]):
        total_int = 0
        for raw in np.ascontiguousarray(rows[:, column]).view(TYPED[name]):
            total_int = (total_int + int(raw)) & 0xFFFFFFFF
        if signed and total_int >= 1 << 31:
            total_int -= 1 << 32
        quotient = abs(total_int) // count * (-1 if total_int < 0 else 1)
        out[column] = quotient & ((1 << (8 * ITEMSIZE[name])) - 1)
    return out, np.zeros(rows.shape[1], bool)


# -- packed float4 ------------------------------------------------------------------------------


def pack_float4(codes: Array) -> Array:
    """One float4 code a byte ``[..., D]`` to two a byte ``[..., D // 2]``, low nibble first."""
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // 2), np.uint8)
    for pair in range(out.shape[-1]):
        out[..., pair] = (codes[..., 2 * pair] & 15) | ((codes[..., 2 * pair + 1] & 15) << 4)
    return out


def unpack_float4(packed: Array) -> Array:
    """The inverse of :func:`pack_float4`: one code a byte, in the low nibble."""
    out = np.zeros((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    for pair in range(packed.shape[-1]):
        out[..., 2 * pair] = packed[..., pair] & 15
        out[..., 2 * pair + 1] = packed[..., pair] >> 4
    return out
