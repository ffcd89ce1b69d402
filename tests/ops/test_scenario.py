# SPDX-License-Identifier: Apache-2.0
"""scenario_of: which scenario a call is, with arrays or with (shape, dtype) in their place."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvcore
from kvcore import dtypes
from kvcore.errors import ParamInvalidError, ParamNullError
from soc_calls import ALL, VARIANTS, arguments

torch: Any
try:
    import torch
except ImportError:
    torch = None

NORM: dict[str, Any] = {
    "key": ((4, 2, 32), "float16"),
    "key_cache": ((8, 4, 2, 32), "float16"),
    "slot_mapping": ((4,), "int32"),
    "value": ((4, 2, 32), "float16"),
    "value_cache": ((8, 4, 2, 32), "float16"),
}


def as_arrays(call: dict[str, Any]) -> dict[str, Any]:
    """The same call with arrays of zeros; types that numpy lacks as raw ones, named with dtype=."""
    found = {}
    for name, value in call.items():
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
            row = dtypes.BY_NAME[value[1]]
            shape = (*value[0][:-1], value[0][-1] // 2) if row.packed else value[0]
            found[name] = np.zeros(shape, row.raw if row.kind.startswith("float") else row.name)
            if row.kind.startswith("float"):
                found["dtype"] = row.name
        else:
            found[name] = value
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_scenario_has_its_number(variant: str) -> None:
    scenario = kvcore.scenario_of(**arguments(variant))
    assert scenario.number == int(variant[0])
    assert list(scenario.runs) == ["A2", "A3", "950"]
    running = tuple(name for name, reason in scenario.runs.items() if reason is None)
    assert running == VARIANTS[variant]
    assert all(isinstance(reason, str | None) for reason in scenario.runs.values())


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("variant", ["1", "2", "2 Nct", "3 Alibi", "4", "5 Omni", "6", "7"])
def test_arrays_and_pairs_give_the_same_answer(variant: str, dtype: str) -> None:
    call = arguments(variant, dtype)
    assert kvcore.scenario_of(**call) == kvcore.scenario_of(**as_arrays(call))


def test_arrays_and_pairs_may_be_mixed() -> None:
    arrays = as_arrays(NORM)
    mixed = NORM | {"key": arrays["key"].view(np.float16), "slot_mapping": arrays["slot_mapping"]}
    assert kvcore.scenario_of(**mixed) == kvcore.scenario_of(**NORM)


def test_strides_of_arrays_count() -> None:
    wide = np.zeros((4, 6, 32), np.float16)[:, ::3]
    warned = kvcore.scenario_of(**NORM | {"key": wide}).warnings
    assert set(warned) == {"A2", "A3"}
    assert "ignores the strides of key" in warned["A2"][0]


def test_arrays_are_only_looked_at() -> None:
    call = as_arrays(NORM)
    slots = call["slot_mapping"]
    slots[:] = 10**6  # no slot of that cache
    kvcore.scenario_of(**call)
    assert not call["key_cache"].any()
    assert (slots == 10**6).all()


def test_positions_are_those_of_the_operator() -> None:
    order = ("key", "key_cache", "slot_mapping", "value", "value_cache")
    assert kvcore.scenario_of(*(NORM[name] for name in order)) == kvcore.scenario_of(**NORM)


@pytest.mark.parametrize("soc", [None, "A3", "950"])
def test_a_soc_in_force_changes_nothing(soc: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = arguments("7", "float32")
    plain = kvcore.scenario_of(**call)
    monkeypatch.setenv("KVCORE_SOC", "A2")
    with kvcore.use_soc(soc):
        assert kvcore.scenario_of(**call, soc=soc, backend="cpu", num_threads=1) == plain


def test_a_cache_larger_than_any_memory() -> None:
    huge = ((2**30, 128, 64, 256), "float32")
    call = NORM | {
        "key": ((2**30, 64, 256), "float32"),
        "value": ((2**30, 64, 256), "float32"),
        "slot_mapping": ((2**30,), "int64"),
        "key_cache": huge,
        "value_cache": huge,
    }
    assert kvcore.scenario_of(**call).runs["950"] is None


def test_the_answer_prints_a_line_a_soc() -> None:
    wide = np.zeros((4, 6, 32), np.float16)[:, ::3]
    lines = str(kvcore.scenario_of(**NORM | {"key": wide})).splitlines()
    assert lines[0] == "scenario 2"
    assert lines[1] == "A2: runs"
    assert lines[2].startswith("  warned of: A2: the kernel ignores the strides of key ")
    assert lines[-1] == "950: runs"
    lines = str(kvcore.scenario_of(**arguments("7"))).splitlines()
    assert lines[-1].startswith("950: refused: scatter_mode: expected ")


# ---------------------------------------------------------------- dtypes of pairs
SPELLINGS: list[tuple[Any, str]] = [
    ("bfloat16", "bfloat16"),
    (np.float16, "float16"),
    (np.dtype("float32"), "float32"),
    ("f4", "float32"),
    (float, "float64"),
    (ml_dtypes.bfloat16, "bfloat16"),
    (np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2"),
    (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
    ("hifloat8", "hifloat8"),
    (dtypes.BY_NAME["uint16"], "uint16"),
]


@pytest.mark.parametrize(("spelled", "name"), SPELLINGS)
def test_dtypes_are_spelled_in_many_ways(spelled: Any, name: str) -> None:
    call = dict(NORM)
    for argument in ("key", "key_cache", "value", "value_cache"):
        call[argument] = (NORM[argument][0], spelled)
    if name == "float64":
        with pytest.raises(ParamInvalidError, match=r"^key: expected a dtype among .*got float64$"):
            kvcore.scenario_of(**call)
        return
    reason = kvcore.scenario_of(**call).runs["A3"]
    if name in ("float16", "bfloat16"):
        assert reason is None
    else:
        assert reason is not None
        assert reason.endswith(f", got {name}")


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_torch_dtypes_shapes_and_tensors() -> None:
    half, index = torch.bfloat16, torch.int64
    call = {
        "key": (torch.Size([4, 2, 32]), half),
        "key_cache": torch.zeros((8, 4, 2, 32), dtype=half),
        "slot_mapping": ((4,), index),
    }
    assert kvcore.scenario_of(**call).runs["A3"] is None
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    if packed is not None:
        call |= {"key": ((4, 2, 16), packed), "key_cache": ((8, 4, 2, 16), packed)}
        reason = kvcore.scenario_of(**call).runs["A3"]
        assert reason is not None
        assert reason.endswith(", got float4_e2m1")


@pytest.mark.parametrize("name", ["float4_e2m1", "float4_e1m2"])
def test_shapes_of_float4_count_elements(name: str) -> None:
    def pair(*shape: int) -> Any:
        return shape, name

    call = {
        "key": pair(4, 2, 64),
        "key_cache": pair(4, 2, 8, 64),  # c0: 64 elements in 32 bytes
        "slot_mapping": ((4,), "int32"),
        "value": pair(4, 2, 128),
        "value_cache": pair(4, 4, 8, 64),
        "cache_mode": "PA_NZ",
    }
    assert kvcore.scenario_of(**call).runs["950"] is None
    # The same call of packed arrays.
    arrays = {
        n: ((*one[0][:-1], one[0][-1] // 2), "uint8")
        for n, one in call.items()
        if n != "cache_mode" and one[1] == name
    }
    found = kvcore.scenario_of(**call | arrays, dtype=name, value_dtype=name)
    assert found == kvcore.scenario_of(**call)
    for wrong in (pair(4, 2, 32), pair(4, 2, 96)):  # half a cell, one and a half
        with pytest.raises(ParamInvalidError, match=r"^key: expected a head size of whole 32-byte"):
            kvcore.scenario_of(**call | {"key": wrong})
    with pytest.raises(ParamInvalidError, match=r"^key: expected a last axis of an even size"):
        kvcore.scenario_of(**call | {"key": pair(4, 2, 63)})


def test_unpacked_float4_is_refused_as_in_an_array() -> None:
    with pytest.raises(ParamInvalidError, match=r"^key: expected packed float4 .*pack_float4"):
        kvcore.scenario_of(**NORM | {"key": ((4, 2, 32), ml_dtypes.float4_e2m1fn)})


# ---------------------------------------------------------------- what is wrong anywhere
WRONG: list[tuple[Any, str]] = [
    (((4, 2, 32), "float17"), "a dtype or the name of one, got 'float17'"),
    (((4, 2, 32), object()), "a dtype or the name of one"),
    (((4, 2, 32), None), "a dtype or the name of one, got None"),
    (((4, 2, 32), ""), "a dtype or the name of one"),
    (((4, 2, 32), ">f2"), "native byte order, got dtype >f2"),
    (((4, 2, -32), "float16"), r"a shape of sizes >= 0, got \[4, 2, -32\]"),
    (((4, 2.0, 32), "float16"), r"an array or a pair \(shape, dtype\), got the shape"),
    (((4, "2", 32), "float16"), r"an array or a pair \(shape, dtype\), got the shape"),
    ((7, "float16"), r"an array or a pair \(shape, dtype\), got the shape 7"),
    (("4", "float16"), r"an array or a pair \(shape, dtype\), got the shape '4'"),
    ((None, "float16"), r"an array or a pair \(shape, dtype\), got the shape None"),
    (((4, 2, 32),), r"an array or a pair \(shape, dtype\), got a tuple of 1"),
    ([4, 2, 32], r"an array or a pair \(shape, dtype\), got a list of 3"),
    ((), r"an array or a pair \(shape, dtype\), got a tuple of 0"),
    (((1,) * 9, "float16"), "at most 8 axes, got 9"),
    (((2**62, 2), "float16"), r"an array below 2\*\*63 bytes"),
    (((10**30,), "int8"), r"an array below 2\*\*63 bytes"),
    ("float16", r"an array \(numpy, torch, DLPack, buffer protocol\), got str"),
    (3, r"an array \(numpy, torch, DLPack, buffer protocol\), got int"),
]


@pytest.mark.parametrize(("value", "words"), WRONG)
@pytest.mark.parametrize("argument", ["key", "value_cache", "slot_mapping"])
def test_what_is_neither_an_array_nor_a_pair(argument: str, value: Any, words: str) -> None:
    with pytest.raises(ParamInvalidError, match=rf"^{argument}: expected {words}") as caught:
        kvcore.scenario_of(**NORM | {argument: value})
    assert caught.value.argument == argument


def test_calls_that_no_machine_accepts_raise_what_the_operator_raises() -> None:
    with pytest.raises(ParamNullError, match=r"^key: "):
        kvcore.scenario_of(**NORM | {"key": None})
    with pytest.raises(ParamNullError, match=r"^value_cache: "):
        kvcore.scenario_of(**NORM | {"value_cache": None})
    with pytest.raises(ParamInvalidError, match=r"^scatter_mode: "):
        kvcore.scenario_of(**NORM | {"scatter_mode": "alibi"})
    with pytest.raises(ParamInvalidError, match=r"^slot_mapping: expected dtype int32 or int64"):
        kvcore.scenario_of(**NORM | {"slot_mapping": ((4,), "float16")})
    with pytest.raises(ParamInvalidError, match=r"^key_cache: expected shape"):
        kvcore.scenario_of(**NORM | {"key_cache": ((8, 4, 64), "float16")})
    with pytest.raises(ParamInvalidError, match=r"^strides: expected 2 integers"):
        kvcore.scenario_of(**NORM | {"scatter_mode": "Nct", "strides": (1,)})
