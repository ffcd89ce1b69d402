# SPDX-License-Identifier: Apache-2.0
"""What a SoC refuses of ScatterPaKvCache: each rule, both sides of each bound, on shapes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import ParamInvalidError
from soc_calls import (
    ALL,
    FLOAT4,
    HALF,
    NAMES,
    OLDER,
    REFUSED,
    RUNS,
    SHORT,
    arguments,
    verdict,
)


def runs(soc: str, variant: str, dtype: str = "float16", **sizes: Any) -> None:
    assert verdict(soc, variant, dtype, **sizes) is None


def refuses(soc: str, start: str, variant: str, dtype: str = "float16", **sizes: Any) -> None:
    reason = verdict(soc, variant, dtype, **sizes)
    assert reason is not None
    assert reason.startswith(start), reason
    assert f"on {soc}" in reason
    assert ", got " in reason


# ---------------------------------------------------------------- scenarios
@pytest.mark.parametrize(("variant", "soc"), RUNS)
def test_scenarios_that_run(variant: str, soc: str) -> None:
    runs(soc, variant)


@pytest.mark.parametrize(("variant", "soc"), REFUSED)
def test_scenarios_that_are_refused(variant: str, soc: str) -> None:
    argument = {"3": "key", "6": "value", "7": "scatter_mode"}[variant[0]]
    refuses(soc, f"{argument}: expected ", variant)
    assert kvcore.scenario_of(**arguments(variant)).number == int(variant[0])


@pytest.mark.parametrize("soc", OLDER)
@pytest.mark.parametrize("variant", ["1", "4", "5 Rope", "7"])
def test_older_socs_take_the_key_alone_in_scenario_6_only(variant: str, soc: str) -> None:
    call = arguments(variant)
    del call["value"], call["value_cache"]
    reason = kvcore.scenario_of(**call).runs[soc]
    assert reason is not None
    assert reason.startswith(f"value: expected an array in scenario {variant[0]} on {soc} ")
    assert reason.endswith("key only is scenario 6, got None")


@pytest.mark.parametrize("variant", ["1", "2", "2 Nct", "3 Rope", "4", "5 Omni"])
@pytest.mark.parametrize("absent", ["None", "a 0-d array"])
def test_950_takes_the_key_alone_in_the_other_operator_only(variant: str, absent: str) -> None:
    call = arguments(variant)
    value = None if absent == "None" else ((), "float16")
    call |= {"value": value, "value_cache": value}
    reason = kvcore.scenario_of(**call).runs["950"]
    assert reason is not None
    assert reason.startswith("value: expected an array in scenario ")
    assert "on 950" in reason
    assert reason.endswith(f"key only is scatter_pa_cache, got {absent}")


# ---------------------------------------------------------------- dtypes
def accepted(soc: str, variant: str) -> tuple[str, ...]:
    if soc == "950":
        if variant in ("1", "2"):
            return ALL
        if variant[0] == "5":
            return HALF
        return tuple(name for name in ALL if name not in FLOAT4)
    return HALF if variant[0] in "57" else SHORT


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("variant", "soc"), RUNS)
def test_dtypes(variant: str, soc: str, dtype: str) -> None:
    if dtype in FLOAT4 and variant in ("3 Rope", "5 Rope"):
        with pytest.raises(ParamInvalidError):  # no mean of float4 on any machine
            kvcore.scenario_of(**arguments(variant, dtype))
    elif dtype in accepted(soc, variant):
        runs(soc, variant, dtype)
    else:
        refuses(soc, "key: expected dtype ", variant, dtype)


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("soc", NAMES)
def test_both_index_dtypes(soc: str, index: str) -> None:
    runs(soc, "2", index=index)
    runs(soc, "4", index=index)


@pytest.mark.parametrize(
    ("key", "value", "older"),
    [
        ("int8", "int8", None),
        ("int8", "float16", None),
        ("int8", "bfloat16", None),
        ("bfloat16", "float16", None),
        ("float16", "int8", "value: expected int8 only with an int8 key on "),
        ("bfloat16", "int8", "value: expected int8 only with an int8 key on "),
        ("float16", "float32", "value: expected dtype float16, bfloat16 or int8 "),
        ("uint8", "float16", "key: expected dtype float16, bfloat16 or int8 "),
    ],
)
def test_mixed_dtypes_in_nz(key: str, value: str, older: str | None) -> None:
    runs("950", "1", key, value_dtype=value)
    for soc in OLDER:
        if older is None:
            runs(soc, "1", key, value_dtype=value)
        else:
            refuses(soc, older, "1", key, value_dtype=value)


# ---------------------------------------------------------------- limits
@pytest.mark.parametrize("axes", [4, 5])
@pytest.mark.parametrize("soc", NAMES)
def test_nz_blocks_have_fewer_than_65535_rows(soc: str, axes: int) -> None:
    runs(soc, "1", block_size=65534, axes=axes)
    words = "key_cache: expected block_size < 65535 in PA_NZ on "
    refuses(soc, words, "1", block_size=65535, axes=axes)


@pytest.mark.parametrize("soc", NAMES)
def test_other_blocks_may_have_more_rows(soc: str) -> None:
    runs(soc, "2", block_size=65535)


@pytest.mark.parametrize("lane", ["size", "value_size"])
def test_nz_head_sizes_are_whole_columns_even_without_a_soc(lane: str) -> None:
    kvcore.scenario_of(**arguments("1", "float16", **{lane: 48}))
    with pytest.raises(ParamInvalidError, match="head size of whole 32-byte columns"):
        kvcore.scenario_of(**arguments("1", "float16", **{lane: 40}))


@pytest.mark.parametrize("variant", ["1", "2", "2 Nct", "4", "5 Rope", "5 Omni"])
@pytest.mark.parametrize("soc", NAMES)
def test_the_cache_has_a_slot_for_each_token(soc: str, variant: str) -> None:
    runs(soc, variant, tokens=32, blocks=8, block_size=4)
    refuses(
        soc,
        f"key_cache: expected num_blocks * block_size >= T = 33 on {soc}, got 8 * 4 = 32",
        variant,
        tokens=33,
        blocks=8,
        block_size=4,
    )


@pytest.mark.parametrize("variant", ["6", "6 Nct", "7"])
@pytest.mark.parametrize("soc", OLDER)
def test_the_cache_has_a_slot_for_each_token_on_older_socs(soc: str, variant: str) -> None:
    runs(soc, variant, tokens=32, blocks=8, block_size=4)
    words = "key_cache: expected num_blocks * block_size >= T = 33 on "
    refuses(soc, words, variant, tokens=33, blocks=8, block_size=4)


def test_padded_places_of_scenario_3_need_no_slots() -> None:
    runs("950", "3 Rope", tokens=1000, blocks=1, block_size=4)


@pytest.mark.parametrize("soc", OLDER)
def test_nhsd_head_sizes_are_whole_32_bytes(soc: str) -> None:
    runs(soc, "7", size=16, value_size=48)
    words = "expected a head size that is a multiple of 16 in NHSD on "
    refuses(soc, f"key: {words}", "7", size=24)
    refuses(soc, f"value: {words}", "7", value_size=24)


@pytest.mark.parametrize("soc", OLDER)
def test_nhsd_has_fewer_than_4095_heads(soc: str) -> None:
    runs(soc, "7", heads=4094, size=16, value_size=0)
    words = "key: expected fewer than 4095 heads in NHSD on "
    refuses(soc, words, "7", heads=4095, size=16, value_size=0)


@pytest.mark.parametrize("lane", ["size", "value_size"])
@pytest.mark.parametrize("soc", OLDER)
def test_nhsd_blocks_have_fewer_than_2_to_32_less_1_items(soc: str, lane: str) -> None:
    # 65536 * 65535 is 2**32 - 65536; the bound itself, 2**32 - 1, is 3 * 5 * 17 * 257 * 65537 and
    # no multiple of 16, so the nearest sizes of whole 32 bytes lie at 2**32 - 16 and 2**32.
    small = {"size": 16, "value_size": 16} | {lane: 32}
    runs(soc, "7", heads=1, blocks=1, block_size=(2**32 - 32) // 32, **small)
    argument = "key_cache" if lane == "size" else "value_cache"
    refuses(
        soc,
        f"{argument}: expected block_size * head_size < 4294967295 in NHSD on ",
        "7",
        heads=1,
        blocks=1,
        block_size=2**32 // 32,
        **small,
    )


@pytest.mark.parametrize("soc", OLDER)
def test_nhsd_tokens_have_fewer_than_196608_bytes(soc: str) -> None:
    # key and value, 2 bytes an element: 12288 * 16 = 196608 bytes of both.
    runs(soc, "7", heads=1, size=49136, value_size=49152)  # 196576 bytes
    refuses(
        soc,
        "key: expected fewer than 196608 bytes in the key and value of a token in NHSD on ",
        "7",
        heads=1,
        size=49152,
        value_size=49152,
    )


# ---------------------------------------------------------------- the same rules on arrays
def test_a_refusal_names_everything_and_writes_nothing() -> None:
    key = np.ones((2, 1, 8), np.float32)
    caches = np.zeros((2, 1, 4, 1, 8), np.float32)
    slots = np.array([0, 1], np.int32)
    with pytest.raises(ParamInvalidError) as caught:
        kvcore.scatter_pa_kv_cache(key, caches[0], slots, key, caches[1], soc="A3")
    error = caught.value
    assert str(error) == (
        "key: expected dtype float16, bfloat16 or int8 in scenario 2 on A3 (ScatterPaKvCache), "
        "got float32"
    )
    assert (error.argument, str(error.seen), error.code) == ("key", "float32", 161002)
    assert "on A3" in str(error.expected)
    assert not caches.any()
    kvcore.scatter_pa_kv_cache(key, caches[0], slots, key, caches[1], soc="950")
    assert caches[:, 0, :2].all()


def test_a_refusal_comes_when_the_plan_is_made() -> None:
    key, cache = np.ones((5, 1, 16), np.float16), np.zeros((1, 4, 1, 16), np.float16)
    with pytest.raises(ParamInvalidError, match=r"^key_cache: expected num_blocks"):
        kvcore.plan_scatter_pa_kv_cache(key, cache, np.full(5, -1), soc="A2")
    kvcore.plan_scatter_pa_kv_cache(key, cache, np.full(5, -1)).run()


def test_without_a_soc_no_limit_holds() -> None:
    for call in (
        arguments("1", "float32", block_size=65535),
        arguments("7", "float32", heads=5000),
        arguments("2", tokens=100, blocks=1, block_size=1),
    ):
        kvcore.scenario_of(**call)  # raises what is wrong without a SoC


# ---------------------------------------------------------------- a 0-d value
@pytest.mark.parametrize("soc", OLDER)
@pytest.mark.parametrize("argument", ["value", "value_cache"])
def test_a_scalar_that_stands_for_no_value_has_the_keys_dtype(argument: str, soc: str) -> None:
    call: dict[str, Any] = {
        "key": np.ones((2, 2, 16), np.float16),
        "key_cache": np.zeros((2, 4, 2, 16), np.float16),
        "slot_mapping": np.array([3, 0], np.int32),
        "value": np.zeros((), np.float16),
        "value_cache": np.zeros((), np.float16),
    }
    kvcore.scatter_pa_kv_cache(**call, soc=soc)
    assert call["key_cache"].any()
    raw = {n: call[n].view(np.uint16) for n in ("key", "key_cache", "value", "value_cache")}
    kvcore.scatter_pa_kv_cache(**call | raw, dtype="bfloat16", soc=soc)
    for wrong in (np.float32, np.int8, np.int64, bool):
        given = call | {argument: np.zeros((), wrong), "key_cache": np.zeros((2, 4, 2, 16), "f2")}
        kvcore.scatter_pa_kv_cache(**given)  # fine without a SoC
        given["key_cache"][...] = 0
        with pytest.raises(ParamInvalidError) as caught:
            kvcore.scatter_pa_kv_cache(**given, soc=soc)
        assert str(caught.value).startswith(f"{argument}: expected dtype float16 as key")
        assert f"on {soc}" in str(caught.value)
        assert not given["key_cache"].any()
