# SPDX-License-Identifier: Apache-2.0
"""What tokens and blocks are: keys against a token-by-token meaning, bytes against the formula."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.replay.traces.content import (
    TokenRows,
    block_keys,
    content_words,
    expected_row,
    token_words,
)
from kvcore.replay.traces.reader import TraceRequest

GOLDEN_ROWS = [
    "8106c1f09e67018ee3475b30",
    "f8d98db745be86fc90e02932",
    "78613689dd2a42031a20ac49",
    "01be7ace06f3c5716987de4b",
    "e5a444fefce11f1a87e5de3e",
    "9c7b08b927389868f442ac3c",
]
SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def requests(draw: st.DrawFn, max_id: int = 2) -> TraceRequest:
    length = draw(st.sampled_from([1, 7, 512, 513, 700, 900, 1024, 1300]) | st.integers(1, 1300))
    blocks = -(-length // 512)
    ids = draw(st.lists(st.integers(0, max_id), min_size=blocks, max_size=blocks))
    index, output = draw(st.integers(0, 2)), draw(st.integers(0, 300))
    return TraceRequest(index, 0.0, length, output, tuple(ids))


def identities(request: TraceRequest, num_tokens: int) -> list[object]:
    """What each token is, said one by one; the tail of a prompt is named by its length."""
    found: list[object] = []
    for position in range(num_tokens):
        if position < request.input_length:
            place = position // 512
            held = min(512, request.input_length - place * 512)
            found.append(("prompt", request.hash_ids[place], held))
        else:
            found.append(("generated", request.index))
    return found


@given(requests(), requests(), st.sampled_from([1, 16, 100, 128, 512, 700]), st.data())
def test_keys_are_equal_where_all_tokens_up_to_the_blocks_end_are(
    a: TraceRequest, b: TraceRequest, block_size: int, data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(0, r.total_tokens)) for r in (a, b)]
    tokens = [identities(r, n) for r, n in zip((a, b), lengths, strict=True)]
    keys = [block_keys(r, block_size, n) for r, n in zip((a, b), lengths, strict=True)]
    for k, t in zip(keys, tokens, strict=True):
        assert len(k) == -(-len(t) // block_size)
        assert len(set(k)) == len(k)
    for place, (x, y) in enumerate(zip(*keys, strict=False)):
        end = (place + 1) * block_size
        assert (x == y) is (tokens[0][:end] == tokens[1][:end])


@given(requests(), st.sampled_from([16, 100, 512, 700]), st.data())
def test_keys_can_be_continued(request: TraceRequest, size: int, data: st.DataObject) -> None:
    whole = block_keys(request, size, request.total_tokens)
    first = data.draw(st.integers(0, len(whole)))
    before = whole[first - 1] if first else b""
    rest = block_keys(request, size, request.total_tokens, first=first, before=before)
    assert whole[:first] + rest == whole


def test_keys_depend_on_the_block_size() -> None:
    request = TraceRequest(0, 0.0, 512, 0, (3,))
    assert block_keys(request, 512, 512) != block_keys(request, 600, 512)


@given(
    requests(max_id=2**63 - 1),
    SEEDS,
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 40),
    st.data(),
)
def test_rows_are_what_the_formula_says(
    request: TraceRequest,
    seed: int,
    layers: int,
    key_bytes: int,
    value_bytes: int,
    data: st.DataObject,
) -> None:
    rows = TokenRows(layers, key_bytes, value_bytes, 8, seed)
    some = st.lists(st.integers(0, request.total_tokens - 1), max_size=8)
    positions = np.array(data.draw(some), np.int64)
    layer = data.draw(st.integers(0, layers - 1))
    contents = content_words(request, seed)
    blocks = np.where(positions < request.input_length, positions // 512, len(contents) - 1)
    key, value = rows.fill(layer, token_words(contents[blocks], positions))
    assert key.shape == (len(positions), key_bytes)
    assert value.shape == (len(positions), value_bytes)
    for i, position in enumerate(positions.tolist()):
        assert key[i].tobytes() == expected_row(request, position, layer, 0, key_bytes, seed)
        assert value[i].tobytes() == expected_row(request, position, layer, 1, value_bytes, seed)


def test_the_function_is_fixed() -> None:
    # Worked out apart from the package, from the formula in its description.
    request = TraceRequest(3, 0.0, 600, 5, (11, 12))
    rows = [
        expected_row(request, p, 1, lane, 12, 42).hex() for p in (0, 599, 600) for lane in (0, 1)
    ]
    assert rows == GOLDEN_ROWS


def golden_mix(x: int) -> int:
    x %= 1 << 64
    x ^= x >> 30
    x = x * 13787848793156543929 % (1 << 64)
    x ^= x >> 27
    x = x * 10723151780598845931 % (1 << 64)
    return x ^ (x >> 31)


def test_mix_is_the_published_finaliser() -> None:
    # First outputs of SplitMix64 seeded with 1234567, as published with the generator.
    golden = 0x9E3779B97F4A7C15
    assert [golden_mix(1234567 + golden * n) for n in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    words = np.array([0], np.uint64)
    tokens = token_words(words + np.uint64(1234567), np.array([1], np.int64))
    assert tokens.tolist() == [6457827717110365317]


@given(requests(), SEEDS)
def test_rows_differ_by_position_layer_lane_and_seed(request: TraceRequest, seed: int) -> None:
    rows = {
        expected_row(request, position, layer, lane, 16, s)
        for position in range(0, request.total_tokens, 97)
        for layer in range(2)
        for lane in range(2)
        for s in (seed, seed ^ 1)
    }
    assert len(rows) == len(range(0, request.total_tokens, 97)) * 8


def test_equal_content_has_equal_bytes_in_any_request() -> None:
    a = TraceRequest(0, 0.0, 700, 9, (4, 5))
    b = TraceRequest(1, 9.0, 1500, 2, (4, 6, 7))
    assert expected_row(a, 511, 0, 0, 16, 1) == expected_row(b, 511, 0, 0, 16, 1)
    assert expected_row(a, 512, 0, 0, 16, 1) != expected_row(b, 512, 0, 0, 16, 1)
    # Generated tokens belong to their request alone, also where an id equals its index.
    assert expected_row(a, 700, 0, 0, 16, 1) != expected_row(b, 1500, 0, 0, 16, 1)
    c = TraceRequest(4, 0.0, 3, 9, (9,))
    d = TraceRequest(5, 0.0, 30, 9, (4,))
    assert expected_row(c, 5, 0, 0, 16, 1) != expected_row(d, 5, 0, 0, 16, 1)


def test_rows_of_the_next_call_replace_those_of_the_last() -> None:
    rows = TokenRows(2, 8, 8, 4, 0)
    tokens = np.arange(4, dtype=np.uint64)
    key, _value = rows.fill(0, tokens)
    first = key.copy()
    rows.fill(1, tokens)
    assert (key != first).any()
    with pytest.raises(ValueError, match="broadcast"):
        rows.fill(0, np.arange(5, dtype=np.uint64))
