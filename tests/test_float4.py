# SPDX-License-Identifier: Apache-2.0
"""Packing float4 two a byte."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
import oracle
from refusal import NO_ARRAYS

E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)


@given(st.lists(st.integers(1, 4), min_size=0, max_size=3), st.integers(0, 5), st.randoms())
def test_there_and_back(lead: list[int], pairs: int, random: Any) -> None:
    shape = (*lead, 2 * pairs)
    codes = np.array([random.randrange(16) for _ in range(int(np.prod(shape)))], np.uint8)
    codes = codes.reshape(shape)
    packed = kvcore.pack_float4(codes)
    assert packed.dtype == np.uint8
    assert packed.shape == (*lead, pairs)
    np.testing.assert_array_equal(packed, oracle.pack_float4(codes))
    np.testing.assert_array_equal(kvcore.unpack_float4(packed), codes)
    typed = kvcore.unpack_float4(packed, E2M1)
    assert typed.dtype == E2M1
    np.testing.assert_array_equal(kvcore.pack_float4(typed), packed)


def test_low_nibble_first() -> None:
    values = np.array([[0.5, 1.0, -6.0, 0.0]], E2M1)
    np.testing.assert_array_equal(kvcore.pack_float4(values), [[0x21, 0x0F]])
    back = kvcore.unpack_float4(np.array([[0x21, 0x0F]], np.uint8), ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(back.astype(np.float32), [[0.5, 1.0, -6.0, 0.0]])


def test_the_types_of_en_dtypes() -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    kinds = [getattr(en_dtypes, n) for n in dir(en_dtypes) if n.startswith("float4_e")]
    assert kinds
    for kind in kinds:
        codes = np.arange(16, dtype=np.uint8)
        packed = kvcore.pack_float4(codes.view(np.dtype(kind)))
        np.testing.assert_array_equal(packed, oracle.pack_float4(codes))
        assert kvcore.unpack_float4(packed, kind).dtype == np.dtype(kind)


def test_strides() -> None:
    codes = np.arange(240, dtype=np.uint8).reshape(6, 40) % 16
    for view in (codes[::2, 3:9], codes.T[:, ::-1], codes[:, ::4], codes[::-1, ::-2]):
        np.testing.assert_array_equal(kvcore.pack_float4(view), oracle.pack_float4(view))
    packed = np.arange(240, dtype=np.uint8).reshape(6, 40)[::2, ::3]
    np.testing.assert_array_equal(kvcore.unpack_float4(packed), oracle.unpack_float4(packed))
    assert kvcore.unpack_float4(packed[:, :0]).shape == (3, 0)


def test_packed_arrays_go_into_a_cache() -> None:
    key = np.array([[[1.5, -2.0, 3.0, 0.5]]], E2M1)
    cache = np.zeros((1, 2, 1, 2), np.uint8)
    kvcore.scatter_pa_kv_cache(kvcore.pack_float4(key), cache, np.array([1]), dtype="float4_e2m1")
    back = kvcore.unpack_float4(cache, E2M1)
    np.testing.assert_array_equal(back[0, 1, 0].astype(np.float32), [1.5, -2.0, 3.0, 0.5])


@pytest.mark.parametrize("pack", [kvcore.pack_float4, kvcore.unpack_float4])
@pytest.mark.parametrize("thing", [None, *NO_ARRAYS, np.ma.masked_array([1, 2], dtype=np.uint8)],
                         ids=lambda thing: type(thing).__name__)  # fmt: skip
def test_no_array(pack: Any, thing: Any) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^x: expected") as caught:
        pack(thing)
    assert caught.value.argument == "x"


@pytest.mark.parametrize("dtype", ["int8", "uint16", "float16", "bool", "O", "S1", "V1",
                                   ml_dtypes.float8_e4m3fn, ml_dtypes.int4])  # fmt: skip
@pytest.mark.parametrize("pack", [kvcore.pack_float4, kvcore.unpack_float4])
def test_dtypes(pack: Any, dtype: Any) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^x: expected .*float4.* got dtype"):
        pack(np.zeros((2, 4), dtype))


def test_codes_and_sizes() -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^x: expected codes 0..15, got 16$"):
        kvcore.pack_float4(np.array([1, 16], np.uint8))
    for shape in ((3,), (2, 5), ()):
        with pytest.raises(kvcore.ParamInvalidError, match="x: expected a last axis of even size"):
            kvcore.pack_float4(np.zeros(shape, np.uint8))
    with pytest.raises(kvcore.ParamInvalidError, match="x: expected at least one axis"):
        kvcore.unpack_float4(np.zeros((), np.uint8))


@pytest.mark.parametrize(
    "kind", ["float16", "uint8", "nonsense", np.int8, bool, "S1", 7, object(), [1]]
)
def test_dtype_of_the_result(kind: Any) -> None:
    with pytest.raises(
        kvcore.ParamInvalidError, match=r"^dtype: expected a float4 dtype"
    ) as caught:
        kvcore.unpack_float4(np.zeros(4, np.uint8), kind)
    assert caught.value.argument == "dtype"


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(16, dtype=torch.uint8)
    packed = kvcore.pack_float4(codes)
    np.testing.assert_array_equal(packed, oracle.pack_float4(codes.numpy()))
    with pytest.raises(kvcore.ParamInvalidError, match="x: expected an array"):
        kvcore.pack_float4(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(kvcore.ParamInvalidError, match="x: expected an array"):
        kvcore.unpack_float4(torch.zeros(2, device="meta", dtype=torch.uint8))
