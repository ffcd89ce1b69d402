# SPDX-License-Identifier: Apache-2.0
"""Which block of a full tier goes first.

``lru``     the one whose last use is the longest ago.
``fifo``    the one that came first, whatever was used since.
``lfu``     the one with the fewest uses; of those the least recently used.
``length``  as ``lfu``, but of blocks with as few uses the one that lies furthest from the beginning
            of its prompt goes first ("LengthAwareCache" of Mooncake, arXiv:2407.00079).
``arc``     Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003: two
            lists, of blocks seen once and of those seen again, whose shares follow the keys that
            were given away lately.

A policy keeps an order and nothing else.  Of the tiers below the device every block can go; a
block of device memory that a request holds cannot, so it is taken out of the order (`hold`) and
comes back when nobody holds it (`free`).

A key that comes is announced with `expect`, then room is made with `evict` where there is none,
then it is put in with `add`.  Device memory makes room before it is known for what.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable

__all__ = ["POLICIES", "Policy", "make_policy"]

POLICIES = ("lru", "lfu", "length", "arc", "fifo")


class Policy(ABC):
    """The order in which the blocks of a tier go; keys are of blocks that are in the tier."""

    def expect(self, key: Hashable) -> None:  # noqa: B027 (most have nothing to do then)
        """A key comes that is not in the tier."""

    @abstractmethod
    def add(self, key: Hashable, place: int) -> None:
        """It is there now; place: of the block in its prompt, from 0."""

    @abstractmethod
    def use(self, key: Hashable) -> None:
        """A request uses it."""

    @abstractmethod
    def evict(self) -> Hashable:
        """Take out the one that goes first, and return it.  Called when there is one to go."""

    @abstractmethod
    def hold(self, key: Hashable) -> None:
        """A request holds it: it cannot go."""

    @abstractmethod
    def free(self, key: Hashable) -> None:
        """Nobody holds it any more."""

    @abstractmethod
    def drop(self, key: Hashable) -> None:
        """It is in the tier no longer, and did not have to go."""


class _Listed(Policy):
    """Blocks in one order; subclasses say what a use does to it."""

    def __init__(self) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, key: Hashable, place: int) -> None:
        self._order[key] = None

    def use(self, key: Hashable) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def evict(self) -> Hashable:
        return self._order.popitem(last=False)[0]

    def hold(self, key: Hashable) -> None:
        self._order.pop(key, None)

    def free(self, key: Hashable) -> None:
        self._order[key] = None

    def drop(self, key: Hashable) -> None:
        self._order.pop(key, None)


class _Ranked(Policy):
    """The block of the lowest rank goes first; ranks are worked out when something happens to it.

    A heap has every rank that a block had lately; those that are not its rank any more are passed
    over.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], Hashable]] = []
        self._rank: dict[Hashable, tuple[int, ...]] = {}  # of those that can go
        self._uses: dict[Hashable, list[int]] = {}  # uses, place, when it came, when it was used
        self._now = 0

    @abstractmethod
    def _rank_of(self, uses: int, place: int, came: int, used: int) -> tuple[int, ...]:
        """Unlike for any two blocks."""

    def add(self, key: Hashable, place: int) -> None:
        self._now += 1
        self._uses[key] = [1, place, self._now, self._now]
        self._push(key)

    def use(self, key: Hashable) -> None:
        self._now += 1
        entry = self._uses[key]
        entry[0] += 1
        entry[3] = self._now
        if key in self._rank:
            self._push(key)

    def evict(self) -> Hashable:
        while True:
            rank, key = heapq.heappop(self._heap)
            if self._rank.get(key) == rank:
                del self._rank[key], self._uses[key]
                return key

    def hold(self, key: Hashable) -> None:
        self._rank.pop(key, None)

    def free(self, key: Hashable) -> None:
        self._push(key)

    def drop(self, key: Hashable) -> None:
        self._uses.pop(key, None)
        self._rank.pop(key, None)

    def _push(self, key: Hashable) -> None:
        rank = self._rank_of(*self._uses[key])
        if self._rank.get(key) == rank:
            return
        self._rank[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 4 * len(self._rank):
            self._heap = [(rank, key) for key, rank in self._rank.items()]
            heapq.heapify(self._heap)


class _Fifo(_Ranked):
    def _rank_of(self, uses: int, place: int, came: int, used: int) -> tuple[int, ...]:
        return (came,)


class _Lfu(_Ranked):
    def _rank_of(self, uses: int, place: int, came: int, used: int) -> tuple[int, ...]:
        return (uses, used)


class _Length(_Ranked):
    def _rank_of(self, uses: int, place: int, came: int, used: int) -> tuple[int, ...]:
        return (uses, -place, used)


class _Arc(Policy):
    """ARC; ``capacity``: blocks of the tier.

    Lists go from the least to the most recently used: once and again of blocks that can go,
    gone_once and gone_again of keys that were given away.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # blocks that were seen once are to have
        self._once: OrderedDict[Hashable, None] = OrderedDict()
        self._again: OrderedDict[Hashable, None] = OrderedDict()
        self._gone_once: OrderedDict[Hashable, None] = OrderedDict()
        self._gone_again: OrderedDict[Hashable, None] = OrderedDict()
        self._held: dict[Hashable, OrderedDict[Hashable, None]] = {}
        self._was_again = self._forget = False

    def expect(self, key: Hashable) -> None:
        once, again = len(self._gone_once), len(self._gone_again)
        self._was_again = self._forget = False
        if key in self._gone_once:
            self._target = min(float(self._capacity), self._target + max(1.0, again / once))
        elif key in self._gone_again:
            self._target = max(0.0, self._target - max(1.0, once / again))
            self._was_again = True
        elif len(self._once) + once >= self._capacity:
            if once:
                self._gone_once.popitem(last=False)
            else:
                self._forget = True
        elif once + again + len(self._once) + len(self._again) >= 2 * self._capacity:
            self._gone_again.popitem(last=False)

    def add(self, key: Hashable, place: int) -> None:
        seen = key in self._gone_once or key in self._gone_again
        self._gone_once.pop(key, None)
        self._gone_again.pop(key, None)
        (self._again if seen else self._once)[key] = None
        self._was_again = self._forget = False

    def use(self, key: Hashable) -> None:
        if key in self._held:
            self._held[key] = self._again
            return
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def evict(self) -> Hashable:
        once = len(self._once)
        share = once > self._target or (self._was_again and once == self._target)
        if self._once and (share or not self._again):
            key = self._once.popitem(last=False)[0]
            if not self._forget:
                self._gone_once[key] = None
        else:
            key = self._again.popitem(last=False)[0]
            self._gone_again[key] = None
        # Where room is made for what has no key, nothing of this was trimmed when it came.
        while self._gone_once and len(self._gone_once) + len(self._once) > self._capacity:
            self._gone_once.popitem(last=False)
        while len(self._gone_again) > 2 * self._capacity - len(self._gone_once):
            self._gone_again.popitem(last=False)
        return key

    def hold(self, key: Hashable) -> None:
        for listed in (self._once, self._again):
            if key in listed:
                del listed[key]
                self._held[key] = listed

    def free(self, key: Hashable) -> None:
        self._held.pop(key, self._once)[key] = None

    def drop(self, key: Hashable) -> None:
        for listed in (self._once, self._again, self._held):
            listed.pop(key, None)


def make_policy(name: str, capacity: int) -> Policy:
    """The policy of that name, of `POLICIES`, for a tier of so many blocks."""
    if name == "arc":
        return _Arc(capacity)
    made: dict[str, Callable[[], Policy]] = {
        "lru": _Listed, "fifo": _Fifo, "lfu": _Lfu, "length": _Length,
    }  # fmt: skip
    return made[name]()
