# SPDX-License-Identifier: Apache-2.0
"""The pool's books against a model that knows no lists of free blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvcore.errors import ParamInvalidError
from kvcore.offload.blocks.pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Owners take and give back; the model keeps counts per block and an eviction order."""

    owned = Bundle("owned")

    @initialize(capacity=st.integers(1, 9))
    def make(self, capacity: int) -> None:
        self.pool = BlockPool(capacity)
        self.capacity = capacity
        self.count = dict.fromkeys(range(capacity), 0)
        self.keys: dict[int, dict[object, int]] = {block: {} for block in range(capacity)}
        self.released: list[int] = []  # cached blocks, the next to be given away first
        self.evictions = 0
        self.next_key = 0

    @rule(target=owned, wanted=st.integers(0, 5))
    def allocate(self, wanted: int) -> object:
        clean = {b for b in self.count if not self.count[b] and not self.keys[b]}
        expected_victims = self.released[: max(0, wanted - len(clean))]
        taken = self.pool.allocate(wanted)
        if wanted > len(clean) + len(self.released):
            assert taken is None
            return multiple()
        assert taken is not None
        assert len(set(taken)) == wanted
        assert set(taken) - clean == set(expected_victims)
        self.evictions += len(expected_victims)
        for block in taken:
            assert self.count[block] == 0
            self.count[block] = 1
            self.keys[block] = {}
        self.released = [b for b in self.released if b not in expected_victims]
        return multiple(*taken)

    @rule(target=owned, data=st.data())
    def acquire(self, data: st.DataObject) -> object:
        known = [b for b in self.count if self.count[b] or self.keys[b]]
        blocks = data.draw(st.lists(st.sampled_from(known), unique=True) if known else st.just([]))
        self.pool.acquire(blocks)
        for block in blocks:
            self.count[block] += 1
        self.released = [b for b in self.released if b not in blocks]
        return multiple(*blocks)

    @rule(block=consumes(owned))
    def release(self, block: int) -> None:
        self.pool.release([block])
        self.count[block] -= 1
        if not self.count[block] and self.keys[block]:
            self.released.append(block)

    @rule(block=owned, filled=st.integers(1, 4), fresh=st.booleans(), data=st.data())
    def register(self, block: int, filled: int, fresh: bool, data: st.DataObject) -> None:
        if not self.count[block]:
            return  # the bundle may name an owner that has gone
        known = [key for keys in self.keys.values() for key in keys]
        if fresh or not known:
            key: object = self.next_key
            self.next_key += 1
        else:
            key = data.draw(st.sampled_from(known))
        assert self.pool.register(block, key, filled) is (key not in known)
        if key not in known:
            self.keys[block][key] = filled

    @rule(block=owned, row=st.integers(0, 4))
    def prepare_write(self, block: int, row: int) -> None:
        if not self.count[block]:
            return
        alone = self.count[block] == 1
        assert self.pool.prepare_write(block, row) is alone
        if alone:
            self.keys[block] = {k: n for k, n in self.keys[block].items() if n <= row}

    @rule(data=st.data())
    def refuse_to_free_twice(self, data: st.DataObject) -> None:
        free = [b for b in self.count if not self.count[b]]
        held = [b for b in self.count if self.count[b]]
        if free:
            victim = data.draw(st.sampled_from(free))
            # With good ones before it, so that a partial release would be seen by the invariant.
            with pytest.raises(ParamInvalidError, match="expected a block that is held"):
                self.pool.release([*held, victim])

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert pool.used + pool.free == pool.capacity == self.capacity
        assert pool.used == sum(n > 0 for n in self.count.values()) <= pool.peak_used
        assert pool.cached == len(self.released)
        assert pool.evictions == self.evictions
        for block in self.count:
            assert pool.references(block) == self.count[block]
            assert pool.keys(block) == self.keys[block]
            for key in self.keys[block]:
                assert pool.match([key]) == [block]


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(4)


def test_match_stops_at_the_first_key_that_is_not_known(pool: BlockPool) -> None:
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, key in zip(blocks, "acd", strict=True):
        assert pool.register(block, key, 8)
    assert pool.match("abcd") == blocks[:1]
    assert pool.match("acx") == blocks[:2]
    assert pool.match("") == []


def test_exhaustion_is_a_value_and_takes_nothing(pool: BlockPool) -> None:
    assert pool.allocate(5) is None
    assert pool.free == 4
    assert pool.allocate(4) is not None
    assert pool.allocate() is None
    assert pool.allocate(0) == []


def test_least_recently_released_is_given_away_first(pool: BlockPool) -> None:
    a, b, c, d = pool.allocate(4) or []
    for block, key in ((a, "a"), (b, "b"), (c, "c")):
        pool.register(block, key, 8)
    pool.release([b, a])
    pool.release([c, d])
    assert pool.allocate() == [d]  # clean
    pool.acquire([b])
    pool.release([b])
    assert pool.allocate(3) == [a, c, b]
    assert pool.evictions == 3


def test_a_write_drops_the_keys_it_makes_untrue(pool: BlockPool) -> None:
    (block,) = pool.allocate() or []
    pool.register(block, "prompt's tail", 60)
    pool.register(block, "filled up", 128)
    assert pool.prepare_write(block, 60)
    assert pool.keys(block) == {"prompt's tail": 60}
    pool.acquire([block])
    assert not pool.prepare_write(block, 0)
    assert pool.keys(block) == {"prompt's tail": 60}
    pool.release([block])
    assert pool.prepare_write(block, 59)
    assert pool.match(["prompt's tail"]) == []


def test_peak_is_kept(pool: BlockPool) -> None:
    pool.release(pool.allocate(3) or [])
    assert (pool.used, pool.peak_used) == (0, 3)


@pytest.mark.parametrize("capacity", [0, -1, True, 2.0, "4", None])
def test_bad_capacity(capacity: object) -> None:
    with pytest.raises(ParamInvalidError, match=r"^capacity: expected an integer of at least 1"):
        BlockPool(capacity)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.allocate(-1), "num_blocks: expected an integer of at least 0, got -1"),
        (lambda p: p.allocate(True), "num_blocks: expected an integer of at least 0, got True"),
        (lambda p: p.allocate(1.0), "num_blocks: expected an integer"),
        (lambda p: p.release([0, 0]), "blocks: expected each block once"),
        (lambda p: p.release([0, 3]), r"blocks\[1\]: expected a block that is held, got free"),
        (lambda p: p.release([0, -1]), r"blocks\[1\]: expected a block from 0 to 3, got -1"),
        (lambda p: p.release([4]), r"blocks\[0\]: expected a block from 0 to 3, got 4"),
        (lambda p: p.release([True]), r"blocks\[0\]: expected a block from 0 to 3, got True"),
        (lambda p: p.release([None]), r"blocks\[0\]: expected a block from 0 to 3, got None"),
        (lambda p: p.acquire([0, 3]), r"blocks\[1\]: expected a block that is held or cached"),
        (lambda p: p.acquire([0, 0]), "blocks: expected each block once"),
        (lambda p: p.acquire(["0"]), r"blocks\[0\]: expected a block from 0 to 3, got '0'"),
        (lambda p: p.register(3, "k", 1), "block: expected a block that is held, got free"),
        (lambda p: p.register(-1, "k", 1), "block: expected a block from 0 to 3, got -1"),
        (lambda p: p.register(0, "k", 0), "filled: expected an integer of at least 1, got 0"),
        (lambda p: p.prepare_write(3, 0), "block: expected a block that is held, got free"),
        (lambda p: p.prepare_write(0, -1), "row: expected an integer of at least 0, got -1"),
        (lambda p: p.references(9), "block: expected a block from 0 to 3, got 9"),
        (lambda p: p.keys(-2), "block: expected a block from 0 to 3, got -2"),
    ],
)
def test_bad_calls_change_nothing(
    pool: BlockPool, call: Callable[[BlockPool], object], message: str
) -> None:
    (block,) = pool.allocate() or []
    assert block == 0
    pool.register(0, "known", 4)
    with pytest.raises(ParamInvalidError, match=f"^{message}"):
        call(pool)
    assert (pool.used, pool.free, pool.references(0)) == (1, 3, 1)
    assert pool.keys(0) == {"known": 4}
    assert pool.match(["k"]) == []
