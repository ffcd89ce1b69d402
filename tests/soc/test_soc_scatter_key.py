# SPDX-License-Identifier: Apache-2.0
"""ScatterPaCache with a SoC: the key lane alone, which only the 950 has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import KVPortabilityWarning, ParamInvalidError
from kvcore.ops.questions import QUESTIONS
from soc_calls import ALL, FLOAT4, FLOAT8, OLDER, arguments

VARIANTS = {"6": 6, "3 Alibi": 3, "3 Rope": 3}


def call(variant: str, dtype: str = "float16", **sizes: Any) -> dict[str, Any]:
    found = arguments(variant, dtype, **sizes)
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("value") and not name.endswith("mode")
    }


def verdicts(variant: str, dtype: str = "float16", **sizes: Any) -> dict[str, str | None]:
    answer = QUESTIONS["scatter_pa_cache"].ask(call(variant, dtype, **sizes))
    assert answer.number == VARIANTS[variant]
    assert answer.warnings == {}
    return answer.runs


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_950_has_it(variant: str) -> None:
    found = verdicts(variant)
    assert found["950"] is None
    for soc in OLDER:
        assert found[soc] == f"soc: expected '950' for scatter_pa_cache, got '{soc}'"


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dtypes(variant: str, dtype: str) -> None:
    if variant == "3 Rope" and dtype in FLOAT4:
        with pytest.raises(ParamInvalidError):  # no mean of float4 on any machine
            verdicts(variant, dtype)
        return
    reason = verdicts(variant, dtype)["950"]
    if variant == "6" or dtype not in (*FLOAT8, *FLOAT4):
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith("key: expected dtype float16, bfloat16, float32, int8, ")
        assert reason.endswith(f"on 950 (ScatterPaCache), got {dtype}")


def test_the_cache_has_a_slot_for_each_token() -> None:
    assert verdicts("6", tokens=32, blocks=8, block_size=4)["950"] is None
    reason = verdicts("6", tokens=33, blocks=8, block_size=4)["950"]
    assert reason == "key_cache: expected num_blocks * block_size >= T = 33 on 950, got 8 * 4 = 32"


def test_contents_warn_as_in_the_other_operator() -> None:
    key, cache = np.ones((1, 3, 2, 32), np.float16), np.zeros((4, 4, 1, 32), np.float16)
    slots, windows = np.array([[0, -1]], np.int32), np.array([1, 2], np.int32)
    with pytest.warns(KVPortabilityWarning, match=r"^950: slot_mapping\[1\] = -1 skips single"):
        kvcore.scatter_pa_cache(
            key, cache, slots, compress_lens=windows, seq_lens=np.array([3], np.int32), soc="950"
        )
    assert cache.sum() == 32


def test_a_refused_call_writes_nothing() -> None:
    key, cache = np.ones((1, 2, 32), np.float16), np.zeros((1, 4, 2, 32), np.float16)
    with pytest.raises(ParamInvalidError, match=r"^soc: expected '950'") as caught:
        kvcore.scatter_pa_cache(key, cache, np.array([0]), soc="A2")
    assert caught.value.argument == "soc"
    assert not cache.any()
    kvcore.scatter_pa_cache(key, cache, np.array([0]), soc="950")
    assert cache.any()
