# SPDX-License-Identifier: Apache-2.0
"""ATB's operators take int32 indices: with a SoC int64 ones are warned of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import kvcore
from kvcore.errors import KVPortabilityWarning
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)


def texts(call: Any, soc: str | None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, kvcore.use_soc(soc):
        warnings.simplefilter("always")
        call()
    found = [one for one in caught if "ATB" in str(one.message)]
    assert all(one.category is KVPortabilityWarning for one in found)
    return [str(one.message) for one in found]


@pytest.mark.parametrize("soc", [None, "A2", "A3", "950"])
def test_slots_of_reshape_and_cache(torch_npu: Any, soc: str | None) -> None:
    atb = torch.ops.atb
    key = torch.ones((2, 2, 32), dtype=torch.float16)
    cache, other = (torch.zeros((2, 4, 2, 32), dtype=torch.float16) for _ in range(2))
    for index, expected in ((torch.int32, []), (torch.int64, ["slot_indices"])):
        slots = torch.tensor([3, 6], dtype=index)
        for call in (
            lambda slots=slots: atb._npu_reshape_and_cache(key, key, cache, other, slots),
            lambda slots=slots: atb._npu_reshape_and_cache_siso(key, cache, slots),
        ):
            want = [] if soc is None else expected
            found = texts(call, soc)
            assert len(found) == len(want)
            for name, text in zip(want, found, strict=True):
                assert text == f"{soc}: {name} is int64, and ATB's operators take int32 indices"
    assert cache[0, 3].all()


def test_tables_and_lengths_of_paged_cache_load(torch_npu: Any) -> None:
    atb = torch.ops.atb
    caches = [torch.ones((2, 4, 2, 32), dtype=torch.float16) for _ in range(2)]
    for index, expected in ((torch.int32, 0), (torch.int64, 2)):
        table = torch.tensor([[1]], dtype=index)
        lengths = torch.tensor([3], dtype=index)
        call = lambda t=table, n=lengths: atb.npu_paged_cache_load(*caches, t, n)  # noqa: E731
        assert len(texts(call, "950")) == expected
        assert texts(call, None) == []


def test_a_refused_call_is_not_warned_of(torch_npu: Any) -> None:
    key, cache = torch.ones((2, 2, 32)), torch.zeros((2, 4, 2, 32))
    slots = torch.tensor([3, 6])
    with warnings.catch_warnings(), kvcore.use_soc("A3"):
        warnings.simplefilter("error")
        with pytest.raises(kvcore.ParamInvalidError, match="on A3"):
            torch.ops.atb._npu_reshape_and_cache_siso(key, cache, slots)
    assert not cache.any()
