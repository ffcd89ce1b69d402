# SPDX-License-Identifier: Apache-2.0
"""The policies of a device pool in plain Python: which tokens are held, no places.

``plan(ids)`` returns (ids held before, ids that were missing and are held after it).  Nothing is
shared with the package but the rule each policy's documentation states.
"""

from __future__ import annotations

from collections import OrderedDict


class Previous:
    def __init__(self, capacity: int) -> None:
        self.tokens: set[int] = set()

    def plan(self, ids: list[int]) -> tuple[set[int], set[int]]:
        hits = self.tokens & set(ids)
        self.tokens = set(ids)
        return hits, self.tokens - hits

    def forget(self, first: int, end: int) -> None:
        self.tokens = {t for t in self.tokens if not first <= t < end}

    def held(self) -> set[int]:
        return set(self.tokens)


class Lru:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: OrderedDict[int, None] = OrderedDict()

    def plan(self, ids: list[int]) -> tuple[set[int], set[int]]:
        hits = [i for i in ids if i in self.order]
        misses = [i for i in ids if i not in self.order]
        for i in hits:
            self.order.move_to_end(i)
        for i in misses:
            if len(self.order) == self.capacity:
                self.order.popitem(last=False)
            self.order[i] = None
        return set(hits), set(misses) & set(self.order)

    def forget(self, first: int, end: int) -> None:
        for i in [i for i in self.order if first <= i < end]:
            del self.order[i]

    def held(self) -> set[int]:
        return set(self.order)


class Fifo:
    def __init__(self, capacity: int, ways: int) -> None:
        self.sets: list[list[int | None]] = [[None] * ways for _ in range(capacity // ways)]
        self.pointers = [0] * len(self.sets)

    def which(self, i: int) -> int:
        return (i * 2654435769 % 2**32) * len(self.sets) // 2**32

    def plan(self, ids: list[int]) -> tuple[set[int], set[int]]:
        hits = {i for i in ids if i in self.sets[self.which(i)]}
        misses = [i for i in ids if i not in hits]
        for i in misses:
            s = self.which(i)
            self.sets[s][self.pointers[s]] = i
            self.pointers[s] = (self.pointers[s] + 1) % len(self.sets[s])
        return hits, set(misses) & self.held()

    def forget(self, first: int, end: int) -> None:
        for ways in self.sets:
            for way, i in enumerate(ways):
                if i is not None and first <= i < end:
                    ways[way] = None

    def held(self) -> set[int]:
        return {i for ways in self.sets for i in ways if i is not None}


class Arc:
    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))

    def replace(self, in_b2: bool) -> None:
        if len(self.t1) + len(self.t2) < self.c:
            return
        n = len(self.t1)
        if n and (n > self.p or (in_b2 and n == self.p) or not self.t2):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def miss(self, i: int) -> None:
        if i in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) // len(self.b1)))
            self.replace(False)
            del self.b1[i]
            self.t2[i] = None
        elif i in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) // len(self.b2)))
            self.replace(True)
            del self.b2[i]
            self.t2[i] = None
        else:
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.popitem(last=False)
                    self.replace(False)
                else:
                    self.t1.popitem(last=False)
            else:
                total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
                if total == 2 * self.c:
                    self.b2.popitem(last=False)
                self.replace(False)
            self.t1[i] = None

    def plan(self, ids: list[int]) -> tuple[set[int], set[int]]:
        hits = [i for i in ids if i in self.t1 or i in self.t2]
        misses = [i for i in ids if i not in hits]
        for i in hits:
            self.t1.pop(i, None)
            self.t2.pop(i, None)
            self.t2[i] = None
        for i in misses:
            self.miss(i)
        return set(hits), set(misses) & self.held()

    def forget(self, first: int, end: int) -> None:
        for part in (self.t1, self.t2, self.b1, self.b2):
            for i in [i for i in part if first <= i < end]:
                del part[i]

    def held(self) -> set[int]:
        return set(self.t1) | set(self.t2)
