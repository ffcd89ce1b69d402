# SPDX-License-Identifier: Apache-2.0
"""Slots from block tables and positions, against a loop in Python's own integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore import slots

Draw = Any


def by_hand(tables: Any, request: int, position: int, block_size: int) -> int:
    if position < 0:
        return -1
    return int(tables[request][position // block_size]) * block_size + position % block_size


@st.composite
def paged(draw: Draw) -> tuple[np.ndarray, int]:
    """(block tables [B, M], block size), blocks up to where a slot no longer fits 32 bits."""
    block_size = draw(st.sampled_from([1, 2, 5, 16, 128]))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    most = draw(st.sampled_from([7, 2**31 - 1] if dtype == np.int32 else [7, 2**40]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return rng.integers(0, most, shape, endpoint=True).astype(dtype), block_size


@given(paged(), st.data())
def test_from_positions(pages: tuple[np.ndarray, int], data: st.DataObject) -> None:
    tables, size = pages
    room = tables.shape[1] * size
    count = data.draw(st.integers(0, 12))
    requests = data.draw(st.lists(st.integers(0, len(tables) - 1), min_size=count, max_size=count))
    positions = data.draw(st.lists(st.integers(-3, room - 1), min_size=count, max_size=count))
    found = slots.from_positions(tables, requests, positions, size)
    assert found.dtype == np.int64
    assert found.tolist() == [
        by_hand(tables, r, p, size) for r, p in zip(requests, positions, strict=True)
    ]


@given(paged(), st.data())
def test_prefill_in_chunks_is_prefill_at_once(
    pages: tuple[np.ndarray, int], data: st.DataObject
) -> None:
    tables, size = pages
    batch, room = len(tables), tables.shape[1] * size
    lengths = [data.draw(st.integers(0, room)) for _ in range(batch)]
    whole = slots.prefill(tables, np.zeros(batch, np.int32), np.array(lengths), size)
    assert whole.tolist() == [
        by_hand(tables, b, p, size) for b in range(batch) for p in range(lengths[b])
    ]
    cut = [data.draw(st.integers(0, n)) for n in lengths]
    first = slots.prefill(tables, [0] * batch, cut, size)
    second = slots.prefill(tables, np.array(cut), np.array(lengths) - np.array(cut), size)
    starts = np.cumsum([0, *lengths])
    ends = np.cumsum([0, *cut]), np.cumsum([0, *(n - c for n, c in zip(lengths, cut, strict=True))])
    for b in range(batch):
        both = [*first[ends[0][b] : ends[0][b + 1]], *second[ends[1][b] : ends[1][b + 1]]]
        assert both == whole[starts[b] : starts[b + 1]].tolist()


@given(paged(), st.data())
def test_decode_and_speculative(pages: tuple[np.ndarray, int], data: st.DataObject) -> None:
    tables, size = pages
    batch, room = len(tables), tables.shape[1] * size
    steps = data.draw(st.integers(0, 4))
    lengths = [data.draw(st.integers(0, room)) for _ in range(batch)]
    new = [data.draw(st.integers(0, min(n, steps))) for n in lengths]
    newest = slots.decode(tables, lengths, size)
    assert newest.tolist() == [by_hand(tables, b, n - 1, size) for b, n in enumerate(lengths)]
    rows = slots.speculative(tables, lengths, np.array(new), size, steps)
    assert rows.shape == (batch, steps)
    assert rows.dtype == np.int64
    for b in range(batch):
        drafts = [by_hand(tables, b, lengths[b] - new[b] + s, size) for s in range(new[b])]
        assert rows[b].tolist() == drafts + [-1] * (steps - new[b])


def test_32_bit_tables_give_64_bit_slots() -> None:
    tables = np.array([[2**31 - 1]], np.int32)
    last = (2**31 - 1) * 128 + 127
    assert slots.decode(tables, np.array([128], np.int32), 128).tolist() == [last]
    assert slots.prefill(tables, [127], [1], 128).tolist() == [last]
    assert slots.speculative(tables, [128], [1], 128, 1).tolist() == [[last]]
    assert slots.from_positions(tables, [0], np.array([127], np.int32), 128).tolist() == [last]


def test_they_address_what_scatter_writes() -> None:
    tables = np.array([[2, 0], [1, 3]], np.int32)
    cache = np.zeros((4, 4, 1, 1), np.int32)
    tokens = np.arange(1, 8, dtype=np.int32).reshape(7, 1, 1)
    where = slots.prefill(tables, [0, 2], [5, 2], 4)
    kvcore.scatter_pa_kv_cache(tokens, cache, where)
    assert cache[2, :, 0, 0].tolist() == [1, 2, 3, 4]
    assert cache[0, 0, 0, 0] == 5
    assert cache[1, 2:, 0, 0].tolist() == [6, 7]


TABLE = np.array([[4, 5], [6, -1]], np.int32)
BAD: list[tuple[str, Callable[[], Any], str, str]] = [
    ("None", lambda: slots.decode(None, [1, 1], 4), "block_tables", "got None"),
    ("rank", lambda: slots.decode(TABLE[0], [1, 1], 4), "block_tables", r"\[B, M\]"),
    ("floats", lambda: slots.decode(TABLE, [1.0, 1.0], 4), "seq_lens", "int32 or int64"),
    ("short", lambda: slots.decode(TABLE, [1], 4), "seq_lens", r"\[2\]"),
    ("object", lambda: slots.decode(TABLE, object(), 4), "seq_lens", "int32 or int64"),
    ("ragged", lambda: slots.decode(TABLE, [[1], [1, 2]], 4), "seq_lens", "an index array"),
    ("negative", lambda: slots.decode(TABLE, [1, -1], 4), "seq_lens", "a count >= 0"),
    ("past", lambda: slots.decode(TABLE, [9, 1], 4), "block_tables", "more than 2 columns"),
    ("no block", lambda: slots.decode(TABLE, [1, 5], 4), "block_tables", "got -1"),
    ("size", lambda: slots.decode(TABLE, [1, 1], 0), "block_size", "an int >= 1"),
    ("size type", lambda: slots.decode(TABLE, [1, 1], 4.0), "block_size", "an int >= 1"),
    ("size bool", lambda: slots.decode(TABLE, [1, 1], True), "block_size", "an int >= 1"),
    ("request", lambda: slots.from_positions(TABLE, [2], [0], 4), "requests", "< 2"),
    ("behind padding", lambda: slots.from_positions(TABLE, [0, -1], [-1, 0], 4), "requests",
     "< 2"),
    ("lengths", lambda: slots.from_positions(TABLE, [0, 1], [0], 4), "positions", r"\[2\]"),
    ("huge chunk", lambda: slots.prefill(TABLE, [0, 0], [2**62, 0], 4), "block_tables",
     "columns for position"),
    ("huge start", lambda: slots.prefill(TABLE, [2**63 - 1, 0], [2, 0], 4), "block_tables",
     "columns for position"),
    ("drafts", lambda: slots.speculative(TABLE, [3, 3], [3, 1], 4, 2), "query_lens", "at most 2"),
    ("more than there are", lambda: slots.speculative(TABLE, [1, 3], [2, 1], 4, 2),
     "query_lens", "at most 1"),
    ("steps", lambda: slots.speculative(TABLE, [1, 3], [0, 0], 4, -1), "num_steps", "an int >= 0"),
    ("block past int64", lambda: slots.decode(np.array([[2**62]]), [1], 4), "block_tables",
     "fit int64"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "argument", "match"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_refuses(call: Callable[[], Any], argument: str, match: str) -> None:
    with pytest.raises((kvcore.ParamInvalidError, kvcore.ParamNullError), match=match) as caught:
        call()
    assert caught.value.argument == argument


def test_empty_batches() -> None:
    none = np.zeros((0, 3), np.int32)
    assert slots.prefill(none, [], [], 4).shape == (0,)
    assert slots.decode(none, [], 4).shape == (0,)
    assert slots.speculative(none, [], [], 4, 3).shape == (0, 3)
    assert slots.from_positions(none, [], [], 4).shape == (0,)
    unused = np.array([[-7]], np.int64)
    assert slots.decode(unused, [0], 4).tolist() == [-1]
