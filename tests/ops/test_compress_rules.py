# SPDX-License-Identifier: Apache-2.0
"""What compression refuses: one test a rule, on both sides of each bound, nothing written."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import kvcore
import oracle
from kvcore.errors import ParamInvalidError, ParamNullError, SlotRangeError
from oracle_numbers import FLOAT4, Array

INT64_MAX = 2**63 - 1
SCENARIOS = [(3, "Alibi"), (3, "Rope"), (3, "Omni"), (4, "Alibi"), (5, "Rope"), (5, "Omni")]
WITH_OFFSETS = [(n, rule) for n, rule in SCENARIOS if rule != "Alibi"]


def legal(number: int, rule: str, index: str = "int64") -> dict[str, Any]:
    """B 2, H 2, lengths 4 and 6, S 7; caches of 5 * 8 slots; runs apart from each other."""
    outer = (2, 7) if number == 3 else (10,)
    a: dict[str, Any] = {
        "key": np.ones((*outer, 2, 8), np.float16),
        "key_cache": np.zeros((5, 8, 1, 8), np.float16),
        "slot_mapping": np.array([0, 10, 20, 30], index),
        "value": np.ones((*outer, 2, 4), np.float16),
        "value_cache": np.zeros((5, 8, 1, 4), np.float16),
        "compress_lens": np.array([2, 3, 4, 2], index),
        "seq_lens": np.array([4, 6], index),
        "scatter_mode": rule,
    }
    if rule != "Alibi":
        a["compress_seq_offset"] = np.array([1, 1, 0, 4], index)
    if number == 3:
        a["slot_mapping"] = a["slot_mapping"].reshape(2, 2)
    return a


def check_legal(arguments: dict[str, Any]) -> None:
    """It is accepted, and right."""
    assert oracle.violations("scatter_pa_kv_cache", arguments) == []
    want = oracle.run("scatter_pa_kv_cache", arguments)
    kvcore.scatter_pa_kv_cache(**arguments)
    for name, expected in want.outputs.items():
        np.testing.assert_array_equal(arguments[name], expected)


def check_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """The error has that class and that whole message, names its argument, and nothing changes."""
    assert oracle.violations("scatter_pa_kv_cache", arguments) != []
    before = {n: a.tobytes() for n, a in arguments.items() if isinstance(a, np.ndarray)}
    with pytest.raises(error) as caught:
        kvcore.scatter_pa_kv_cache(**arguments)
    assert type(caught.value) is error
    assert str(caught.value) == message
    assert isinstance(caught.value, kvcore.KVCoreError)
    assert caught.value.argument == re.split(r"\W", message)[0]
    assert caught.value.code == (161001 if error is ParamNullError else 161002)
    for name, then in before.items():
        assert arguments[name].tobytes() == then, f"{name} was written"


@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_the_call_that_these_tests_break_is_legal(number: int, rule: str, index: str) -> None:
    check_legal(legal(number, rule, index))


# ---------------------------------------------------------------- seq_lens
@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_a_negative_length(number: int, rule: str) -> None:
    a = legal(number, rule)
    at = 1 if number == 3 else 0
    a["seq_lens"][:] = (4, -1) if number == 3 else (-1, 11)  # 4 and 5 add them up
    check_refused(a, ParamInvalidError, f"seq_lens[{at}]: expected a length >= 0, got -1")


@pytest.mark.parametrize("rule", ["Alibi", "Rope", "Omni"])
def test_a_length_over_s(rule: str) -> None:
    a = legal(3, rule)
    a["seq_lens"][1] = 7
    check_legal(a)
    a["seq_lens"][1] = 8
    check_refused(a, ParamInvalidError, "seq_lens[1]: expected at most 7 (S of key), got 8")


@pytest.mark.parametrize(("number", "rule"), [s for s in SCENARIOS if s[0] != 3])
@pytest.mark.parametrize(
    ("lengths", "seen"),
    [
        ([4, 5], "9"),
        ([4, 7], "11 up to index 1"),
        ([11, 0], "11 up to index 0"),
        ([INT64_MAX, INT64_MAX], f"{INT64_MAX} up to index 0"),
        ([0, INT64_MAX], f"{INT64_MAX} up to index 1"),
    ],
)
def test_lengths_that_do_not_add_up(number: int, rule: str, lengths: list[int], seen: str) -> None:
    a = legal(number, rule)
    a["seq_lens"][:] = lengths
    check_refused(
        a, ParamInvalidError, f"seq_lens: expected lengths that sum to 10 (T of key), got {seen}"
    )


def test_lengths_whose_sum_wraps_to_t() -> None:
    # 2 * (2**63 - 1) + 12 == 10 modulo 2**64
    a = legal(4, "Alibi")
    a["seq_lens"] = np.array([INT64_MAX, INT64_MAX, 12])
    a["slot_mapping"] = np.zeros(6, np.int64)
    a["compress_lens"] = np.zeros(6, np.int64)
    expected = "seq_lens: expected lengths that sum to 10 (T of key), got"
    check_refused(a, ParamInvalidError, f"{expected} {INT64_MAX} up to index 0")


def test_no_lengths_for_tokens() -> None:
    a = legal(5, "Rope")
    for name in ("slot_mapping", "compress_lens", "seq_lens", "compress_seq_offset"):
        a[name] = np.zeros(0, np.int64)
    expected = "seq_lens: expected lengths that sum to 10 (T of key), got 0"
    check_refused(a, ParamInvalidError, expected)


# ---------------------------------------------------------------- compress_lens
@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_a_negative_window(number: int, rule: str) -> None:
    a = legal(number, rule)
    a["compress_lens"][2] = 0
    check_legal(a)
    for w in (-1, -(2**63)):
        a["compress_lens"][2] = w
        check_refused(a, ParamInvalidError, f"compress_lens[2]: expected a length >= 0, got {w}")


def test_a_negative_window_of_a_run_without_compression() -> None:
    a = legal(5, "Rope")
    a["compress_seq_offset"][2], a["compress_lens"][2] = -1, -1
    check_refused(a, ParamInvalidError, "compress_lens[2]: expected a length >= 0, got -1")


@pytest.mark.parametrize("number", [3, 4])
def test_a_window_longer_than_its_sequence_in_alibi(number: int) -> None:
    a = legal(number, "Alibi")
    a["compress_lens"][1] = 4
    check_legal(a)
    for w in (5, INT64_MAX):
        a["compress_lens"][1] = w
        check_refused(
            a, ParamInvalidError, f"compress_lens[1]: expected at most 4 (seq_lens[0]), got {w}"
        )


@pytest.mark.parametrize(("number", "rule"), WITH_OFFSETS)
def test_a_window_that_ends_past_its_sequence(number: int, rule: str) -> None:
    a = legal(number, rule)
    a["compress_lens"][1] = 3
    check_legal(a)
    expected = "compress_lens[1]: expected at most 3 (seq_lens[0] - compress_seq_offset[1])"
    for w in (4, INT64_MAX):  # 1 + INT64_MAX wraps
        a["compress_lens"][1] = w
        check_refused(a, ParamInvalidError, f"{expected}, got {w}")


def test_places_of_two_axes_are_named_by_both() -> None:
    a = legal(3, "Rope")
    a["compress_lens"] = a["compress_lens"].reshape(2, 2)
    check_legal(a)
    a["compress_lens"][1, 0] = -3
    check_refused(a, ParamInvalidError, "compress_lens[1, 0]: expected a length >= 0, got -3")


# ---------------------------------------------------------------- compress_seq_offset
@pytest.mark.parametrize(("number", "rule"), WITH_OFFSETS)
def test_an_offset_below_minus_one(number: int, rule: str) -> None:
    a = legal(number, rule)
    a["compress_seq_offset"][3] = -1
    a["compress_lens"][3] = INT64_MAX  # ignored there
    check_legal(a)
    for o in (-2, -(2**63)):
        a["compress_seq_offset"][3] = o
        check_refused(
            a, ParamInvalidError, f"compress_seq_offset[3]: expected an offset >= -1, got {o}"
        )


@pytest.mark.parametrize(("number", "rule"), WITH_OFFSETS)
def test_an_offset_past_its_sequence(number: int, rule: str) -> None:
    a = legal(number, rule)
    a["compress_lens"][3] = 0
    a["compress_seq_offset"][3] = 6
    check_legal(a)
    for o in (7, INT64_MAX):
        a["compress_seq_offset"][3] = o
        expected = "compress_seq_offset[3]: expected at most 6 (seq_lens[1])"
        check_refused(a, ParamInvalidError, f"{expected}, got {o}")


# ---------------------------------------------------------------- slots
def place(number: int) -> str:
    return "slot_mapping[1, 1]" if number == 3 else "slot_mapping[3]"


@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_a_slot_past_the_cache(number: int, rule: str) -> None:
    for slot in (40, 41, INT64_MAX, 2**32):
        a = legal(number, rule)
        a["slot_mapping"].reshape(-1)[3] = slot
        expected = "expected slot < 40 (num_blocks 5 * block_size 8)"
        check_refused(a, SlotRangeError, f"{place(number)}: {expected}, got {slot}")
        with pytest.raises(IndexError):
            kvcore.scatter_pa_kv_cache(**a)


@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_a_run_that_leaves_the_cache(number: int, rule: str) -> None:
    rows = {"Alibi": 2, "Rope": 5, "Omni": 4}[rule]
    a = legal(number, rule)
    a["slot_mapping"].reshape(-1)[3] = 40 - rows
    check_legal(a)
    a["slot_mapping"].reshape(-1)[3] = 40 - rows + 1
    expected = f"expected slot + {rows} rows of the run <= 40 (num_blocks 5 * block_size 8)"
    check_refused(a, SlotRangeError, f"{place(number)}: {expected}, got {41 - rows}")


@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_the_slot_of_an_empty_run_lies_in_the_cache_too(number: int, rule: str) -> None:
    a = legal(number, rule)
    a["seq_lens"][:] = (0, 7) if number == 3 else (0, 10)
    a["compress_lens"][:2] = 0
    if rule != "Alibi":
        a["compress_seq_offset"][:2] = 0
    a["slot_mapping"].reshape(-1)[:] = 39, 0, 10, 20
    check_legal(a)
    a["slot_mapping"].reshape(-1)[0] = 40
    where = "slot_mapping[0, 0]" if number == 3 else "slot_mapping[0]"
    expected = "expected slot < 40 (num_blocks 5 * block_size 8)"
    check_refused(a, SlotRangeError, f"{where}: {expected}, got 40")


@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_a_cache_without_slots(number: int, rule: str) -> None:
    a = legal(number, rule)
    a["key_cache"], a["value_cache"] = a["key_cache"][:0], a["value_cache"][:0]
    where = "slot_mapping[0, 0]" if number == 3 else "slot_mapping[0]"
    expected = "expected slot < 0 (num_blocks 0 * block_size 8)"
    check_refused(a, SlotRangeError, f"{where}: {expected}, got 0")
    a["slot_mapping"][...] = -1
    check_legal(a)


@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_lengths_of_a_skipped_run_are_checked(number: int, rule: str) -> None:
    a = legal(number, rule)
    a["slot_mapping"][...] = -1
    a["compress_lens"][3] = -1
    check_refused(a, ParamInvalidError, "compress_lens[3]: expected a length >= 0, got -1")


def test_the_last_run_is_checked_before_the_first_is_written() -> None:
    a = legal(5, "Rope")
    a["slot_mapping"][3] = 39
    check_refused(
        a,
        SlotRangeError,
        "slot_mapping[3]: expected slot + 5 rows of the run <= 40 "
        "(num_blocks 5 * block_size 8), got 39",
    )


# ---------------------------------------------------------------- shapes and types
ZEROS = np.zeros(4, np.int64)
FLAT, SQUARE = "expected shape [4] ([B*H], B 2, H 2)", "expected shape [2, 2] ([B, H], B 2, H 2)"


def half(*shape: int) -> Array:
    return np.zeros(shape, np.float16)


@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_arrays_that_are_missing(number: int, rule: str) -> None:
    axes = {
        "compress_lens": "[B, H] or [B*H]" if number == 3 else "[B*H]",
        "seq_lens": "[B]",
        "compress_seq_offset": "[B*H]",
    }
    for name in [n for n in axes if n in legal(number, rule)]:
        a = legal(number, rule)
        a[name] = None
        check_refused(
            a, ParamNullError, f"{name}: expected an array {axes[name]} in {rule}, got None"
        )


@pytest.mark.parametrize("number", [3, 4])
def test_alibi_has_no_offsets(number: int) -> None:
    a = legal(number, "Alibi")
    a["compress_seq_offset"] = ZEROS
    check_refused(
        a, ParamInvalidError, "compress_seq_offset: expected None in Alibi, got an array [4]"
    )


@pytest.mark.parametrize(
    ("number", "rule", "name", "array", "message"),
    [
        (3, "Rope", "slot_mapping", ZEROS, f"{SQUARE}, got [4]"),
        (3, "Alibi", "slot_mapping", ZEROS.reshape(4, 1), f"{SQUARE}, got [4, 1]"),
        (5, "Rope", "slot_mapping", ZEROS.reshape(2, 2), f"{FLAT}, got [2, 2]"),
        (4, "Alibi", "slot_mapping", ZEROS[:3], f"{FLAT}, got [3]"),
        (3, "Rope", "compress_lens", ZEROS.reshape(4, 1), f"{SQUARE}, got [4, 1]"),
        (3, "Rope", "compress_lens", ZEROS[:3], f"{FLAT}, got [3]"),
        (4, "Alibi", "compress_lens", ZEROS.reshape(2, 2), f"{FLAT}, got [2, 2]"),
        (3, "Omni", "compress_seq_offset", ZEROS.reshape(2, 2), f"{FLAT}, got [2, 2]"),
        (5, "Rope", "compress_seq_offset", ZEROS[:0], f"{FLAT}, got [0]"),
        (3, "Rope", "seq_lens", ZEROS[:3], "expected shape [2] ([B], B of key), got [3]"),
        (5, "Rope", "seq_lens", ZEROS.reshape(2, 2), "expected shape [B], got [2, 2]"),
        (5, "Rope", "seq_lens", np.zeros((), np.int64), "expected shape [B], got []"),
        (
            *(5, "Rope", "seq_lens", ZEROS[:2].astype(np.int32)),
            "expected dtype int64 as slot_mapping, got int32",
        ),
        (
            *(5, "Rope", "compress_lens", np.zeros(4, np.float32)),
            "expected dtype int32 or int64, got float32",
        ),
        (
            *(5, "Rope", "key_cache", half(5, 8, 2, 8)),
            "expected shape [nb, bs, 1, D] (compression writes one head a row), got [5, 8, 2, 8]",
        ),
        (5, "Rope", "key_cache", half(5, 8, 8), "expected shape [nb, bs, 1, D], got [5, 8, 8]"),
        (
            *(5, "Rope", "key", half(10, 2, 9)),
            "expected shape [10, 2, 8] (head size 8 of key_cache), got [10, 2, 9]",
        ),
        (
            *(3, "Rope", "key", half(2, 7, 2, 7)),
            "expected shape [2, 7, 2, 8] (head size 8 of key_cache), got [2, 7, 2, 7]",
        ),
        (
            *(3, "Rope", "value", half(2, 6, 2, 4)),
            "expected shape [2, 7, 2, 4] (leading sizes of key), got [2, 6, 2, 4]",
        ),
        (
            *(5, "Omni", "value_cache", half(4, 8, 1, 4)),
            "expected shape [5, 8, 1, 4] (leading sizes of key_cache), got [4, 8, 1, 4]",
        ),
    ],
)
def test_shapes_and_types(number: int, rule: str, name: str, array: Array, message: str) -> None:
    a = legal(number, rule)
    a[name] = array
    check_refused(a, ParamInvalidError, f"{name}: {message}")


def test_the_number_of_batches_is_that_of_the_lengths() -> None:
    a = legal(5, "Rope")
    a["seq_lens"] = np.array([4, 5, 1])
    check_refused(
        a,
        ParamInvalidError,
        "slot_mapping: expected shape [6] ([B*H], B 3, H 2), got [4]",
    )


def test_key_and_value_have_one_type() -> None:
    a = legal(4, "Alibi")
    a["value"] = a["value"].astype(np.float32)
    check_refused(a, ParamInvalidError, "value_cache: expected dtype float32 as value, got float16")
    a["value_cache"] = a["value_cache"].astype(np.float32)
    expected = "expected dtype float16 as key (only PA_NZ mixes dtypes), got float32"
    check_refused(a, ParamInvalidError, f"value: {expected}")


def test_mode_none_takes_the_rule_from_the_offsets() -> None:
    for rule in ("Rope", "Alibi"):
        for mode in (None, "", "None"):
            a = legal(3, rule)
            a["scatter_mode"] = mode
            check_legal(a)


@pytest.mark.parametrize("element", FLOAT4)
@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_float4_has_no_mean(number: int, rule: str, element: str) -> None:
    a = legal(number, rule)
    for name in ("key", "key_cache", "value", "value_cache"):
        a[name] = a[name].astype(np.uint8)
    a |= {"dtype": element, "value_dtype": element}
    if rule != "Rope":
        check_legal(a)
        return
    expected = "expected a dtype that has a mean (no float4) in Rope"
    check_refused(a, ParamInvalidError, f"key: {expected}, got {element}")


def test_an_input_may_not_lie_in_a_cache() -> None:
    a = legal(5, "Rope")
    a["key"] = a["key_cache"].reshape(-1)[:160].reshape(10, 2, 8)
    check_refused(
        a,
        ParamInvalidError,
        "key_cache: expected memory of its own, got bytes shared with key",
    )
    a = legal(4, "Alibi")
    a["compress_lens"] = a["key_cache"].view(np.int64).reshape(-1)[:4]
    check_refused(
        a,
        ParamInvalidError,
        "key_cache: expected memory of its own, got bytes shared with compress_lens",
    )


def test_shapes_no_memory_holds_are_refused_without_a_wrap() -> None:
    """Repeated items make arrays of any size: counts must not wrap, and nothing may hang."""
    count = 2**44
    many = np.broadcast_to(np.int64(-1), (count * 2**15,))
    lengths = np.broadcast_to(np.int64(0), (count,))
    key = np.broadcast_to(np.int8(0), (1, 2**15, 1))
    cache = np.zeros((1, 1, 1, 1), np.int8)
    with pytest.raises((MemoryError, ParamInvalidError)):
        kvcore.scatter_pa_kv_cache(
            key, cache, many, compress_lens=many, seq_lens=lengths, scatter_mode="Alibi"
        )
    # All runs are skipped, so that even a huge source costs nothing.
    huge = np.broadcast_to(np.int8(0), (2**50, 1, 1))
    one = np.array([-1])
    plan = kvcore.plan_scatter_pa_kv_cache(
        huge, cache, one, compress_lens=one + 1, seq_lens=one + 1 + 2**50, scatter_mode="Alibi"
    )
    plan.run()
    assert plan.bytes_moved == 0
    assert cache.tolist() == [[[[0]]]]
