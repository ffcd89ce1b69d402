# SPDX-License-Identifier: Apache-2.0
"""KVCacheOperation with a SoC: each rule, both sides of each bound."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvcore
from kvcore.errors import KVPortabilityWarning, ParamInvalidError

BOTH = pytest.mark.parametrize("soc", ["A2", "A3"])


def call(
    soc: str | None,
    *,
    hidden: int = 32,
    dtype: Any = np.float16,
    index: Any = np.int32,
    layer: Any = None,
    offsets: tuple[int, ...] = (3, 1),
    lengths: tuple[int, ...] = (2, 1),
    index_of: dict[str, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """Two requests of at most 4 tokens; returns past."""
    kinds = dict.fromkeys(("layer_id", "token_offset", "seq_len"), index) | (index_of or {})
    new_kv = np.ones((sum(lengths), hidden), dtype)
    past = np.zeros((2, len(lengths), 4, hidden), dtype)
    layer_id = np.array([1], kinds["layer_id"]) if layer is None else layer
    kvcore.kv_cache_update(
        new_kv,
        layer_id,
        past,
        np.array(offsets, kinds["token_offset"]),
        np.array(lengths, kinds["seq_len"]),
        soc=soc,
    )
    return past


def refused(soc: str, argument: str, words: str, **keywords: Any) -> None:
    with pytest.raises(ParamInvalidError, match=words) as caught:
        call(soc, **keywords)
    assert caught.value.argument == argument
    assert caught.value.code == 161002
    assert str(caught.value).startswith(argument)
    call(None, **keywords)  # fine without a SoC


@BOTH
@pytest.mark.parametrize("dtype", [np.float16, np.int8])
def test_accepted_dtypes(soc: str, dtype: Any) -> None:
    np.testing.assert_array_equal(call(soc, dtype=dtype), call(None, dtype=dtype))


@BOTH
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.uint8, np.int16])
def test_other_dtypes_are_refused(soc: str, dtype: Any) -> None:
    refused(soc, "new_kv", rf"dtype float16 or int8 on {soc}, got ", dtype=dtype)


@BOTH
def test_int64_indices_are_refused(soc: str) -> None:
    refused(soc, "layer_id", rf"^layer_id: expected dtype int32 on {soc}, got int64$", index="i8")
    refused(soc, "token_offset", rf"dtype int32 on {soc}", index="i8", layer=1)


@BOTH
def test_a_python_integer_as_layer_has_no_dtype(soc: str) -> None:
    np.testing.assert_array_equal(call(soc, layer=1), call(soc))


@BOTH
@pytest.mark.parametrize(
    ("dtype", "fits", "odd"), [(np.float16, 16, 24), (np.int8, 32, 48), (np.float16, 48, 17)]
)
def test_a_token_is_whole_32_bytes(soc: str, dtype: Any, fits: int, odd: int) -> None:
    call(soc, dtype=dtype, hidden=fits)
    multiple = 32 // np.dtype(dtype).itemsize
    refused(
        soc,
        "past",
        rf"a hidden size that is a multiple of {multiple} on {soc}, got {odd}$",
        dtype=dtype,
        hidden=odd,
    )


@BOTH
@pytest.mark.parametrize(("dtype", "hidden"), [(np.float16, 98304), (np.int8, 196608)])
def test_a_token_has_at_most_196608_bytes(soc: str, dtype: Any, hidden: int) -> None:
    call(soc, dtype=dtype, hidden=hidden)
    more = hidden + 32 // np.dtype(dtype).itemsize
    refused(
        soc, "past", rf"at most 196608 bytes a token on {soc}, got 196640", dtype=dtype, hidden=more
    )


@BOTH
def test_a_request_adds_at_least_one_token(soc: str) -> None:
    call(soc, lengths=(1, 1))
    refused(
        soc, "seq_len", rf"^seq_len\[1\]: expected a length > 0 on {soc}, got 0$", lengths=(2, 0)
    )


@BOTH
def test_a_request_ends_below_max_seq(soc: str) -> None:
    call(soc, offsets=(3, 1))
    refused(
        soc,
        "token_offset",
        rf"^token_offset\[0\]: expected less than max_seq 4 on {soc}, got 4$",
        offsets=(4, 1),
    )


def test_950_has_no_such_operator() -> None:
    refused("950", "soc", r"^soc: expected 'A2' or 'A3' for kv_cache_update, got '950'$")


@BOTH
def test_nothing_is_written_by_a_refused_call(soc: str) -> None:
    past = np.zeros((1, 1, 4, 32), np.float32)
    with pytest.raises(ParamInvalidError):
        kvcore.kv_cache_update(
            np.ones((1, 32), np.float32),
            0,
            past,
            np.array([1], np.int32),
            np.array([1], np.int32),
            soc=soc,
        )
    assert not past.any()


# ---------------------------------------------------------------- strides
def strided(kind: str) -> dict[str, Any]:
    """Two requests, one token each, into past [2, 2, 4, 32]."""
    new_kv = np.arange(64, dtype=np.float16).reshape(2, 32)
    past = np.zeros((2, 2, 4, 32), np.float16)
    offsets, lengths = np.array([3, 1], np.int32), np.array([1, 1], np.int32)
    if kind == "new_kv":
        new_kv = np.repeat(new_kv, 2, 0)[::2]
    elif kind == "past":
        past = np.zeros((2, 2, 4, 48), np.float16)[..., :32]
    elif kind == "layers apart":
        past = np.zeros((4, 2, 4, 32), np.float16)[::2]
    elif kind == "token_offset":
        offsets = np.repeat(offsets, 2)[::2]
    return {
        "new_kv": new_kv,
        "layer_id": 1,
        "past": past,
        "token_offset": offsets,
        "seq_len": lengths,
    }


@BOTH
@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        ("contiguous", None),
        ("new_kv", "new_kv"),
        ("past", "past"),
        ("layers apart", "past"),
        ("token_offset", "token_offset"),
    ],
)
def test_strided_arrays_are_warned_of(kind: str, argument: str | None, soc: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = strided(kind)
        kvcore.kv_cache_update(**found, soc=soc)
    texts = [str(one.message) for one in caught]
    if argument is None:
        assert texts == []
    else:
        (text,) = texts
        assert text.startswith(f"{soc}: ATB's tensors have a shape and no strides")
        assert f"takes {argument} for contiguous" in text
        assert caught[0].category is KVPortabilityWarning
        assert caught[0].filename == __file__
    plain = strided("contiguous")
    kvcore.kv_cache_update(**plain)
    np.testing.assert_array_equal(found["past"], plain["past"])


@BOTH
def test_axes_of_one_have_no_stride(soc: str) -> None:
    past = np.zeros((3, 1, 4, 32), np.float16)[::3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new_kv, one = np.ones((1, 32), np.float16), np.array([1], np.int32)
        kvcore.kv_cache_update(new_kv, 0, past, one, one, soc=soc)
    assert past[0, 0, 0].all()
