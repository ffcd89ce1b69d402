# SPDX-License-Identifier: Apache-2.0
"""The table of HiFloat8 codes, and the rounding to them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvcore import hifloat8
from kvcore.errors import ParamInvalidError
from oracle_numbers import Array, scaled

ALL = np.arange(256, dtype=np.uint8)
# Every number, every midpoint between two neighbours, and the floats on both sides of each.
NUMBERS = hifloat8.VALUES[np.isfinite(hifloat8.VALUES)]
HALVES = np.concatenate([hifloat8.LIMITS, -hifloat8.LIMITS])
POINTS = np.concatenate([NUMBERS, HALVES])
NEIGHBOURS = [np.nextafter(POINTS, np.float32(to)) for to in (-np.inf, np.inf)]
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38], np.float32)
TELLING = np.concatenate([POINTS, *NEIGHBOURS, SPECIAL])


def test_decode_as_en_dtypes_does() -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    np.testing.assert_array_equal(
        hifloat8.decode(ALL), ALL.view(en_dtypes.hifloat8).astype(np.float32)
    )
    np.testing.assert_array_equal(
        hifloat8.decode(ALL.view(en_dtypes.hifloat8)), hifloat8.decode(ALL)
    )


@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_encode_as_en_dtypes_does(source: type) -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    with np.errstate(invalid="ignore"):
        expected = TELLING.astype(en_dtypes.hifloat8).view(np.uint8)
    np.testing.assert_array_equal(hifloat8.encode(TELLING.astype(source)), expected)


def test_some_values_of_the_published_format() -> None:
    codes = {0x00: 0.0, 0x01: 2.0**-22, 0x07: 2.0**-16, 0x08: 1.0, 0x0F: 1.875, 0x6E: 2.0**15}
    codes |= {0x10: 2.0, 0x18: 0.5, 0x20: 4.0, 0x6F: math.inf, 0xEF: -math.inf, 0x88: -1.0}
    for code, value in codes.items():
        assert hifloat8.decode(np.uint8(code)) == value, hex(code)
    assert np.isnan(hifloat8.decode(np.array([0x80], np.uint8)))
    assert len(np.unique(hifloat8.VALUES)) == 256  # one NaN, one zero, no number twice


def test_every_number_encodes_to_its_own_code() -> None:
    np.testing.assert_array_equal(hifloat8.encode(hifloat8.decode(ALL)), ALL)


def test_encode_takes_the_nearest_and_goes_away_from_zero_at_ties() -> None:
    exact = {code: scaled(float(hifloat8.VALUES[code])) for code in range(128) if code != 0x6F}
    exact[0x6F] = scaled(1.5 * 2**15)  # infinity rounds as the next number would
    for value in TELLING[np.isfinite(TELLING)].tolist():
        code = int(hifloat8.encode(np.array([value], np.float64))[0])
        assert (code & 0x80 != 0) == (value < 0 and code != 0), value
        wanted = abs(scaled(value))
        distance, _ = min((abs(other - wanted), -other) for other in exact.values())
        best = max(other for other in exact.values() if abs(other - wanted) == distance)
        if wanted > exact[0x6F]:
            best = exact[0x6F]
        assert exact[code & 0x7F] == best, value


def test_float16_and_shapes() -> None:
    values = np.array([[1.0, -2.0], [0.3, 6e4]], np.float16)
    np.testing.assert_array_equal(
        hifloat8.encode(values), hifloat8.encode(values.astype(np.float64))
    )
    assert hifloat8.encode(np.float32(1.0)).shape == ()
    assert hifloat8.encode(np.zeros((0, 3), np.float32)).shape == (0, 3)


@pytest.mark.parametrize("codes", [np.zeros(3, np.int8), np.zeros(3, np.float32), [1, 2]])
def test_decode_refuses_what_are_no_codes(codes: Array) -> None:
    with pytest.raises(ParamInvalidError, match=r"^codes: expected uint8 codes, got ") as caught:
        hifloat8.decode(codes)
    assert caught.value.argument == "codes"


@pytest.mark.parametrize("values", [np.zeros(3, np.int32), np.zeros(3, np.longdouble), ["x"]])
def test_encode_refuses_what_are_no_floats(values: Array) -> None:
    with pytest.raises(ParamInvalidError, match=r"^values: expected float16, float32 or float64"):
        hifloat8.encode(values)


def test_tables_cannot_be_changed() -> None:
    for table in (hifloat8.VALUES, hifloat8.LIMITS, hifloat8.CODES):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1
