# SPDX-License-Identifier: Apache-2.0
"""The compiled books against policies in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pool_oracle as oracle
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcore._kernels.pool_books import Arc
from kvcore.errors import ParamInvalidError
from kvcore.offload.rows.policy import POLICIES, make_books

NUM_IDS = 40


def model_of(policy: str, capacity: int, ways: int) -> Any:
    if policy == "fifo":
        return oracle.Fifo(capacity, ways)
    return {"previous": oracle.Previous, "lru": oracle.Lru, "arc": oracle.Arc}[policy](capacity)


class BooksMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        topk=st.integers(1, 6),
        more=st.integers(0, 8),
        ways=st.integers(1, 4),
    )
    def make(self, policy: str, topk: int, more: int, ways: int) -> None:
        capacity = topk if policy == "previous" else topk + more
        if policy == "fifo":
            capacity = -(-capacity // ways) * ways
        self.topk, self.capacity, self.policy = topk, capacity, policy
        self.books = make_books(policy, capacity, NUM_IDS, topk, ways if policy == "fifo" else None)
        self.model = model_of(policy, capacity, ways)
        self.places: dict[int, int] = {}

    @rule(data=st.data(), wide=st.booleans())
    def plan(self, data: st.DataObject, wide: bool) -> None:
        ids = data.draw(st.lists(st.integers(0, NUM_IDS - 1), max_size=self.topk, unique=True))
        padded = list(ids)
        for _ in range(data.draw(st.integers(0, self.topk - len(ids)))):
            padded.insert(data.draw(st.integers(0, len(padded))), -data.draw(st.integers(1, 9)))
        array = np.array(padded, np.int64 if wide else np.int32)
        source, target = np.full((2, len(array)), 77, np.int32)
        assert self.books.plan(array, source, target) == 0

        hits, kept = self.model.plan(ids)
        assert (self.books.hits, self.books.misses) == (len(hits), len(ids) - len(hits))
        for i, at, to in zip(padded, source.tolist(), target.tolist(), strict=True):
            if i < 0:
                assert (at, to) == (-2, -1)
            elif i in hits:
                assert (at, to) == (self.places[i], -1)
            else:
                assert at == -1
                assert (to >= 0) == (i in kept)
        # A place that a row is put in is free or was that of a token that gave way.
        after = self.model.held()
        self.places = {i: p for i, p in self.places.items() if i in after}
        for i, to in zip(padded, target.tolist(), strict=True):
            if to >= 0:
                assert to not in self.places.values()
                self.places[i] = to

    @rule(first=st.integers(-3, NUM_IDS + 3), length=st.integers(-2, NUM_IDS))
    def forget(self, first: int, length: int) -> None:
        held = [i for i in self.model.held() if first <= i < first + length]
        assert self.books.forget(first, first + length) == len(held)
        self.model.forget(first, first + length)
        for i in held:
            del self.places[i]

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """A fault at any position changes nothing (the invariant looks)."""
        ids = data.draw(st.lists(st.integers(0, NUM_IDS - 1), max_size=self.topk - 1, unique=True))
        place = data.draw(st.integers(0, len(ids)))
        bad = data.draw(st.sampled_from([NUM_IDS, 2**31 - 1, 2**32, 2**32 + 1, 2**62, *ids]))
        repeat = bad in ids
        where = max(place, ids.index(bad) + 1) if repeat else place
        ids.insert(where, bad)
        source, target = np.zeros((2, len(ids)), np.int32)
        assert self.books.plan(np.array(ids, np.int64), source, target) == (2 if repeat else 1)
        assert self.books.fault_index == where

    @rule()
    def reset(self) -> None:
        self.books.reset()
        self.places = {}
        ways = getattr(self.books, "ways", 0)
        self.model = model_of(self.policy, self.capacity, ways)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "books"):
            return
        tokens = np.empty(self.capacity, np.int32)
        self.books.tokens(tokens)
        found = {int(t): place for place, t in enumerate(tokens) if t >= 0}
        assert found == self.places
        assert set(found) == self.model.held()
        assert self.books.used == len(found) <= self.capacity
        for i in range(NUM_IDS):
            assert self.books.place_of(i) == found.get(i, -1)
        if isinstance(self.books, Arc):
            model = self.model
            sizes = tuple(len(part) for part in (model.t1, model.t2, model.b1, model.b2))
            assert self.books.sizes_of_lists() == sizes
            assert self.books.target == model.p


TestBooks = BooksMachine.TestCase


@pytest.mark.parametrize("policy", POLICIES)
def test_sizes_as_in_use_agree_with_the_model(policy: str) -> None:
    """Enough steps at a size that wraps every list: 256 ids of 4,096 before 512 places."""
    topk, num_ids = 256, 4096
    capacity = topk if policy == "previous" else 512
    books, model = make_books(policy, capacity, num_ids, topk), model_of(policy, capacity, 16)
    draw = np.random.default_rng(5)
    source, target = np.empty((2, topk), np.int32)
    weights = 1 / np.arange(1, num_ids + 1) ** 0.8
    weights /= weights.sum()
    for step in range(60):
        ids = draw.choice(num_ids, topk, replace=False, p=weights)
        books.plan(ids, source, target)
        hits, kept = model.plan(ids.tolist())
        assert set(ids[source >= 0].tolist()) == hits
        assert set(ids[target >= 0].tolist()) == kept
        if step % 7 == 0:
            first = int(draw.integers(num_ids))
            books.forget(first, num_ids)
            model.forget(first, num_ids)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("mru", 8, 100, 4, None), r"policy: expected one of previous, lru, fifo, arc, got 'mru'"),
        ((None, 8, 100, 4, None), r"policy: expected one of"),
        (("lru", 3, 100, 4, None), r"capacity: expected at least topk \(4\) places, got 3"),
        (("previous", 8, 100, 4, None), r"capacity: expected topk \(4\) places"),
        (("lru", 2**40, 100, 4, None), r"capacity: expected an integer"),
        (("lru", 8, 2**31, 4, None), r"max_tokens: expected an integer"),
        (("lru", 8, 100, 0, None), r"topk: expected an integer"),
        (("lru", 8, 100, True, None), r"topk: expected an integer"),
        (("lru", 8, 100, 4, 2), r"ways: expected none for lru, got 2"),
        (("fifo", 8, 100, 4, 3), r"ways: expected a divisor of capacity \(8\), got 3"),
        (("fifo", 8, 100, 4, 16), r"ways: expected an integer from 1 to 8"),
    ],
)
def test_bad_books_are_refused(arguments: Any, match: str) -> None:
    with pytest.raises(ParamInvalidError, match=match):
        make_books(*arguments)


def test_ways_fall_back_to_what_divides() -> None:
    books: Any = make_books("fifo", 34, 100, 4)
    assert (books.ways, books.sets) == (2, 17)


def test_kernel_refuses_what_the_checks_above_it_would() -> None:
    books = make_books("lru", 4, 10, 2)
    two = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="at most 2"):
        books.plan(np.arange(3), np.zeros(3, np.int32), np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="expected 2 ids"):
        books.plan(np.arange(1), two, two)
    with pytest.raises(ValueError, match="out"):
        books.tokens(two)
    assert books.used == 0
