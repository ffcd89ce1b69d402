# SPDX-License-Identifier: Apache-2.0
"""The blocks of device memory under a policy: what is held stays, the rest goes in its order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.offload.blocks.pool import BlockPool
from kvcore.replay.tiers.policies import POLICIES, make_policy
from kvcore.replay.tiers.pool import TierPool

#: A request: its prompt's blocks (a chain: a prefix of a family), and whether it leaves at once.
REQUESTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2)), max_size=40)


def serve(pool: BlockPool, requests: list[tuple[int, int, int]]) -> list[tuple[int, int | None]]:
    """Requests come, some stay for two others; returns hits and evictions of each."""
    seen: list[tuple[int, int | None]] = []
    running: list[list[int]] = []
    for family, length, stays in requests:
        keys = [(family, place) for place in range(length)]
        hits = pool.match(keys)
        pool.acquire(hits)
        before = pool.evictions
        fresh = pool.allocate(length - len(hits))
        if fresh is None:
            pool.release(hits[::-1])
            seen.append((-1, None))
        else:
            blocks = hits + fresh
            for place in range(len(hits), length):
                pool.register(blocks[place], keys[place], 8)
            running.append(blocks)
            seen.append((len(hits), pool.evictions - before))
        while len(running) > stays:
            pool.release(running.pop(0)[::-1])
    return seen


@given(REQUESTS)
def test_lru_is_the_pool_without_a_policy(requests: list[tuple[int, int, int]]) -> None:
    plain = BlockPool(8)
    policed = TierPool(8, make_policy("lru", 8))
    assert serve(policed, requests) == serve(plain, requests)
    assert policed.cached == plain.cached
    assert policed.evictions == plain.evictions


@pytest.mark.parametrize("policy", POLICIES)
@given(requests=REQUESTS)
def test_blocks_are_counted_and_what_is_held_stays(
    policy: str, requests: list[tuple[int, int, int]]
) -> None:
    gone: list[object] = []
    pool = TierPool(8, make_policy(policy, 8), evicted=lambda keys: gone.extend(keys))
    serve(pool, requests)
    assert pool.used + pool.free == pool.capacity
    assert len(gone) == pool.evictions
    for key in {(family, place) for family in range(4) for place in range(4)}:
        if pool.knows(key):
            assert pool.keys(pool._block_of[key]) == {key: 8}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_has_its_own_victim(policy: str) -> None:
    pool = TierPool(3, make_policy(policy, 3))
    blocks = {}
    for name, place in (("old", 0), ("deep", 7), ("new", 1)):
        pool.places[name] = place
        (blocks[name],) = pool.allocate(1) or ()
        pool.register(blocks[name], name, 8)
        pool.release([blocks[name]])
    for name in ("old", "old"):
        pool.acquire([blocks[name]])
        pool.release([blocks[name]])
    expected = {"lru": "deep", "lfu": "deep", "length": "deep", "arc": "deep", "fifo": "old"}
    assert pool.allocate(1) == [blocks[expected[policy]]]
    assert not pool.knows(expected[policy])


def test_nothing_is_kept_where_prefixes_are_off() -> None:
    pool = TierPool(4, make_policy("lru", 4), keeps=False)
    blocks = pool.allocate(2)
    assert blocks is not None
    assert pool.register(blocks[0], "a", 8) is False
    pool.release(blocks)
    assert pool.match(["a"]) == []
    assert (pool.cached, pool.free) == (0, 4)
    kept = TierPool(4, make_policy("lru", 4))
    blocks = kept.allocate(2)
    assert blocks is not None
    assert kept.register(blocks[0], "a", 8) is True
    kept.release(blocks)
    assert kept.match(["a"]) == [blocks[0]]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_whose_key_is_dropped_goes_by_another(policy: str) -> None:
    pool = TierPool(2, make_policy(policy, 2))
    (block,) = pool.allocate(1) or ()
    assert pool.register(block, "whole", 8)
    assert pool.register(block, "half", 4)
    assert pool.prepare_write(block, 5)  # the whole is no longer what it was
    assert pool.knows("half")
    assert not pool.knows("whole")
    (other,) = pool.allocate(1) or ()
    assert pool.register(other, "whole", 8)
    pool.release([block, other])
    assert sorted(pool.allocate(2) or ()) == [0, 1]
    assert pool.evictions == 2
