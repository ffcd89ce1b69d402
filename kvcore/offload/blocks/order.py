# SPDX-License-Identifier: Apache-2.0
"""The order in which an offload manager's entries give way: LRU and ARC over any keys.

An order knows keys and when they were used.  It never decides alone: ``victims`` proposes, given
what may go, and changes nothing; ``evict`` carries out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain

__all__ = ["ArcOrder", "EvictionOrder", "LruOrder"]

Keys = OrderedDict[Hashable, None]
NOBODY = object()


class EvictionOrder(ABC):
    """What a manager asks of an order."""

    @abstractmethod
    def add(self, key: Hashable) -> None:
        """A key that is not among the entries becomes one, the newest."""

    @abstractmethod
    def remove(self, key: Hashable) -> None:
        """An entry goes without having given way: nothing is remembered."""

    @abstractmethod
    def touch(self, key: Hashable, settled: bool) -> None:
        """The key was used, entry or not; settled: it is an entry that can be read."""

    @abstractmethod
    def victims(self, count: int, may_go: Callable[[Hashable], bool]) -> list[Hashable] | None:
        """``count`` entries to give way, the first one first; None when fewer may go."""

    @abstractmethod
    def evict(self, keys: Iterable[Hashable]) -> None:
        """These entries give way."""


class LruOrder(EvictionOrder):
    """The least recently used entry gives way."""

    def __init__(self) -> None:
        self._keys: Keys = OrderedDict()

    def add(self, key: Hashable) -> None:
        """Make the key the newest entry."""
        self._keys[key] = None

    def remove(self, key: Hashable) -> None:
        """Take the entry out."""
        del self._keys[key]

    def touch(self, key: Hashable, settled: bool) -> None:
        """Make the entry the newest; a key that is no entry is passed over."""
        if key in self._keys:
            self._keys.move_to_end(key)

    def victims(self, count: int, may_go: Callable[[Hashable], bool]) -> list[Hashable] | None:
        """Choose the least recently used entries that may go; None when there are too few."""
        found: list[Hashable] = []
        for key in self._keys:
            if len(found) == count:
                break
            if may_go(key):
                found.append(key)
        return found if len(found) == count else None

    def evict(self, keys: Iterable[Hashable]) -> None:
        """Take the entries out."""
        for key in keys:
            del self._keys[key]


class ArcOrder(EvictionOrder):
    """Entries used once and used again, and the balance between them (after ARC, FAST 2003).

    As vLLM's manager has it: an entry is stored as used once; being touched when it can be read
    makes it used again; touching one that gave way moves the balance.  The entries used once give
    way as long as they are at least ``target``; where those may not go, the others do.
    """

    capacity: int
    target: int

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target = capacity, 0
        self.once: Keys = OrderedDict()
        self.again: Keys = OrderedDict()
        self.gone_once: Keys = OrderedDict()
        self.gone_again: Keys = OrderedDict()

    def add(self, key: Hashable) -> None:
        """Make the key an entry used once, and forget that it ever gave way."""
        self.gone_once.pop(key, None)
        self.gone_again.pop(key, None)
        self.once[key] = None

    def remove(self, key: Hashable) -> None:
        """Take the entry out."""
        del (self.once if key in self.once else self.again)[key]

    def touch(self, key: Hashable, settled: bool) -> None:
        """Move an entry to those used again; for a key that gave way, move the balance."""
        if key in self.once and settled:
            del self.once[key]
            self.again[key] = None
        elif key in self.gone_once:
            step = max(1, len(self.gone_again) // len(self.gone_once))
            self.target = min(self.target + step, self.capacity)
            self.gone_once.move_to_end(key)
        elif key in self.gone_again:
            step = max(1, len(self.gone_once) // len(self.gone_again))
            self.target = max(self.target - step, 0)
            self.gone_again.move_to_end(key)
        else:
            for entries in (self.once, self.again):
                if key in entries:
                    entries.move_to_end(key)

    def victims(self, count: int, may_go: Callable[[Hashable], bool]) -> list[Hashable] | None:
        """Choose first from the entries used once while they are at least ``target``."""
        left = len(self.once)
        once = (key for key in self.once if may_go(key))
        again = (key for key in self.again if may_go(key))
        found: list[Hashable] = []
        while len(found) < count:
            sources = (once, again) if left >= max(self.target, 1) else (again, once)
            key = next(chain(*sources), NOBODY)
            if key is NOBODY:
                return None
            left -= key in self.once
            found.append(key)
        return found

    def evict(self, keys: Iterable[Hashable]) -> None:
        """Take the entries out, and remember as many that gave way as there may be entries."""
        for key in keys:
            entries, gone = (
                (self.once, self.gone_once) if key in self.once else (self.again, self.gone_again)
            )
            del entries[key]
            gone[key] = None
        for gone in (self.gone_once, self.gone_again):
            while len(gone) > self.capacity:
                gone.popitem(last=False)

    def lists(self) -> Sequence[Keys]:
        """Used once, used again, and those that gave way from either."""
        return self.once, self.again, self.gone_once, self.gone_again
