# SPDX-License-Identifier: Apache-2.0
"""Repeated slots and too many rows under a SoC: what is warned of, refused, and fine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
import oracle
from kvcore._kernels import scan
from kvcore.errors import KVPortabilityWarning, ParamInvalidError
from soc_calls import NAMES, RUNS

FORBIDS = (
    "; the operator's document forbids repeated slots and promises nothing of what they hold "
    "(here the last token wins)"
)
ROWS = [(v, s) for v, s in RUNS if v[0] in "1267"]
COMPRESSED = [(v, s) for v, s in RUNS if v[0] in "345"]


def given(call: Callable[[], object]) -> list[str]:
    """The texts of a call's warnings about slots."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert {one.category for one in caught} <= {KVPortabilityWarning}
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught if "slot_mapping" in str(one.message)]


def rows_call(variant: str, slots: list[int], index: str = "int32") -> dict[str, Any]:
    """Tokens of 2 heads of 32 into 4 blocks of 4 rows, each token's items of its own value."""
    tokens = len(slots)
    key = np.arange(1, tokens * 64 + 1, dtype=np.float16).reshape(tokens, 2, 32)
    shape = {"1": (4, 4, 4, 16), "7": (4, 2, 4, 32)}.get(variant[0], (4, 4, 2, 32))
    call: dict[str, Any] = {
        "key": key,
        "key_cache": np.zeros(shape, np.float16),
        "slot_mapping": np.array(slots, index),
    }
    if variant[0] != "6":
        call |= {"value": -key, "value_cache": np.zeros(shape, np.float16)}
    if variant[0] == "1":
        call["cache_mode"] = "PA_NZ"
    if variant[0] == "7":
        call["scatter_mode"] = "NHSD"
    if variant.endswith("Nct"):
        call |= {"scatter_mode": "Nct", "strides": (64, 64), "offsets": (0, 0)}
    return call


def check_bytes(call: dict[str, Any], run: Callable[..., list[str]], **more: Any) -> list[str]:
    """Run it; the caches are then what the oracle says, whatever is warned of."""
    want = oracle.run("scatter_pa_kv_cache", call)
    found = run(**call, **more)
    for name, expected in want.outputs.items():
        np.testing.assert_array_equal(call[name], expected)
    return found


def scattered(**call: Any) -> list[str]:
    return given(lambda: kvcore.scatter_pa_kv_cache(**call))


# ---------------------------------------------------------------- a slot a token
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize(("variant", "soc"), ROWS)
def test_a_repeated_slot_is_warned_of_and_the_last_token_wins(
    variant: str, soc: str, index: str
) -> None:
    call = rows_call(variant, [5, 9, 3, 9, 5], index)
    assert check_bytes(call, scattered, soc=soc) == [
        f"{soc}: slot_mapping[3] = 9 repeats slot_mapping[1]{FORBIDS}"
    ]


@pytest.mark.parametrize("slots", [[5, 9, 3], [0, 1, 2, 15], [3, 2, 1, 0], [7], []])
@pytest.mark.parametrize(("variant", "soc"), ROWS)
def test_distinct_slots_are_not(variant: str, soc: str, slots: list[int]) -> None:
    assert check_bytes(rows_call(variant, slots), scattered, soc=soc) == []


@pytest.mark.parametrize(("variant", "soc"), [r for r in ROWS if r[0] != "7"])
def test_negative_slots_repeat_nothing(variant: str, soc: str) -> None:
    for slots in ([5, -1, -1], [-1, -1, -1], [-1, 5, -7, -1, 4]):
        assert check_bytes(rows_call(variant, slots), scattered, soc=soc) == []


def test_without_a_soc_nothing_is_said() -> None:
    assert check_bytes(rows_call("2", [5, 5, 5]), scattered) == []


@pytest.mark.parametrize("soc", NAMES)
def test_a_slot_out_of_range_is_an_error_before_a_repeat_is_a_warning(soc: str) -> None:
    for slots in ([5, 5, 16], [16, 5, 5]):
        call = rows_call("2", slots)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(kvcore.SlotRangeError, match=r"slot_mapping\[[02]\]: expected slot"):
                kvcore.scatter_pa_kv_cache(**call, soc=soc)
        assert not call["key_cache"].any()


def test_a_warning_made_an_error_writes_nothing() -> None:
    call = rows_call("2", [5, 9, 5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KVPortabilityWarning, match="forbids repeated slots"):
            kvcore.scatter_pa_kv_cache(**call, soc="A2")
    assert not call["key_cache"].any()
    assert not call["value_cache"].any()


def test_a_plan_looks_at_each_run() -> None:
    call = rows_call("2", [5, 9, 3])
    plan = kvcore.plan_scatter_pa_kv_cache(**call, soc="A3")
    assert given(plan.run) == []
    call["slot_mapping"][2] = 5
    for _ in range(2):
        assert given(plan.run) == [f"A3: slot_mapping[2] = 5 repeats slot_mapping[0]{FORBIDS}"]
    assert given(plan.check_values) != []
    call["slot_mapping"][2] = 4
    assert given(plan.run) == []


def test_the_key_operator_of_the_950_warns_too() -> None:
    call = rows_call("6", [5, 5])
    assert given(lambda: kvcore.scatter_pa_cache(**call, soc="950")) == [
        f"950: slot_mapping[1] = 5 repeats slot_mapping[0]{FORBIDS}"
    ]


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("num_slots", [4096, 1 << 21])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_slots_on_one_thread_and_several(
    num_threads: int, num_slots: int, repeated: bool
) -> None:
    # The greater cache has more slots than are worth a map of a bit each for 1024 tokens.
    rng = np.random.default_rng(1)
    slots = rng.permutation(num_slots)[:1024]
    key = rng.integers(0, 256, (1024, 1, 2048 if num_slots == 4096 else 4)).astype(np.uint8)
    cache = np.zeros((num_slots // 16, 16, 1, key.shape[2]), np.uint8)
    if repeated:
        slots[1000] = slots[7]
    want = cache.copy()
    for slot, token in zip(slots, key, strict=True):
        want[slot // 16, slot % 16] = token
    found = given(
        lambda: kvcore.scatter_pa_cache(key, cache, slots, soc="950", num_threads=num_threads)
    )
    np.testing.assert_array_equal(cache, want)
    text = f"950: slot_mapping[1000] = {slots[7]} repeats slot_mapping[7]{FORBIDS}"
    assert found == ([text] if repeated else [])


# ---------------------------------------------------------------- the scan
def first_repeat(values: list[int]) -> tuple[int, int] | None:
    """Place by place."""
    for at, value in enumerate(values):
        if value >= 0 and value in values[:at]:
            return at, values.index(value)
    return None


@pytest.mark.parametrize("bound", [9, 64, 65, 4096, 1 << 24, 2**63 - 1])
def test_the_scan_finds_the_first_repeat(bound: int) -> None:
    rng = np.random.default_rng(bound % 1000)
    for size in (0, 1, 2, 3, 8, 63, 64, 65, 200):
        for _ in range(20):
            values = rng.integers(-2, min(bound, 4 * size + 3), size)
            if bound > 4096:
                values[values > 0] += bound - 1000  # the last slots there are
            values[values >= bound] = bound - 1
            assert scan.repeat(values, bound) == first_repeat(values.tolist())


def test_the_scan_of_values_that_were_chosen_to_collide() -> None:
    # Multiples of an odd number's inverse: all begin their search at one place of the table.
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    values = [(i * inverse) % (1 << 64) for i in range(200_000)]
    chosen = np.array([v for v in values if v < 2**63 - 1][:4096], np.int64)
    assert len(set(chosen.tolist())) == len(chosen) == 4096
    assert scan.repeat(chosen, 2**63 - 1) is None
    chosen[3000] = chosen[17]
    chosen[4000] = chosen[3]
    assert scan.repeat(chosen, 2**63 - 1) == (3000, 17)


# ---------------------------------------------------------------- runs
def runs_call(variant: str, **contents: Any) -> dict[str, Any]:
    """Two requests of 4 tokens, two heads of 32: a run of rows a (batch, head)."""
    number, _, mode = variant.partition(" ")
    mode = mode or "Alibi"
    shape = (2, 4, 2, 32) if number == "3" else (8, 2, 32)
    blocks = contents.pop("blocks", 8)
    call: dict[str, Any] = {
        "key": np.arange(512, dtype=np.float16).reshape(shape) / 8,
        "key_cache": np.zeros((blocks, 4, 1, 32), np.float16),
        "slot_mapping": [0, 8, 16, 24],
        "compress_lens": [2, 2, 2, 2],
        "seq_lens": [4, 4],
        "scatter_mode": mode,
    }
    if mode != "Alibi":
        call["compress_seq_offset"] = [1, 1, 1, 1]
    call |= contents
    call["value"], call["value_cache"] = -call["key"], call["key_cache"].copy()
    for name in ("slot_mapping", "compress_lens", "seq_lens", "compress_seq_offset"):
        if name in call:
            call[name] = np.array(call[name], np.int32)
    if number == "3":
        call["slot_mapping"] = call["slot_mapping"].reshape(2, 2)
    return call


def place(variant: str, i: int) -> str:
    return f"slot_mapping[{i // 2}, {i % 2}]" if variant[0] == "3" else f"slot_mapping[{i}]"


@pytest.mark.parametrize(
    ("slots", "at", "before"),
    [
        ([0, 8, 16, 8], 3, 1),  # equal starts
        ([0, 8, 16, 9], 3, 1),  # the last row of one is the first of another
        ([9, 8, 16, 24], 1, 0),
        ([29, 20, 10, 28], 3, 0),
    ],
)
@pytest.mark.parametrize(("variant", "soc"), COMPRESSED)
def test_runs_that_overlap(variant: str, soc: str, slots: list[int], at: int, before: int) -> None:
    call = runs_call(variant, slot_mapping=slots)
    assert check_bytes(call, scattered, soc=soc) == [
        f"{soc}: {place(variant, at)} = {slots[at]} begins a run that overlaps that of "
        f"{place(variant, before)}{FORBIDS}"
    ]


@pytest.mark.parametrize("slots", [[0, 8, 16, 24], [28, 0, 16, 4], [4, 8, 0, 12]])
@pytest.mark.parametrize(("variant", "soc"), COMPRESSED)
def test_runs_side_by_side(variant: str, soc: str, slots: list[int]) -> None:
    assert check_bytes(runs_call(variant, slot_mapping=slots), scattered, soc=soc) == []


@pytest.mark.parametrize(("variant", "soc"), [r for r in COMPRESSED if r[0] in ("3 Alibi", "4")])
def test_an_empty_run_shares_no_slot(variant: str, soc: str) -> None:
    call = runs_call(variant, slot_mapping=[8, 8, 9, 24], compress_lens=[2, 0, 0, 2])
    assert check_bytes(call, scattered, soc=soc) == []
    call = runs_call(variant, slot_mapping=[8, -1, 24, -1])
    assert not [t for t in check_bytes(call, scattered, soc=soc) if "repeated" in t]


@pytest.mark.parametrize("repeated", [False, True])
def test_runs_in_a_cache_of_more_slots_than_a_map_is_worth(repeated: bool) -> None:
    blocks = (1 << 21) // 32
    last = 32 * blocks - 2
    slots = [last, 0, 1000, last - 1 if repeated else last - 2]
    call = runs_call("4", slot_mapping=slots)
    for name in ("key", "value"):
        call[name] = call[name][..., :1].copy()
        call[f"{name}_cache"] = np.zeros((blocks, 32, 1, 1), np.float16)
    found = check_bytes(call, scattered, soc="950")
    text = f"950: slot_mapping[3] = {last - 1} begins a run that overlaps that of slot_mapping[0]"
    assert found == ([text + FORBIDS] if repeated else [])


@pytest.mark.parametrize("num_slots", [128, 200, 300])
def test_runs_over_the_words_of_the_map(num_slots: int) -> None:
    # Two runs of up to 130 rows at every distance that matters.
    for first, rows, second in [
        (0, 64, 64), (0, 64, 63), (1, 63, 64), (1, 64, 64), (64, 64, 0), (63, 2, 0), (0, 1, 0),
        (5, 130, 135), (5, 130, 134), (127, 1, 63), (0, 128, 128), (0, 129, 128),
    ]:  # fmt: skip
        if 2 * rows > num_slots:  # fewer slots than tokens, which a SoC refuses
            continue
        tokens = np.arange(2 * rows, dtype=np.int32).reshape(2 * rows, 1, 1)
        call = {
            "key": tokens,
            "key_cache": np.zeros((num_slots, 1, 1, 1), np.int32),
            "slot_mapping": np.array([first, second]),
            "compress_lens": np.array([rows, min(rows, 3)]),
            "seq_lens": np.array([rows, rows]),
            "scatter_mode": "Alibi",
        }
        call |= {"value": tokens, "value_cache": call["key_cache"].copy()}
        overlap = {*range(first, first + rows)} & {*range(second, second + min(rows, 3))}
        assert bool(scattered(**call, soc="950")) is bool(overlap), (first, rows, second)


# ---------------------------------------------------------------- the sum of what is written
def full_call(variant: str, rows: int, blocks: int) -> dict[str, Any]:
    """One run more or less of ``rows`` rows in all, into blocks of 4, all slots beginning at 0."""
    mode = variant.partition(" ")[2] or "Alibi"
    # 4 runs of up to 4 rows; Rope's mean row stands for two tokens, Omni drops one.
    parts = [rows // 4 + (i < rows % 4) for i in range(4)]
    windows, starts = parts, [0, 0, 0, 0]
    if mode == "Rope":
        windows = [4 - part + 1 for part in parts]
    if mode == "Omni":
        windows = [4 - part for part in parts]
    return runs_call(
        variant,
        blocks=blocks,
        slot_mapping=[0, 0, 0, 0],
        compress_lens=windows,
        **({} if mode == "Alibi" else {"compress_seq_offset": starts}),
    )


@pytest.mark.parametrize(("variant", "soc"), COMPRESSED)
def test_a_call_writes_at_most_as_many_rows_as_there_are_slots(variant: str, soc: str) -> None:
    call = full_call(variant, 13, 3)
    before = call["key_cache"].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if soc == "950" and variant[0] != "3":
            warnings.filterwarnings("ignore", "950: the tiling of today refuses compression")
        with pytest.raises(ParamInvalidError) as caught:
            kvcore.scatter_pa_kv_cache(**call, soc=soc)
    assert str(caught.value) == (
        "key_cache: expected num_blocks * block_size >= 13, the rows that this call writes, "
        f"on {soc}, got 3 * 4 = 12"
    )
    assert (caught.value.argument, caught.value.code) == ("key_cache", 161002)
    np.testing.assert_array_equal(call["key_cache"], before)


@pytest.mark.parametrize(("variant", "soc"), COMPRESSED)
def test_a_sum_equal_to_the_slots_passes(variant: str, soc: str) -> None:
    call = full_call(variant, 12, 3)
    check_bytes(call, scattered, soc=soc)
    call = full_call(variant, 12, 3)
    call["slot_mapping"].reshape(-1)[:] = [0, 3, 6, 9]  # side by side, they fill the cache
    assert check_bytes(call, scattered, soc=soc) == []
    assert call["key_cache"].any(axis=(2, 3)).sum() >= 11


@pytest.mark.parametrize(("variant", "soc"), COMPRESSED)
def test_a_run_with_a_negative_slot_counts_nothing(variant: str, soc: str) -> None:
    call = full_call(variant, 16, 3)
    call["slot_mapping"].reshape(-1)[:] = [0, 4, 8, -1]
    check_bytes(call, scattered, soc=soc)


@pytest.mark.parametrize("variant", ["3 Alibi", "3 Rope", "3 Omni", "4", "5 Rope", "5 Omni"])
def test_without_a_soc_any_number_of_rows_is_written(variant: str) -> None:
    assert check_bytes(full_call(variant, 16, 3), scattered) == []


@pytest.mark.parametrize(("variant", "soc"), [r for r in COMPRESSED if r[0] in ("3 Alibi", "4")])
def test_the_documents_sum_alone_is_warned_of_in_alibi(variant: str, soc: str) -> None:
    def texts(windows: list[int], slots: list[int]) -> list[str]:
        call = runs_call(variant, blocks=2, slot_mapping=slots, compress_lens=windows)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kvcore.scatter_pa_kv_cache(**call, soc=soc)
        return [str(one.message) for one in caught if "sum of" in str(one.message)]

    assert texts([2, 2, 2, 2], [0, 2, 4, 6]) == []  # 8 rows left out, 8 slots
    assert texts([1, 2, 2, 2], [0, 2, 4, 6]) == [
        f"{soc}: the document bounds the sum of seq_lens - compress_lens by "
        "num_blocks * block_size = 2 * 4 in Alibi too, which writes compress_lens rows of a run; "
        "it is 9"
    ]
    assert texts([1, 2, 2, 2], [0, 2, 4, -1]) == []


def test_the_key_operator_counts_rows_too() -> None:
    call = full_call("3 Rope", 13, 3)
    for name in ("value", "value_cache", "scatter_mode"):
        del call[name]
    with pytest.raises(ParamInvalidError, match="the rows that this call writes, on 950"):
        kvcore.scatter_pa_cache(**call, soc="950")
    kvcore.scatter_pa_cache(**call)
    assert call["key_cache"].any()
