# SPDX-License-Identifier: Apache-2.0
"""Which keys are offloaded to which blocks, with the semantics of vLLM's offloading manager.

A scheduler asks the manager; a worker moves the bytes; they meet in pairs of calls::

    n = manager.lookup(keys)                 # leading keys that can be loaded
    blocks = manager.prepare_load(keys[:n])  # they stay until complete_load
    ...
    manager.complete_load(keys[:n])

    plan = manager.prepare_store(keys)       # None: no room, and nothing has changed
    ...                                      # plan.keys[i] goes to block plan.blocks[i]
    manager.complete_store(plan.keys, success=True)

``complete_store(keys, success=False)`` rolls back: the keys are gone and their blocks free.  What
gave way for them stays away.  Eviction is all or nothing, takes no block that is read or
written, and none of the keys being stored.  No byte is ever seen here.

Semantics after vLLM, vllm/v1/kv_offload (manager, lru and arc); unlike there, a call that breaks
the pairing is a typed error and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from kvcore.errors import fail
from kvcore.offload.blocks.order import ArcOrder, EvictionOrder, LruOrder
from kvcore.offload.checks import check_choice, check_integer, each_key

__all__ = [
    "MANAGER_POLICIES", "OffloadEvent", "OffloadManager", "OffloadManagerStatistics",
    "OffloadStats", "StorePlan",
]  # fmt: skip

COUNTS = ("lookups", "found", "loads", "stores", "stored", "failed", "evicted", "refused")
MANAGER_POLICIES: tuple[str, ...] = ("lru", "arc")


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What a store is to do.

    keys:    those to store, in the order given; known ones and repeats are left out.
    blocks:  where each goes.
    evicted: keys that gave way.
    """

    keys: tuple[Hashable, ...]
    blocks: tuple[int, ...]
    evicted: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class OffloadEvent:
    """Keys that can be loaded from now on, or (``removed``) no more."""

    keys: tuple[Hashable, ...]
    removed: bool


@dataclass(frozen=True, slots=True)
class OffloadManagerStatistics:
    """What `OffloadManager.statistics` returns: what it holds now, and what it was asked so far.

    capacity, used, free: blocks; reading, writing: those of a load or a store under way.
    lookups, found: calls of ``lookup``, and the keys that they found.
    loads:     keys of ``prepare_load``; stores: keys that ``prepare_store`` gave a block.
    stored, failed: keys of ``complete_store`` with and without success.
    evicted:   keys that gave way; refused: calls of ``prepare_store`` that found no room.
    """

    capacity: int
    used: int
    free: int
    reading: int
    writing: int
    lookups: int
    found: int
    loads: int
    stores: int
    stored: int
    failed: int
    evicted: int
    refused: int


#: The name that `OffloadManager.stats` had for them.
OffloadStats = OffloadManagerStatistics


class _Entry:
    __slots__ = ("block", "readers", "storing")

    def __init__(self, block: int) -> None:
        self.block = block
        self.readers = 0
        self.storing = True


class OffloadManager:
    """``capacity`` blocks, numbered from 0.

    policy: "lru" or "arc".
    events: whether ``take_events`` has something to tell.
    """

    capacity: int
    policy: str

    def __init__(self, capacity: int, policy: str = "lru", *, events: bool = False) -> None:
        check_integer("capacity", capacity, 1, 2**31)
        check_choice("policy", policy, MANAGER_POLICIES)
        if type(events) is not bool:
            fail("events", "True or False", repr(events))
        self.capacity, self.policy = capacity, policy
        self._order: EvictionOrder = LruOrder() if policy == "lru" else ArcOrder(capacity)
        self._entries: dict[Hashable, _Entry] = {}
        self._given_back: list[int] = []
        self._fresh = 0  # blocks from here on were never given out
        self._events: list[OffloadEvent] | None = [] if events else None
        self._counts = dict.fromkeys(COUNTS, 0)
        self._reading = self._writing = 0

    # -- what it says ---------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Blocks that hold a key, or are being written."""
        return len(self._entries)

    @property
    def free(self) -> int:
        """The others; ``used + free == capacity``."""
        return self.capacity - self._fresh + len(self._given_back)

    def statistics(self) -> OffloadManagerStatistics:
        """What it holds now, and what it was asked since it was made: a snapshot."""
        return OffloadManagerStatistics(
            self.capacity, self.used, self.free, self._reading, self._writing, **self._counts
        )

    @property
    def stats(self) -> OffloadManagerStatistics:
        """The same snapshot as `statistics` returns."""
        return self.statistics()

    def lookup(self, keys: Iterable[Hashable]) -> int:
        """How many leading keys can be loaded now; one being stored cannot yet."""
        count = 0
        for key in each_key("keys", keys):
            entry = self._entries.get(key)
            if entry is None or entry.storing:
                break
            count += 1
        self._counts["lookups"] += 1
        self._counts["found"] += count
        return count

    def take_events(self) -> list[OffloadEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events or [], [] if self._events is not None else None
        return events

    # -- use ------------------------------------------------------------------------------

    def touch(self, keys: Iterable[Hashable]) -> None:
        """The keys were used; the first of them counts as the most recent.

        Prefixes are looked up from their start, so a prefix's last blocks go first.
        """
        for key in reversed(list(each_key("keys", keys))):
            entry = self._entries.get(key)
            self._order.touch(key, entry is not None and not entry.storing)

    def prepare_load(self, keys: Iterable[Hashable]) -> list[int]:
        """The blocks of the keys, which stay until ``complete_load``.

        Raises ParamInvalidError for a key that is not stored or still being stored.
        """
        wanted = list(each_key("keys", keys))
        for place, key in enumerate(wanted):
            entry = self._entries.get(key)
            if entry is None or entry.storing:
                state = "one that is not" if entry is None else "one being stored"
                fail(f"keys[{place}]", "a key that can be loaded", f"{state} ({key!r})")
        for key in wanted:
            entry = self._entries[key]
            self._reading += not entry.readers
            entry.readers += 1
        self._counts["loads"] += len(wanted)
        return [self._entries[key].block for key in wanted]

    def complete_load(self, keys: Iterable[Hashable]) -> None:
        """The loads are done, or given up: one for each ``prepare_load`` of a key.

        Raises ParamInvalidError when a key has fewer.
        """
        done = list(each_key("keys", keys))
        for key, times in Counter(done).items():
            entry = self._entries.get(key)
            readers = 0 if entry is None else entry.readers
            if readers < times:
                fail("keys", f"{times} loads of {key!r} under way", readers)
        for key in done:
            entry = self._entries[key]
            entry.readers -= 1
            self._reading -= not entry.readers

    def prepare_store(self, keys: Iterable[Hashable]) -> StorePlan | None:
        """Blocks for the keys that are neither stored nor being stored; None without room.

        They can be loaded after ``complete_store``.
        """
        given = list(dict.fromkeys(each_key("keys", keys)))
        fresh = [key for key in given if key not in self._entries]
        asked = set(given)

        def may_go(key: Hashable) -> bool:
            entry = self._entries[key]
            return not entry.readers and not entry.storing and key not in asked

        victims = self._order.victims(max(len(fresh) - self.free, 0), may_go)
        if victims is None:
            self._counts["refused"] += 1
            return None
        self._order.evict(victims)
        for key in victims:
            self._given_back.append(self._entries.pop(key).block)
        if victims:
            self._tell(victims, removed=True)
        for key in fresh:
            self._entries[key] = _Entry(self._take())
            self._order.add(key)
        self._writing += len(fresh)
        self._counts["stores"] += len(fresh)
        self._counts["evicted"] += len(victims)
        blocks = tuple(self._entries[key].block for key in fresh)
        return StorePlan(tuple(fresh), blocks, tuple(victims))

    def _take(self) -> int:
        if self._given_back:
            return self._given_back.pop()
        self._fresh += 1
        return self._fresh - 1

    def complete_store(self, keys: Iterable[Hashable], success: bool = True) -> None:
        """The stores are done; without success the keys are gone and their blocks free.

        Raises ParamInvalidError for a key that is not being stored, or is given twice.
        """
        done = list(each_key("keys", keys))
        if type(success) is not bool:
            fail("success", "True or False", repr(success))
        for place, key in enumerate(done):
            entry = self._entries.get(key)
            if entry is None or not entry.storing:
                fail(f"keys[{place}]", "a key being stored", repr(key))
        if len(set(done)) != len(done):
            fail("keys", "each key once", f"{len(done) - len(set(done))} repeats")
        for key in done:
            if success:
                self._entries[key].storing = False
            else:
                self._order.remove(key)
                self._given_back.append(self._entries.pop(key).block)
        self._writing -= len(done)
        self._counts["stored" if success else "failed"] += len(done)
        if success and done:
            self._tell(done, removed=False)

    def _tell(self, keys: list[Hashable], *, removed: bool) -> None:
        if self._events is not None:
            self._events.append(OffloadEvent(tuple(keys), removed))
