# SPDX-License-Identifier: Apache-2.0
"""The shadow map against one that keeps a Python object a byte."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcore.runtime.watching._shadow import HIT_READ, HIT_WRITE, Shadow
from kvcore.runtime.watching._vectors import Vector

SIZE = 400


class ByteByByte:
    """The last writer and the readers since, for each byte on its own."""

    def __init__(self) -> None:
        self.writer: list[int | None] = [None] * SIZE
        self.readers: list[set[int]] = [set() for _ in range(SIZE)]
        self.records: list[tuple[int, int]] = []

    def access(
        self, rows: list[tuple[int, int]], write: bool, lane: int, count: int, vector: list[int]
    ) -> set[tuple[int, int, int]]:
        me = len(self.records)
        self.records.append((lane, count))

        def ordered(record: int) -> bool:
            its, its_count = self.records[record]
            return its == lane or vector[its] >= its_count

        hits = set()
        for start, end in rows:
            for i in range(start, end):
                writer = self.writer[i]
                if writer is not None and not ordered(writer):
                    hits.add((writer, i, HIT_WRITE))
                if write:
                    hits |= {(r, i, HIT_READ) for r in self.readers[i] if not ordered(r)}
                    self.writer[i] = me
                    self.readers[i] = set()
                else:
                    self.readers[i] = {r for r in self.readers[i] if not ordered(r)} | {me}
        return hits

    def clear(self, start: int, end: int) -> None:
        for i in range(start, end):
            self.writer[i] = None
            self.readers[i] = set()

    def state(self) -> list[tuple[int | None, list[int]]]:
        return [(w, sorted(r)) for w, r in zip(self.writer, self.readers, strict=True)]


def vector_of(counts: list[int]) -> Vector:
    vector = Vector()
    for lane, count in enumerate(counts):
        vector = vector.join(Vector(), lane, count)
    return vector


def state_of(shadow: Shadow) -> list[tuple[int | None, list[int]]]:
    found: list[tuple[int | None, list[int]]] = [(None, []) for _ in range(SIZE)]
    last = -1
    for start, end, writer, readers in shadow.segments():
        assert last <= start < end
        last = end
        for i in range(start, end):
            found[i] = (None if writer < 0 else writer, readers)
    return found


def spread(hits: list[tuple[int, int, int, int]] | None) -> set[tuple[int, int, int]]:
    return {(r, i, flag) for r, start, end, flag in hits or () for i in range(start, end)}


@st.composite
def rows_of(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ascending, apart, mostly short, as plans report them."""
    cuts = draw(st.lists(st.integers(0, SIZE), min_size=2, max_size=12, unique=True))
    cuts.sort()
    return [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if a < b]


ACCESS = st.tuples(st.just("access"), rows_of(), st.booleans(), st.integers(1, 4))
CLEAR = st.tuples(st.just("clear"), st.integers(0, SIZE), st.integers(0, SIZE))
JOIN = st.tuples(st.just("join"), st.integers(1, 4), st.integers(1, 4))
SWEEP = st.tuples(st.just("sweep"))


@given(st.lists(st.one_of(ACCESS, ACCESS, ACCESS, JOIN, CLEAR, SWEEP), max_size=60))
def test_shadow_is_what_byte_by_byte_is(steps: list[Any]) -> None:
    shadow, model = Shadow(), ByteByByte()
    lanes = [[0] * 5 for _ in range(5)]
    for step in steps:
        if step[0] == "join":
            lanes[step[1]] = [
                max(pair) for pair in zip(lanes[step[1]], lanes[step[2]], strict=True)
            ]
        elif step[0] == "clear":
            start, end = sorted(step[1:])
            shadow.clear(start, end)
            model.clear(start, end)
        elif step[0] == "sweep":
            sweep(shadow, model, [min(counts) for counts in zip(*lanes[1:], strict=True)])
        else:
            _, rows, write, lane = step
            lanes[lane][lane] += 1
            counts = lanes[lane]
            before = shadow.num_live
            hits = shadow.access(
                np.array(rows, np.int64).reshape(-1, 2),
                write, lane, counts[lane], 0, vector_of(counts),
            )  # fmt: skip
            assert shadow.num_live == before + 1
            assert spread(hits) == model.access(rows, write, lane, counts[lane], counts)
        assert state_of(shadow) == model.state()


def sweep(shadow: Shadow, model: ByteByByte, floor: list[int]) -> None:
    left = shadow.sweep(0, vector_of(floor))

    def dead(record: int) -> bool:
        lane, count = model.records[record]
        return floor[lane] >= count

    new = {old: i for i, old in enumerate(left)}
    for i in range(SIZE):
        writer = model.writer[i]
        model.writer[i] = None if writer is None or dead(writer) else new[writer]
        model.readers[i] = {new[r] for r in model.readers[i] if not dead(r)}
    model.records = [model.records[old] for old in left]


@given(st.data())
def test_many_segments(data: st.DataObject) -> None:
    """Enough rows for many chunks, in every order, then whole writes over them."""
    shadow = Shadow()
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    starts = draw.permutation(3000) * 10
    for n, chunk in enumerate(np.array_split(starts, 30)):
        rows = np.sort(chunk)
        ranges = np.stack([rows, rows + 4], axis=1)
        assert shadow.access(ranges, bool(n % 3), 1, n + 1, 0, Vector()) is None
    segments = shadow.segments()
    assert [s[:2] for s in segments] == [(i, i + 4) for i in range(0, 30_000, 10)]
    assert shadow.num_segments == 3000
    low, high = sorted(draw.integers(0, 30_000, 2).tolist())
    hits = shadow.access(np.array([[low, high]]), True, 2, 1, 0, Vector())
    met = sum(end - start for _, start, end, _ in hits or ())
    assert met == sum(max(0, min(b, high) - max(a, low)) for a, b, _, _ in segments)
    inside = [s for s in shadow.segments() if low <= s[0] < high]
    assert len(inside) == (low < high)
    shadow.clear(0, 30_000)
    assert shadow.segments() == []


def test_vectors() -> None:
    a = Vector().join(Vector(), 3, 7)
    assert (len(a), a[3], a[0], a[99]) == (4, 7, 0, 0)
    b = a.join(Vector().join(Vector(), 5, 2), 3, 1)
    assert [b[i] for i in range(6)] == [0, 0, 0, 7, 0, 2]
    assert b.reached(a, 5, 2)
    assert not a.reached(b, 0, 0)
    assert not b.reached(a, 5, 3)
    assert a.reached(a, 1, 0)
    assert [a.meet(b)[i] for i in range(4)] == [0, 0, 0, 7]
    assert a[3] == 7
