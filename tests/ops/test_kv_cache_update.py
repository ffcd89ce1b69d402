# SPDX-License-Identifier: Apache-2.0
"""kv_cache_update: both forms of new_kv, and every bad argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import kvcore
import oracle
from refusal import BadIndex, Call, Index

LAYERS, BATCH, MAX_SEQ, HIDDEN = 2, 3, 6, 8
SEQ_LEN, TOKEN_OFFSET = [2, 0, 3], [2, 0, 6]
TOKENS = sum(SEQ_LEN)
ARRAYS = ("new_kv", "layer_id", "past", "token_offset", "seq_len")


def filled(*shape: int, dtype: str = "float16") -> np.ndarray:
    return (np.arange(np.prod(shape)) % 100 + 1).astype(dtype).reshape(shape)


def call(form: str = "2d", index: str = "int32") -> Call:
    arrays = {
        "new_kv": filled(TOKENS, HIDDEN) if form == "2d" else filled(1, TOKENS, 2, HIDDEN // 2),
        "layer_id": np.array([1], index),
        "past": np.zeros((LAYERS, BATCH, MAX_SEQ, HIDDEN), np.float16),
        "token_offset": np.array(TOKEN_OFFSET, index),
        "seq_len": np.array(SEQ_LEN, index),
    }
    return Call(kvcore.kv_cache_update, arrays)


def check(made: Call, **changed: Any) -> None:
    given = made.arguments(**changed)
    before = made.arena.snapshot()
    want = oracle.run("kv_cache_update", given).outputs["past"]
    assert made.function(**given) is given["past"]
    made.arena.assert_written(before, {"past": oracle.bits(want)})


# ---------------------------------------------------------------- legal calls


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("form", ["2d", "4d"])
def test_appends(form: str, index: str) -> None:
    check(call(form, index))


@pytest.mark.parametrize("shape", [(5, 1, 8, 1), (1, 5, 1, 8), (5, 1, 1, 8), (1, 5, 4, 2)])
def test_four_axes_are_tokens_by_hidden(shape: tuple[int, ...]) -> None:
    check(call(), new_kv=filled(*shape))


@pytest.mark.parametrize("order", ["C", "F"])
def test_four_axes_of_any_strides(order: str) -> None:
    made = call()
    two_by_two = {"seq_len": np.array([1, 3, 2], np.int32)}
    two_by_two["token_offset"] = np.array([1, 5, 6], np.int32)
    new = np.array(filled(2, 3, 2, 4), order=order)
    check(made, new_kv=new, **two_by_two)
    wide = filled(4, 6, 4, 8)
    check(made, new_kv=wide[::2, ::-2, 1:3, ::2], **two_by_two)


@pytest.mark.parametrize("layer", [0, 1, np.int32(1), np.int64(0), np.uint8(1), Index(1)])
def test_layer_is_an_int(layer: Any) -> None:
    number = layer.value if isinstance(layer, Index) else int(layer)
    made = call()
    given = made.arguments(layer_id=number)
    want = oracle.run("kv_cache_update", given).outputs["past"]
    made.run(layer_id=layer)
    np.testing.assert_array_equal(made.arrays["past"], want)


def test_no_tokens() -> None:
    made = call()
    before = made.arena.snapshot()
    zero = np.zeros(BATCH, np.int32)
    for new in (filled(0, HIDDEN), filled(0, 4, 2, 4), filled(3, 0, 2, 4)):
        assert made.run(new_kv=new, seq_len=zero) is made.arrays["past"]
    made.arena.assert_untouched(before)
    made.refused(
        "layer_id", new_kv=filled(0, HIDDEN), seq_len=zero, layer_id=np.array([2], np.int32)
    )
    made.refused("token_offset", "max_seq", new_kv=filled(0, HIDDEN), seq_len=zero,
                 token_offset=np.array([0, 0, 7], np.int32))  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 0, 6, 8), (2, 3, 0, 8), (2, 3, 6, 0)])
def test_caches_without_room(shape: tuple[int, ...]) -> None:
    past = np.zeros(shape, np.float16)
    batch, hidden = shape[1], shape[3]
    zero = np.zeros(batch, np.int64)
    got = kvcore.kv_cache_update(np.zeros((0, hidden), np.float16), 1, past, zero, zero)
    assert got is past
    if batch and not shape[2]:
        one = np.eye(batch, dtype=np.int64)[0]
        with pytest.raises(kvcore.ParamInvalidError, match=r"token_offset\[0\]: .*max_seq 0"):
            kvcore.kv_cache_update(np.zeros((1, hidden), np.float16), 1, past, one, one)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_layer_out_of_range(index: str) -> None:
    made = call(index=index)
    for bad in (-1, LAYERS, 2**31 - 1, -(2**31)):
        words = rf"^layer_id: expected 0 <= layer < 2, got {bad}$"
        made.refused("layer_id", words, layer_id=np.array([bad], index))
        made.refused("layer_id", words, layer_id=bad)
    for bad in (2**31, 2**32 + 1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**30):
        made.refused("layer_id", rf"got {bad}$", layer_id=bad)
        if index == "int64" and -(2**63) <= bad < 2**63:
            made.refused("layer_id", rf"got {bad}$", layer_id=np.array([bad], index))


@pytest.mark.parametrize("layer", [True, False, 1.0, 1.5, "1", b"1", BadIndex(), np.True_, [1], 1j])
def test_layer_that_is_no_integer(layer: Any) -> None:
    call().refused("layer_id", "int|array", layer_id=layer)


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_lengths_and_offsets(place: int, index: str) -> None:
    made = call(index=index)

    def changed(base: list[int], value: int) -> np.ndarray:
        return np.array([value if i == place else x for i, x in enumerate(base)], index)

    least = np.iinfo(index).min
    most = np.iinfo(index).max
    for bad in (-1, least):
        made.refused(
            "seq_len", rf"^seq_len\[{place}\]: .* got {bad}$", seq_len=changed(SEQ_LEN, bad)
        )
    for bad in (MAX_SEQ + 1, most):
        made.refused(
            "token_offset",
            rf"^token_offset\[{place}\]: expected at most max_seq 6, got {bad}$",
            token_offset=changed(TOKEN_OFFSET, bad),
        )
    for bad in (SEQ_LEN[place] - 1, -1, least):
        if bad < SEQ_LEN[place]:
            made.refused(
                "token_offset",
                rf"^token_offset\[{place}\]: expected at least seq_len\[{place}\] = "
                rf"{SEQ_LEN[place]} .* got {bad}$",
                token_offset=changed(TOKEN_OFFSET, bad),
            )
    for bad in (SEQ_LEN[place] + 1, most):
        late = np.full(BATCH, MAX_SEQ, index)
        made.refused("seq_len", r"sum to 5", seq_len=changed(SEQ_LEN, bad), token_offset=late)
    if SEQ_LEN[place]:
        made.refused(
            "seq_len", r"sum to 5 .* got \d$", seq_len=changed(SEQ_LEN, SEQ_LEN[place] - 1)
        )


def test_sum_that_wraps() -> None:
    made = call(index="int64")
    for lengths in (
        [2**63 - 1, 2**63 - 1, 7],
        [2**62, 2**62, 5],
        [2**63 - 1, 1, 5],
        [5, 2**63 - 1, 1],
    ):
        late = np.full(BATCH, MAX_SEQ)
        made.refused("seq_len", "sum to 5", seq_len=np.array(lengths), token_offset=late)


# ---------------------------------------------------------------- each argument


@pytest.mark.parametrize("name", ARRAYS)
def test_rank(name: str) -> None:
    made = call()
    own = made.arrays[name]
    for array in (own[None], np.zeros((), own.dtype), own[None, None, None]):
        if name == "new_kv" and array.ndim == 4:
            continue
        made.refused(name, "shape", **{name: array})
    if own.ndim > 1:
        made.refused(name, "shape", **{name: own[..., 0]})


@pytest.mark.parametrize("name", ["layer_id", "token_offset", "seq_len"])
@pytest.mark.parametrize("size", [0, 1, 2, 4])
def test_index_sizes(name: str, size: int) -> None:
    if (name, size) != ("layer_id", 1):
        call().refused(name, "shape", **{name: np.ones(size, np.int32)})


@pytest.mark.parametrize(
    "shape", [(5, 7), (5, 9), (5, 0), (5, 1), (1, 5, 2, 3), (1, 5, 0, 8), (5, 2, 2, 4)]
)
def test_hidden_size(shape: tuple[int, ...]) -> None:
    made = call()
    blames = "seq_len" if shape == (5, 2, 2, 4) else "new_kv"
    made.refused(blames, new_kv=filled(*shape))


@pytest.mark.parametrize("dtype", ["float32", "int8", "int16", "uint16"])
def test_mixed_dtypes(dtype: str) -> None:
    made = call()
    made.refused("past", "dtype float16", past=made.arrays["past"].astype(dtype))


@pytest.mark.parametrize("name", ["layer_id", "token_offset", "seq_len"])
def test_index_dtypes_that_differ(name: str) -> None:
    made = call()
    blames = "token_offset" if name == "layer_id" else name
    made.refused(blames, "dtype int", **{name: made.arrays[name].astype(np.int64)})


def test_folded_outputs() -> None:
    made = call()
    past = made.arrays["past"]
    for strides in ((0, 96, 16, 2), (288, 0, 16, 2), (288, 96, 14, 2), (288, 80, 16, 2)):
        folded = as_strided(np.zeros(2000, np.float16), past.shape, strides)
        made.refused("past", "bytes of their own", past=folded)


@pytest.mark.parametrize("name", ["new_kv", "layer_id", "token_offset", "seq_len"])
def test_input_over_output(name: str) -> None:
    made = call()
    own = made.arrays[name]
    raw = made.arrays["past"].reshape(-1).view(np.uint8)
    for offset in (0, raw.size - own.nbytes):
        bad = raw[offset : offset + own.nbytes].view(own.dtype).reshape(own.shape)
        made.refused("past", f"shared with {name}", **{name: bad})
    memory = np.zeros(raw.size + own.nbytes - 1, np.uint8)
    past = memory[: raw.size].view(np.float16).reshape(made.arrays["past"].shape)
    last = memory[raw.size - 1 :].view(own.dtype).reshape(own.shape)
    made.refused("past", f"shared with {name}", past=past, **{name: last})


def test_tokens_between_the_rows_of_the_cache() -> None:
    rows = np.zeros((LAYERS, BATCH, 2 * MAX_SEQ, HIDDEN), np.float16)
    rows[:, :, 1::2] = 7
    tokens = rows.reshape(-1, HIDDEN)[1 : 2 * TOKENS : 2]
    made = call()
    kvcore.kv_cache_update(**made.arguments(new_kv=tokens, past=rows[:, :, ::2]))
    assert (rows[:, :, 1::2] == 7).all()
    assert rows[1, :, ::2].sum() == 7 * TOKENS * HIDDEN
    assert not rows[0, :, ::2].any()


def test_layers_of_an_odd_stride() -> None:
    # One layer, one batch, one position: their strides mean nothing.
    memory = np.zeros(HIDDEN, np.float16)
    past = as_strided(memory, (1, 1, 1, HIDDEN), (2**62, -(2**62), 2**61, 2))
    one = np.array([1])
    kvcore.kv_cache_update(filled(1, HIDDEN), 0, past, one, one)
    np.testing.assert_array_equal(memory, filled(HIDDEN))
