# SPDX-License-Identifier: Apache-2.0
"""The manager's books against a model that keeps states by key and times of use."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.errors import ParamInvalidError
from kvcore.offload import OffloadManagerStatistics, OffloadStats
from kvcore.offload.blocks.manager import MANAGER_POLICIES, OffloadManager
from kvcore.offload.blocks.order import ArcOrder

KEYS = st.lists(st.integers(0, 11), max_size=6)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 7), policy=st.sampled_from(MANAGER_POLICIES))
    def make(self, capacity: int, policy: str) -> None:
        self.manager = OffloadManager(capacity, policy, events=True)
        self.capacity, self.policy = capacity, policy
        self.blocks: dict[int, int] = {}
        self.storing: set[int] = set()
        self.readers: dict[int, int] = {}
        self.recent: list[int] = []  # the least recently used first
        self.loadable: set[int] = set()  # as the events tell it
        self.counts = dict.fromkeys(
            ("lookups", "found", "loads", "stores", "stored", "failed", "evicted", "refused"), 0
        )

    def settled(self, key: int) -> bool:
        return key in self.blocks and key not in self.storing

    @rule(keys=KEYS)
    def lookup(self, keys: list[int]) -> None:
        leading = [self.settled(key) for key in keys] + [False]
        assert self.manager.lookup(keys) == leading.index(False)
        self.counts["lookups"] += 1
        self.counts["found"] += leading.index(False)

    @rule(keys=KEYS)
    def touch(self, keys: list[int]) -> None:
        self.manager.touch(keys)
        for key in reversed(keys):
            if key in self.recent:
                self.recent.remove(key)
                self.recent.append(key)

    @rule(keys=KEYS)
    def prepare_load(self, keys: list[int]) -> None:
        if all(self.settled(key) for key in keys):
            assert self.manager.prepare_load(keys) == [self.blocks[key] for key in keys]
            for key in keys:
                self.readers[key] = self.readers.get(key, 0) + 1
            self.counts["loads"] += len(keys)
        else:
            with pytest.raises(ParamInvalidError, match="expected a key that can be loaded"):
                self.manager.prepare_load(keys)

    @rule(keys=KEYS)
    def complete_load(self, keys: list[int]) -> None:
        if all(self.readers.get(key, 0) >= keys.count(key) for key in keys):
            self.manager.complete_load(keys)
            for key in keys:
                self.readers[key] -= 1
        else:
            with pytest.raises(ParamInvalidError, match="loads of"):
                self.manager.complete_load(keys)

    @rule(keys=KEYS)
    def prepare_store(self, keys: list[int]) -> None:
        fresh = [key for key in dict.fromkeys(keys) if key not in self.blocks]
        may_go = [
            key
            for key in self.recent
            if self.settled(key) and not self.readers.get(key) and key not in keys
        ]
        needed = max(0, len(fresh) - (self.capacity - len(self.blocks)))
        plan = self.manager.prepare_store(keys)
        if needed > len(may_go):
            assert plan is None
            self.counts["refused"] += 1
            return
        assert plan is not None
        assert list(plan.keys) == fresh
        assert len(plan.evicted) == needed
        assert set(plan.evicted) <= set(may_go)
        self.counts["stores"] += len(fresh)
        self.counts["evicted"] += needed
        if self.policy == "lru":
            assert list(plan.evicted) == may_go[:needed]
        for victim in plan.evicted:
            assert isinstance(victim, int)
            del self.blocks[victim]
            self.recent.remove(victim)
        for key, block in zip(fresh, plan.blocks, strict=True):
            assert 0 <= block < self.capacity
            assert block not in self.blocks.values()
            self.blocks[key] = block
            self.storing.add(key)
            self.recent.append(key)

    @precondition(lambda self: self.storing)
    @rule(data=st.data(), success=st.booleans())
    def complete_store(self, data: st.DataObject, success: bool) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.storing)), unique=True))
        self.manager.complete_store(keys, success=success)
        self.counts["stored" if success else "failed"] += len(keys)
        self.storing -= set(keys)
        for key in keys if not success else ():
            del self.blocks[key]
            self.recent.remove(key)

    @rule(keys=KEYS, success=st.booleans())
    def complete_what_is_not_being_stored(self, keys: list[int], success: bool) -> None:
        if any(key not in self.storing for key in keys):
            with pytest.raises(ParamInvalidError, match="expected a key being stored"):
                self.manager.complete_store(keys, success=success)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        assert manager.used == len(self.blocks)
        assert manager.used + manager.free == self.capacity
        assert dataclasses.asdict(manager.stats) == {
            "capacity": self.capacity,
            "used": len(self.blocks),
            "free": self.capacity - len(self.blocks),
            "reading": sum(map(bool, self.readers.values())),
            "writing": len(self.storing),
            **self.counts,
        }
        for event in manager.take_events():
            for key in event.keys:
                assert isinstance(key, int)
                assert (key in self.loadable) is event.removed
            self.loadable ^= set(event.keys)  # type: ignore[arg-type]
        assert self.loadable == {key for key in self.blocks if key not in self.storing}
        order: Any = manager._order
        if isinstance(order, ArcOrder):
            once, again, gone_once, gone_again = map(set, order.lists())
            assert once | again == set(self.blocks)
            assert not once & again
            assert not (gone_once | gone_again) & (once | again)
            assert not gone_once & gone_again
            assert len(gone_once) <= self.capacity >= len(gone_again)
            assert 0 <= order.target <= self.capacity
            assert again <= {key for key in self.blocks if key not in self.storing}


TestManager = ManagerMachine.TestCase


def stored(manager: OffloadManager, *keys: str) -> tuple[Any, ...]:
    plan = manager.prepare_store(keys)
    assert plan is not None
    manager.complete_store(plan.keys)
    return plan.evicted


def test_arc_keeps_what_is_used_again() -> None:
    """A scan of new keys passes through; LRU loses everything to it."""
    for policy, kept in (("arc", 2), ("lru", 0)):
        manager = OffloadManager(4, policy)
        stored(manager, "a", "b")
        manager.touch(["a", "b"])
        for n in range(10):
            stored(manager, f"scan {n}")
        assert manager.lookup(["a", "b"]) == kept


def test_arc_moves_its_balance_when_it_regrets() -> None:
    manager = OffloadManager(2, "arc")
    order: Any = manager._order
    assert stored(manager, "a", "b") == ()
    manager.touch(["a"])  # used again
    assert stored(manager, "c") == ("b",)  # of those used once the oldest
    manager.touch(["b"])  # it gave way too soon
    assert order.target == 1
    manager.touch(["b"])
    assert order.target == 2
    assert stored(manager, "b") == ("a",)  # one used once is fewer than the two it may be
    manager.touch(["a"])
    assert order.target == 1


def test_a_store_is_all_or_nothing() -> None:
    for policy in MANAGER_POLICIES:
        manager = OffloadManager(3, policy)
        stored(manager, "a", "b", "c")
        manager.prepare_load(["b"])
        assert manager.prepare_store(["x", "y", "z"]) is None
        assert manager.prepare_store(["a", "x", "y"]) is None  # a is asked for, b is read
        assert manager.lookup(["a", "b", "c"]) == 3
        plan = manager.prepare_store(["x", "y"])
        assert plan is not None
        assert set(plan.evicted) == {"a", "c"}
        assert manager.prepare_store(["z"]) is None  # all are read or written
        manager.complete_store(["x", "y"], success=False)
        assert (manager.used, manager.free) == (1, 2)
        assert manager.lookup(["x"]) == 0


def test_arc_takes_every_entry_that_may_go() -> None:
    manager = OffloadManager(4, "arc")
    stored(manager, "a", "b", "c", "d")
    manager.touch(["a", "b"])
    plan = manager.prepare_store(["1", "2", "3", "4"])
    assert plan is not None
    assert plan.evicted == ("c", "d", "b", "a")


def test_the_end_of_a_prefix_goes_first() -> None:
    manager = OffloadManager(3)
    stored(manager, "1", "2", "3")
    manager.touch(["1", "2", "3"])
    assert stored(manager, "x", "y") == ("3", "2")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: OffloadManager(0), "capacity: expected"),
        (lambda: OffloadManager(2**40), "capacity: expected"),
        (lambda: OffloadManager(4, "fifo"), "policy: expected one of lru, arc, got 'fifo'"),
        (lambda: OffloadManager(4).complete_store(["a"]), r"keys\[0\]: expected a key being"),
        (lambda: OffloadManager(4).complete_store([], success=1), "success: expected True or"),  # type: ignore[arg-type]
        (
            lambda: OffloadManager(4).complete_load(["a"]),
            "1 loads of 'a' under way, got 0",
        ),
        (lambda: OffloadManager(4).prepare_load(["a"]), r"keys\[0\]: expected a key that can"),
    ],
)
def test_bad_calls_are_refused(make: Any, match: str) -> None:
    with pytest.raises(ParamInvalidError, match=match):
        make()


def test_stats_are_a_snapshot() -> None:
    manager = OffloadManager(2)
    assert manager.statistics() == manager.stats
    assert type(manager.stats) is OffloadManagerStatistics is OffloadStats
    before = manager.stats
    stored(manager, "a")
    with pytest.raises(ParamInvalidError):
        manager.prepare_load(["a", "b"])  # counts nothing
    assert (before.used, before.stored, manager.stats.stored, manager.stats.loads) == (0, 0, 1, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.used = 3  # type: ignore[misc]


def test_a_key_is_completed_once() -> None:
    manager = OffloadManager(4)
    manager.prepare_store(["a", "b"])
    with pytest.raises(ParamInvalidError, match="keys: expected each key once, got 1 repeats"):
        manager.complete_store(["a", "b", "a"], success=False)
    assert manager.used == 2
    with pytest.raises(ParamInvalidError, match=r"keys\[0\]: .* one being stored"):
        manager.prepare_load(["a"])
    manager.complete_store(["a", "b"])
    assert manager.take_events() == []
