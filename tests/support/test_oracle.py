# SPDX-License-Identifier: Apache-2.0
"""The oracle against the conformance cases and against independent number tables."""

from __future__ import annotations

import numpy as np
import pytest

import conformance_cases
import oracle
import oracle_numbers
from oracle_numbers import Array, scaled

FORMS = [(name, False) for name in conformance_cases.NAMES] + [
    (name, True) for name in conformance_cases.NAMES if conformance_cases.can_be_typed(name)
]


@pytest.mark.parametrize(("name", "typed"), FORMS)
def test_conformance(name: str, typed: bool) -> None:
    case = conformance_cases.load(name, typed)
    before = {k: np.array(v) for k, v in case.arguments.items() if isinstance(v, np.ndarray)}
    result = oracle.run(case.operator, case.arguments)
    for argument, expected in case.expected.items():
        if argument == "selection_kv_actual_seq":
            assert result.returned is not None
            assert result.returned.dtype == np.int32
            np.testing.assert_array_equal(result.returned, expected)
            continue
        if expected.size == 0:
            continue
        seen = oracle.bits(result.outputs[argument])
        free = result.unspecified.get(argument, np.zeros(seen.shape, bool))
        np.testing.assert_array_equal(
            np.where(free, 0, seen),
            np.where(free, 0, oracle.bits(expected)),
            err_msg=argument,
        )
    for argument, array in before.items():
        assert oracle.bits(case.arguments[argument]).tobytes() == oracle.bits(array).tobytes()


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", [n[:-1] for n in conformance_cases.NAMES if n.endswith("_step0")])
def test_gather_steps_follow_each_other(name: str, step: int) -> None:
    now = conformance_cases.load(f"{name}{step}")
    later = conformance_cases.load(f"{name}{step + 1}")
    for argument in (
        "selection_kv_cache",
        "selection_k_rope",
        "selection_kv_block_status",
    ):
        np.testing.assert_array_equal(now.expected[argument], later.arguments[argument])
    stats = oracle.run(later.operator, later.arguments).stats
    assert stats is not None
    assert sum(stats["reused"] + stats["moved"]) > 0, "the case reuses nothing"


def floats(*values: float) -> Array:
    return np.array(values, np.float32)


def nearest_codes(x: np.float32, finite: dict[int, int]) -> set[int]:
    """Codes of the numbers nearest to x, exactly; two when it is a tie.

    finite: code -> its number, scaled.
    """
    wanted = scaled(x)
    distance = {code: abs(number - wanted) for code, number in finite.items()}
    least = min(distance.values())
    return {code for code, d in distance.items() if d == least}


def interesting_floats(table: Array, seed: int) -> Array:
    """Every midpoint of two neighbours with its float32 neighbours, and random numbers."""
    finite = np.unique(table[np.isfinite(table)].astype(np.float64))
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    top = np.float32(finite[-1])
    rng = np.random.default_rng(seed)
    random = (rng.uniform(-1, 1, 100) * 2.0 ** rng.integers(-26, 17, 100)).astype(np.float32)
    around = [
        middle,
        np.nextafter(middle, np.float32(np.inf)),
        np.nextafter(middle, -top),
    ]
    every = np.concatenate([*around, finite.astype(np.float32), random])
    return np.asarray(every[np.abs(every) <= top])


@pytest.mark.parametrize("name", ["hifloat8", "float8_e5m2", "float8_e4m3fn"])
def test_eight_bit_rounding_is_nearest(name: str) -> None:
    table = oracle.decode(np.arange(256, dtype=np.uint8), name)
    values = interesting_floats(table, seed=8)
    codes = oracle.encode(values, name)
    finite = {code: scaled(v) for code, v in enumerate(table) if np.isfinite(v)}
    for x, code in zip(values, codes.tolist(), strict=True):
        allowed = nearest_codes(x, finite)
        assert table[code] in table[list(allowed)], (x, code)
        distinct = sorted({float(table[c]) for c in allowed}, key=abs)
        if len(distinct) == 2:
            if name == "hifloat8":
                assert float(table[code]) == distinct[1], f"{x}: ties go away from zero"
            else:
                assert code % 2 == 0, f"{x}: ties go to the even code"


def test_hifloat8_round_trip_and_ends() -> None:
    codes = np.arange(256, dtype=np.uint8)
    table = oracle_numbers.HIFLOAT8
    np.testing.assert_array_equal(oracle.encode(table, "hifloat8"), codes)
    assert table[0x6E] == 2.0**15
    assert table[0x6F] == np.inf
    assert table[0x01] == 2.0**-22
    least = 2.0**-23
    edge = floats(40959.99, 40960, least, float(np.nextafter(np.float32(least), np.float32(0))))
    assert oracle.encode(edge, "hifloat8").tolist() == [0x6E, 0x6F, 0x01, 0x00]
    assert oracle.encode(-edge, "hifloat8").tolist() == [0xEE, 0xEF, 0x81, 0x00]
    assert oracle.encode(floats(-0.0, np.nan), "hifloat8").tolist() == [
        0x00,
        0x80,
    ]


def test_hifloat8_agrees_with_en_dtypes() -> None:
    en_dtypes = pytest.importorskip("en_dtypes", reason="en_dtypes is not installed")
    theirs = np.arange(256, dtype=np.uint8).view(en_dtypes.hifloat8).astype(np.float32)
    np.testing.assert_array_equal(theirs, oracle_numbers.HIFLOAT8)
    values = interesting_floats(oracle_numbers.HIFLOAT8, seed=9)
    np.testing.assert_array_equal(
        values.astype(en_dtypes.hifloat8).view(np.uint8),
        oracle.encode(values, "hifloat8"),
    )


@pytest.mark.parametrize(("name", "fraction_bits"), [("bfloat16", 7), ("float16", 10)])
def test_sixteen_bit_rounding(name: str, fraction_bits: int) -> None:
    step = 2.0**-fraction_bits
    values = floats(1 + step / 2, 1 + 1.5 * step, 1 + step / 2 + 2.0**-22, -1 - step / 2)
    seen = oracle.decode(oracle.encode(values, name), name)
    assert seen.tolist() == [1.0, 1 + 2 * step, 1 + step, -1.0]


def test_mean_starts_at_plus_zero_and_keeps_token_order() -> None:
    def mean(*values: float) -> Array:
        rows = floats(*values).reshape(-1, 1).view(np.uint32)
        raw, _ = oracle.mean_of_rows(rows, "float32")
        return raw.view(np.float32)

    assert not np.signbit(mean(-0.0, -0.0))[0]
    assert mean(1e30, 1.0, -1e30)[0] == 0.0
    assert mean(1e30, -1e30, 1.0)[0] == np.float32(1) / np.float32(3)
    raw, nan = oracle.mean_of_rows(floats(np.inf, -np.inf).reshape(2, 1).view(np.uint32), "float32")
    assert nan.all()
    assert np.isnan(raw.view(np.float32)).all()


@pytest.mark.parametrize(
    ("name", "values", "mean"),
    [
        ("int8", [-3, -4], -3),
        ("int8", [-128, -128, -127], -127),
        ("uint8", [255, 254], 254),
        ("int32", [2**31 - 1, 1], -(2**30)),
        ("uint32", [2**32 - 1, 2], 0),
        ("int16", [-1, 0, 0], 0),
    ],
)
def test_integer_mean(name: str, values: list[int], mean: int) -> None:
    rows = np.array(values, name).reshape(-1, 1)
    raw, _ = oracle.mean_of_rows(oracle.bits(rows), name)
    assert raw.view(name).tolist() == [mean]


def test_float4_packs_low_nibble_first() -> None:
    codes = np.array([[1, 2, 15, 0]], np.uint8)
    assert oracle.pack_float4(codes).tolist() == [[0x21, 0x0F]]
    np.testing.assert_array_equal(oracle.unpack_float4(oracle.pack_float4(codes)), codes)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_layout_inverses(dtype: type) -> None:
    c0 = 32 // np.dtype(dtype).itemsize
    cache: Array = np.arange(3 * 4 * 2 * 2 * c0).reshape(3, 4, 2, 2 * c0).astype(dtype)
    for five in (False, True):
        nz = oracle.paged_nd_to_nz(cache, five)
        np.testing.assert_array_equal(oracle.paged_nz_to_nd(nz, None if five else 2), cache)
    matrix = cache.reshape(3, 4, 4 * c0)
    np.testing.assert_array_equal(oracle.nz_to_nd(oracle.nd_to_nz(matrix)), matrix)
    np.testing.assert_array_equal(oracle.nd_to_nz(matrix), oracle.paged_nd_to_nz(cache))


@pytest.mark.parametrize(("name", "typed"), FORMS)
def test_conformance_cases_are_legal(name: str, typed: bool) -> None:
    case = conformance_cases.load(name, typed)
    assert oracle.violations(case.operator, case.arguments) == []
