# SPDX-License-Identifier: Apache-2.0
"""Which block of a full tier goes first, held against each policy's definition in plain lists."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.replay.tiers.lower import Block, LowerTier
from kvcore.replay.tiers.policies import POLICIES
from kvcore.replay.tiers.spec import TierSpec

Access = Callable[[int, int], tuple[bool, int | None]]
#: Few keys, so that they come again; a key's place is always the same.
ACCESSES = st.lists(st.integers(0, 11), max_size=120)


def place_of(key: int) -> int:
    return key * 7 % 5


def listed(policy: str, capacity: int) -> Access:
    """All but ARC: a list of what is there, searched anew each time."""
    there: list[int] = []
    uses: dict[int, int] = {}
    came: dict[int, int] = {}
    used: dict[int, int] = {}
    now = 0

    def rank(key: int) -> tuple[int, ...]:
        return {
            "lru": (used[key],),
            "fifo": (came[key],),
            "lfu": (uses[key], used[key]),
            "length": (uses[key], -place_of(key), used[key]),
        }[policy]

    def access(key: int, place: int) -> tuple[bool, int | None]:
        nonlocal now
        now += 1
        if key in there:
            uses[key] += 1
            used[key] = now
            return True, None
        gone = None
        if len(there) == capacity:
            gone = min(there, key=rank)
            there.remove(gone)
        there.append(key)
        uses[key], came[key], used[key] = 1, now, now
        return False, gone

    return access


def arc(capacity: int) -> Access:
    """Figure 4 of the paper, with lists whose first is the least recently used."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p = 0.0

    def replace(key: int) -> int:
        if t1 and (len(t1) > p or (key in b2 and len(t1) == p)):
            gone = t1.pop(0)
            b1.append(gone)
        else:
            gone = t2.pop(0)
            b2.append(gone)
        return gone

    def access(key: int, place: int) -> tuple[bool, int | None]:
        nonlocal p
        full = len(t1) + len(t2) == capacity
        for found in (t1, t2):
            if key in found:
                found.remove(key)
                t2.append(key)
                return True, None
        gone = None
        if key in b1:
            p = min(float(capacity), p + max(1.0, len(b2) / len(b1)))
            gone = replace(key) if full else None
            b1.remove(key)
            t2.append(key)
        elif key in b2:
            p = max(0.0, p - max(1.0, len(b1) / len(b2)))
            gone = replace(key) if full else None
            b2.remove(key)
            t2.append(key)
        else:
            if len(t1) + len(b1) == capacity:
                if len(t1) < capacity:
                    b1.pop(0)
                    gone = replace(key) if full else None
                else:
                    gone = t1.pop(0)
            else:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.pop(0)
                gone = replace(key) if full else None
            t1.append(key)
        return False, gone

    return access


def tier(policy: str, capacity: int) -> LowerTier:
    return LowerTier(TierSpec("dram", 1, policy=policy), capacity, 1.0, 1.0)


@pytest.mark.parametrize("policy", POLICIES)
@given(keys=ACCESSES, capacity=st.integers(1, 6))
def test_hits_and_evictions_are_those_of_the_definition(
    policy: str, keys: list[int], capacity: int
) -> None:
    defined = arc(capacity) if policy == "arc" else listed(policy, capacity)
    one = tier(policy, capacity)
    there: set[int] = set()
    evictions = 0
    for key in keys:
        hit, expected = defined(key, place_of(key))
        assert (key in one) == hit
        if hit:
            one.use(key)
            continue
        gone = one.put(Block(key, place_of(key), 10), 0.0)
        assert (None if gone is None else gone.key) == expected
        there.add(key)
        there.discard(expected if expected is not None else -1)
        evictions += expected is not None
        assert len(one) == len(there) <= capacity
    assert one.evictions == evictions
    assert one.peak == min(capacity, len(set(keys)))


@pytest.mark.parametrize("policy", POLICIES)
@given(keys=ACCESSES)
def test_with_room_for_all_nothing_goes(policy: str, keys: list[int]) -> None:
    one = tier(policy, 12)
    for key in keys:
        if key in one:
            one.use(key)
        else:
            assert one.put(Block(key, 0, 1), 0.0) is None
    assert len(one) == len(set(keys))


def test_the_policies_differ_where_their_definitions_do() -> None:
    """One sequence after which each gives another block away."""
    found = {}
    for policy in POLICIES:
        one = tier(policy, 4)
        for key, place in ((0, 0), (1, 1), (2, 9), (3, 3)):
            one.put(Block(key, place, 1), 0.0)
        for key in (0, 0, 3, 1):
            one.use(key)
        if policy == "lru":
            one.use(2)
        gone = one.put(Block(4, 0, 1), 0.0)
        assert gone is not None
        found[policy] = gone.key
    assert found == {"lru": 0, "fifo": 0, "lfu": 2, "length": 2, "arc": 2}
