# SPDX-License-Identifier: Apache-2.0
"""permute_rows and invalidate: what they write, what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore

Draw = Any
Books = tuple[np.ndarray, np.ndarray]


def strided(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, kind: str) -> np.ndarray:
    """Random books in some memory layout."""
    values = rng.integers(-1, 50, shape).astype(dtype)
    if kind == "plain":
        return values
    if kind == "padded":
        wide = np.zeros((*shape[:-1], shape[-1] + 3), dtype)
        wide[..., : shape[-1]] = values
        return wide[..., : shape[-1]]
    turned = np.asfortranarray(values)
    assert turned.shape == shape
    return turned


@st.composite
def books(draw: Draw) -> Books:
    """(table [N, SMAX], status), N a little more than the rows."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    batch, steps, topk = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 5))
    outer = (batch, steps) if draw(st.booleans()) else (batch * steps,)
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    kind = draw(st.sampled_from(["plain", "padded", "fortran"]))
    status = strided(rng, (*outer, 1, topk + 1), dtype, kind)
    rows = batch * steps + draw(st.integers(0, 2))
    return strided(rng, (rows, draw(st.integers(1, 4))), dtype, kind), status


@given(books(), st.data())
def test_permute_rows(pair: Books, data: st.DataObject) -> None:
    table, status = pair
    rows = int(np.prod(status.shape[:-2]))
    counts = [n for n in range(1, rows + 1) if rows % n == 0] or [0]
    order = data.draw(st.permutations(range(data.draw(st.sampled_from(counts)))))
    each = rows // len(order) if order else 0
    old_table, old_status = table.copy(), status.reshape(rows, status.shape[-1]).copy()
    kvcore.permute_rows(np.array(order, np.int64), table, status)
    for place in range(rows):
        was = order[place // each] * each + place % each
        assert table[place].tolist() == old_table[was].tolist()
        assert status.reshape(rows, status.shape[-1])[place].tolist() == old_status[was].tolist()
    assert table[rows:].tolist() == old_table[rows:].tolist()


@given(books(), st.data())
def test_permuting_back_restores(pair: Books, data: st.DataObject) -> None:
    table, status = pair
    rows = int(np.prod(status.shape[:-2]))
    order = np.array(data.draw(st.permutations(range(rows))), np.int64)
    before = table.copy(), status.copy()
    kvcore.permute_rows(order, table, status)
    kvcore.permute_rows(np.argsort(order), table, status)
    np.testing.assert_array_equal(table, before[0])
    np.testing.assert_array_equal(status, before[1])


@given(books(), st.data())
def test_invalidate(pair: Books, data: st.DataObject) -> None:
    _, status = pair
    rows = int(np.prod(status.shape[:-2]))
    block = data.draw(st.sampled_from([1, 2, 7, 64]))
    some = data.draw(st.lists(st.integers(0, rows - 1), max_size=4)) if rows else []
    first = [data.draw(st.integers(0, 60 * block)) for _ in some]
    wanted = status.reshape(rows, status.shape[-1]).tolist()
    emptied = 0
    for row, position in zip(some, first, strict=True):
        for place, held in enumerate(wanted[row][:-1]):
            if held >= 0 and (held + 1) * block > position:
                wanted[row][place] = -1
                emptied += 1
    found = kvcore.invalidate(
        status, np.array(some, np.int32), np.array(first, np.int64), selection_topk_block_size=block
    )
    assert found == emptied
    assert status.reshape(rows, status.shape[-1]).tolist() == wanted


def test_invalidate_one_row() -> None:
    status = np.array([[[[0, 1, 2, 3, 256]], [[3, 2, 1, 0, 256]]]], np.int32)
    assert kvcore.invalidate(status, 1, 128) == 2
    assert status.tolist() == [[[[0, 1, 2, 3, 256]], [[-1, -1, 1, 0, 256]]]]
    assert kvcore.invalidate(status, 0, 191) == 2  # token 191 is the last of block 2
    assert status[0, 0, 0].tolist() == [0, 1, -1, -1, 256]
    assert kvcore.invalidate(status, np.int64(0), 0) == 2
    assert kvcore.invalidate(status, [0, 1, 1], [0, 64, 200]) == 1
    assert status[0, 1, 0].tolist() == [-1, -1, -1, 0, 256]


def test_positions_near_the_end_of_int64() -> None:
    status = np.array([[[2**62, 5, 6]]], np.int64)
    assert kvcore.invalidate(status, 0, 2**63 - 1, selection_topk_block_size=2) == 1
    assert status.tolist() == [[[-1, 5, 6]]]


TABLE = np.arange(6, dtype=np.int32).reshape(3, 2)
STATUS = np.arange(8, dtype=np.int32).reshape(2, 1, 4)


def frozen(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


SLAB = np.zeros(12, np.int32)
PERMUTE: list[tuple[str, tuple[Any, Any, Any], str, str]] = [
    ("repeated", ([0, 0], TABLE, STATUS), "order", "each of 0..1 once"),
    ("out of range", ([0, 2], TABLE, STATUS), "order", "each of 0..1 once"),
    ("negative", ([0, -1], TABLE, STATUS), "order", "each of 0..1 once"),
    ("too long", ([0, 1, 2], TABLE, STATUS), "order", "divides 2 rows"),
    ("empty", ([], TABLE, STATUS), "order", "divides 2 rows"),
    ("no order", (None, TABLE, STATUS), "order", "got None"),
    ("order of floats", (np.zeros(2), TABLE, STATUS), "order", "int32 or int64"),
    ("no table", ([1, 0], None, STATUS), "table", "got None"),
    ("a list", ([1, 0], TABLE.tolist(), STATUS), "table", "in place, got list"),
    ("short table", ([1, 0], TABLE[:1], STATUS), "table", "at least 2 rows"),
    ("rank of table", ([1, 0], TABLE[0], STATUS), "table", r"\[N, SMAX\]"),
    ("read-only table", ([1, 0], frozen(TABLE), STATUS), "table", "writable"),
    ("read-only status", ([1, 0], TABLE, frozen(STATUS)), "status", "writable"),
    ("rank of status", ([1, 0], TABLE, STATUS[0]), "status", r"\[B, S, 1, topk\+1\]"),
    ("heads", ([1, 0], TABLE, np.zeros((2, 2, 4), np.int32)), "status", "topk"),
    ("shared", ([1, 0], SLAB[:4].reshape(2, 2), SLAB[2:10].reshape(2, 1, 4)), "table", "shared"),
]


@pytest.mark.parametrize(
    ("arguments", "argument", "match"), [b[1:] for b in PERMUTE], ids=[b[0] for b in PERMUTE]
)
def test_permute_rows_refuses(arguments: tuple[Any, Any, Any], argument: str, match: str) -> None:
    before = [np.array(a) for a in arguments[1:] if a is not None]
    with pytest.raises((kvcore.ParamInvalidError, kvcore.ParamNullError), match=match) as caught:
        kvcore.permute_rows(*arguments)
    assert caught.value.argument == argument
    for array, was in zip([a for a in arguments[1:] if a is not None], before, strict=True):
        np.testing.assert_array_equal(array, was)


INVALIDATE: list[tuple[str, dict[str, Any], str, str]] = [
    ("row past the end", {"row": 2}, "row", "0 <= row <= 1"),
    ("row before the start", {"row": -1}, "row", "0 <= row <= 1"),
    ("one of the rows", {"row": [0, 2]}, "row", r"row\[1\]"),
    ("row of floats", {"row": np.zeros(1)}, "row", "int32 or int64"),
    ("a bool", {"row": True}, "row", "an int or an index array"),
    ("no row", {"row": None}, "row", "got None"),
    ("negative position", {"from_position": -1}, "from_position", "got -1"),
    ("huge position", {"from_position": 2**63}, "from_position", "<= 9223372036854775807"),
    ("positions", {"from_position": [1, 2, 3]}, "from_position", "one position, or 1 as row"),
    ("block size", {"selection_topk_block_size": 0}, "selection_topk_block_size", "an int > 0"),
    ("no status", {"status": None}, "status", "got None"),
    ("read-only", {"status": frozen(STATUS)}, "status", "writable"),
    ("floats", {"status": STATUS.astype(np.float32)}, "status", "int32 or int64"),
]


@pytest.mark.parametrize(
    ("changes", "argument", "match"), [b[1:] for b in INVALIDATE], ids=[b[0] for b in INVALIDATE]
)
def test_invalidate_refuses(changes: dict[str, Any], argument: str, match: str) -> None:
    status = STATUS.copy()
    arguments = {"status": status, "row": 0, "from_position": 0} | changes
    with pytest.raises((kvcore.ParamInvalidError, kvcore.ParamNullError), match=match) as caught:
        kvcore.invalidate(**arguments)
    assert caught.value.argument == argument
    np.testing.assert_array_equal(status, STATUS)


@pytest.mark.parametrize("kind", ["transposed", "reversed", "sliced"])
def test_rows_of_any_strides(kind: str) -> None:
    def view(values: np.ndarray) -> np.ndarray:
        if kind == "transposed":
            return np.array(values.T, order="C").T
        if kind == "reversed":
            return np.array(values[..., ::-1])[..., ::-1]
        return np.repeat(values, 2, axis=-1)[..., ::2]

    plain = np.arange(24, dtype=np.int32).reshape(6, 4)
    books = np.arange(24, dtype=np.int32).reshape(2, 2, 1, 6)
    table, status = view(plain), view(books)
    kvcore.permute_rows(np.array([1, 0]), table, status)
    np.testing.assert_array_equal(table, plain[[2, 3, 0, 1, 4, 5]])
    np.testing.assert_array_equal(status, books[[1, 0]])
    assert kvcore.invalidate(status, [3, 0], [4, 15], selection_topk_block_size=1) == 5 + 2
    expected = books[[1, 0]].reshape(4, 6)
    expected[3, :5] = np.where(expected[3, :5] >= 4, -1, expected[3, :5])
    expected[0, :5] = np.where(expected[0, :5] >= 15, -1, expected[0, :5])
    np.testing.assert_array_equal(status.reshape(4, 6), expected)
