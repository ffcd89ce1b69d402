# SPDX-License-Identifier: Apache-2.0
"""Random operations on the pools and caches of the offload engine, aborts among them.

    python tests/offload/soak.py                         # 1,000,000 operations, minutes
    python tests/offload/soak.py --operations 50000 --seed 7

After every operation: used + free == capacity, no block was freed twice (each release of a block
that is not held must be refused, and the counts must agree with a count kept here), and every byte
that is served is the one that was written last.  The bytes are numbers kept beside; the books
under test never see them.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import ParamInvalidError
from kvcore.offload import BlockPool, DevicePool, OffloadManager, SelectionCache
from kvcore.offload.rows.policy import POLICIES


class Soak(Protocol):
    """One thing under test."""

    def operate(self) -> None:
        """One random operation, and the checks behind it."""


def refused(call: Any, *args: Any) -> None:
    try:
        call(*args)
    except ParamInvalidError:
        return
    raise AssertionError(f"{call} took {args}")


class Blocks:
    """`BlockPool`: requests that share prefixes, grow, write, finish and are aborted."""

    BLOCK, CAPACITY = 4, 64

    def __init__(self, seed: int) -> None:
        self.draw, self.pool = Random(seed), BlockPool(self.CAPACITY)
        self.held: dict[int, list[int]] = {}  # request -> its blocks
        self.tokens: dict[int, list[int]] = {}  # request -> the bytes of its tokens
        self.rows: list[list[int]] = [[0] * self.BLOCK for _ in range(self.CAPACITY)]
        self.number = self.stamp = 0

    def operate(self) -> None:
        what = self.draw.random()
        if what < 0.25 or not self.held:
            self.admit()
        elif what < 0.75:
            self.append(self.draw.choice(list(self.held)))
        elif what < 0.95:
            self.leave(self.draw.choice(list(self.held)), keep=self.draw.random() < 0.7)
        elif what < 0.98:
            self.read(self.draw.choice(list(self.held)))
        else:
            self.free_twice()
        owners = Counter(block for blocks in self.held.values() for block in blocks)
        assert self.pool.used + self.pool.free == self.CAPACITY
        assert self.pool.used == len(owners)
        if self.draw.random() < 0.02:
            assert all(self.pool.references(b) == owners[b] for b in range(self.CAPACITY))

    def keys(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """Of every block, the last one as far as it is filled."""
        last = (len(tokens) - 1) // self.BLOCK * self.BLOCK
        ends = [*range(self.BLOCK, last + 1, self.BLOCK), len(tokens)]
        return [tuple(tokens[:end]) for end in ends]

    def admit(self) -> None:
        # Few prompts, so that prefixes are met again.
        longest = 24 if self.draw.random() < 0.3 else 8
        prompt = [self.draw.randrange(3)] * self.draw.randrange(1, longest)
        hits = self.pool.match(self.keys(prompt))
        self.pool.acquire(hits)
        fresh = self.pool.allocate(-(-len(prompt) // self.BLOCK) - len(hits))
        if fresh is None:
            self.pool.release(hits[::-1])
            return
        self.number += 1
        self.held[self.number], self.tokens[self.number] = hits + fresh, prompt
        for place in range(len(hits) * self.BLOCK, len(prompt)):
            self.write(self.number, place, prompt[place])
        for i, key in enumerate(self.keys(prompt) if self.draw.random() < 0.5 else ()):
            self.pool.register(self.held[self.number][i], key, len(key) - i * self.BLOCK)
        if self.draw.random() < 0.1:  # aborted before it did anything
            self.leave(self.number, keep=False)
        else:
            self.read(self.number)

    def write(self, request: int, place: int, value: int) -> None:
        block = self.held[request][place // self.BLOCK]
        assert self.pool.prepare_write(block, place % self.BLOCK)
        self.rows[block][place % self.BLOCK] = value

    def append(self, request: int) -> None:
        blocks, tokens = self.held[request], self.tokens[request]
        place, row = divmod(len(tokens), self.BLOCK)
        if place == len(blocks):
            fresh = self.pool.allocate()
            if fresh is None:
                self.leave(request, keep=True)
                return
            blocks += fresh
        elif not self.pool.prepare_write(blocks[place], row):
            fresh = self.pool.allocate()
            if fresh is None:
                self.leave(request, keep=False)
                return
            self.rows[fresh[0]] = list(self.rows[blocks[place]])
            self.pool.release([blocks[place]])
            blocks[place] = fresh[0]
        self.stamp += 1
        value = self.stamp + 10 if self.draw.random() < 0.5 else tokens[0]
        tokens.append(value)
        self.write(request, len(tokens) - 1, value)

    def read(self, request: int) -> None:
        for place, value in enumerate(self.tokens[request]):
            block = self.held[request][place // self.BLOCK]
            assert self.rows[block][place % self.BLOCK] == value

    def leave(self, request: int, *, keep: bool) -> None:
        self.read(request)
        blocks, tokens = self.held.pop(request), self.tokens.pop(request)
        if keep:
            for i, (block, key) in enumerate(zip(blocks, self.keys(tokens), strict=True)):
                self.pool.register(block, key, len(key) - i * self.BLOCK)
        if self.draw.random() < 0.3:  # in two goes
            cut = self.draw.randrange(len(blocks) + 1)
            self.pool.release(blocks[cut:][::-1])
            self.pool.release(blocks[:cut][::-1])
        else:
            self.pool.release(blocks[::-1])

    def free_twice(self) -> None:
        held = {block for blocks in self.held.values() for block in blocks}
        free = [block for block in range(self.CAPACITY) if block not in held]
        if free:
            refused(self.pool.release, [self.draw.choice(free)])
        if held:
            block = self.draw.choice(sorted(held))
            refused(self.pool.release, [block, block])


class Device:
    """`DevicePool`: steps, rejected drafts, rewritten rows, steps given up, departures."""

    TOKENS, TOPK = 96, 8

    def __init__(self, seed: int, policy: str) -> None:
        self.draw = np.random.default_rng(seed)
        self.full = self.draw.integers(0, 2**32, (self.TOKENS, 2), np.uint32)
        self.pool = DevicePool(
            {5: [self.full]}, capacity=self.TOPK if policy == "previous" else 24, topk=self.TOPK,
            max_tokens=self.TOKENS, policy=policy,
        )  # fmt: skip
        self.request = 0
        self.pool.admit(self.request)
        self.out = np.zeros((self.TOPK, 2), np.uint32)

    def operate(self) -> None:
        what, draw, pool = self.draw.random(), self.draw, self.pool
        if what < 0.08:
            first = int(draw.integers(self.TOKENS))
            before = pool.used
            assert pool.invalidate(self.request, first) == before - pool.used
            self.full[first:] = draw.integers(0, 2**32, (self.TOKENS - first, 2), np.uint32)
        elif what < 0.12:
            # In mid-copy: served, not installed; the moves of the one who left do nothing.
            selection = self.plan()
            pool.serve(selection, 5, [self.out])
            late = pool.plan_install(selection, 5, [self.out])
            pool.evict(self.request)
            refused(pool.evict, self.request)
            self.request += 1
            pool.admit(self.request)
            late.run()
            assert late.skipped
            assert pool.used == 0
            self.full[...] = draw.integers(0, 2**32, self.full.shape, np.uint32)
        elif what < 0.2:
            selection = self.plan()
            if what < 0.16:
                pool.serve(selection, 5, [self.out])
                if what < 0.14:
                    pool.install(selection, 5, [self.out])
            pool.abandon(selection)
        else:
            selection = self.plan()
            if what < 0.6:
                pool.serve(selection, 5, [self.out])
            else:
                halves = [pool.plan_hits, pool.plan_misses]
                for half in halves if what < 0.8 else halves[::-1]:
                    half(selection, 5, [self.out]).run()
            ids = selection.ids
            assert (self.out[: len(ids)][ids >= 0] == self.full[ids[ids >= 0]]).all()
            pool.install(selection, 5, [self.out])
        assert pool.used + pool.free == pool.capacity
        if what < 0.02:
            held = pool.held()
            assert len(set(held.values())) == len(held) == pool.used

    def plan(self) -> Any:
        ids = self.draw.permutation(self.TOKENS)[: self.draw.integers(self.TOPK + 1)]
        if self.draw.random() < 0.6:
            ids = ids % 20
            ids = np.unique(ids)
        if len(ids) and self.draw.random() < 0.1:
            ids[0] = -1
        return self.pool.plan(self.request, ids)


class Selections:
    """`SelectionCache`: gathers, re-ordered batches, newcomers, rejected drafts."""

    BATCH, STEPS, TOPK, PAGE, COLUMNS, SIZE = 3, 2, 6, 4, 6, 2

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.block = int(self.draw.integers(1, 3))
        self.full = self.bytes(self.BATCH * self.COLUMNS, self.PAGE)
        self.cache = SelectionCache(
            self.full, batch=self.BATCH, steps=self.STEPS, topk=self.TOPK, block=self.block,
            page=self.PAGE,
        )  # fmt: skip
        self.number = 0
        self.tables: dict[int, NDArray[np.int32]] = {}
        self.lengths: dict[int, int] = {}
        self.blocks = list(range(self.BATCH * self.COLUMNS))

    def bytes(self, *shape: int) -> NDArray[np.int32]:
        return self.draw.integers(0, 2**31, (*shape, self.SIZE)).astype(np.int32)

    def operate(self) -> None:
        what, draw, cache = self.draw.random(), self.draw, self.cache
        running = list(self.tables)
        if not running or (what < 0.1 and len(running) < self.BATCH):
            self.number += 1
            cache.admit(self.number)
            taken, self.blocks = self.blocks[: self.COLUMNS], self.blocks[self.COLUMNS :]
            self.tables[self.number] = np.array(taken, np.int32)
            self.lengths[self.number] = 4
        elif what < 0.2:
            request = running[draw.integers(len(running))]
            if draw.random() < 0.5:
                cache.evict(request)
                refused(cache.evict, request)
                # (its blocks go to the next newcomer, with other bytes in them)
                self.blocks += self.tables.pop(request).tolist()
                del self.lengths[request]
            else:
                first = int(draw.integers(self.lengths[request]))
                cache.invalidate(request, first)
                if draw.random() < 0.5:
                    self.lengths[request] = max(first, 1)
                for token in range(first, self.lengths[request]):
                    row = self.tables[request][token // self.PAGE], token % self.PAGE
                    self.full[row] = self.bytes()
        elif what < 0.3:
            cache.permute(draw.permutation(self.BATCH).tolist())
        else:
            self.step()
        used = sum(request is not None for request in cache.requests)
        assert used + cache.requests.count(None) == self.BATCH
        assert used == len(self.tables)

    def step(self) -> None:
        draw, cache, block = self.draw, self.cache, self.block
        limit = self.COLUMNS * self.PAGE
        topk = np.full((self.BATCH, self.STEPS, 1, self.TOPK), -1, np.int32)
        lengths, queries = np.zeros((2, self.BATCH), np.int32)
        tables = np.zeros((self.BATCH, self.COLUMNS), np.int32)
        for place, request in enumerate(cache.requests):
            if not isinstance(request, int):
                continue
            before = self.lengths[request]
            queries[place] = new = min(self.STEPS, limit - before)
            if new == 0:
                self.lengths[request] = before = limit // 2
                cache.invalidate(request, before)
                queries[place] = new = self.STEPS
            lengths[place] = self.lengths[request] = before + new
            tables[place] = self.tables[request]
            # The step's tokens get new bytes; those before them stay.
            for token in range(before, before + new):
                row = self.tables[request][token // self.PAGE], token % self.PAGE
                self.full[row] = self.bytes()
            for query in range(new):
                visible = -(-(before + query + 1) // block)
                ids = draw.permutation(visible)[: self.TOPK]
                topk[place, query, 0, : len(ids)] = ids
        cache.gather(topk, tables, lengths, queries)
        kv = cache.kv
        for request, table in self.tables.items():
            for found in cache.selected(request):
                for id, (page, row) in found.items():
                    token = id * block
                    assert (
                        kv[page, row] == self.full[table[token // self.PAGE], token % self.PAGE]
                    ).all()


class Manager:
    """`OffloadManager`: stores and loads under way, failed ones, evictions."""

    CAPACITY, KEYS = 24, 60

    def __init__(self, seed: int, policy: str) -> None:
        self.draw, self.manager = Random(seed), OffloadManager(self.CAPACITY, policy)
        self.rows: list[Any] = [None] * self.CAPACITY
        self.block: dict[int, int] = {}  # stored or being stored
        self.storing: list[int] = []
        self.loading: list[tuple[list[int], list[int]]] = []

    def operate(self) -> None:
        what, draw, manager = self.draw.random(), self.draw, self.manager
        first = draw.randrange(self.KEYS)
        keys = [key % self.KEYS for key in range(first, first + draw.randrange(1, 6))]
        if what < 0.35:
            plan = manager.prepare_store(keys)
            if plan is not None:
                for key in plan.evicted:
                    assert key not in self.storing
                    assert all(key not in under_way for under_way, _ in self.loading)
                    del self.block[key]
                for key, block in zip(plan.keys, plan.blocks, strict=True):
                    assert block not in self.block.values(), "a block given to two keys"
                    self.block[key] = block
                    self.storing.append(key)
        elif what < 0.6 and self.storing:
            draw.shuffle(self.storing)
            done = [self.storing.pop() for _ in range(draw.randrange(1, len(self.storing) + 1))]
            success = draw.random() < 0.8  # else aborted in mid-copy
            if success:
                for key in done:
                    self.rows[self.block[key]] = key
            manager.complete_store(done, success=success)
            for key in [] if success else done:
                del self.block[key]
            refused(manager.complete_store, done)
        elif what < 0.75:
            known = [key for key in keys if key in self.block and key not in self.storing]
            assert manager.lookup(known) == len(known)
            blocks = manager.prepare_load(known)
            assert [self.rows[block] for block in blocks] == known
            self.loading.append((known, blocks))
        elif what < 0.9 and self.loading:
            known, blocks = self.loading.pop(draw.randrange(len(self.loading)))
            # Nobody took the blocks meanwhile.
            assert [self.rows[block] for block in blocks] == known
            manager.complete_load(known)
        else:
            manager.touch(keys)
            missing = next((key for key in keys if key not in self.block), None)
            if missing is not None:
                refused(manager.prepare_load, [missing])
                refused(manager.complete_load, [missing])
        assert manager.used + manager.free == self.CAPACITY
        assert manager.used == len(self.block)


def soaks(seed: int) -> list[tuple[str, float, Soak]]:
    """Name, share of the operations, and the thing."""
    return [
        ("BlockPool", 0.3, Blocks(seed)),
        *((f"DevicePool {p}", 0.075, Device(seed + i, p)) for i, p in enumerate(POLICIES)),
        ("SelectionCache", 0.1, Selections(seed)),
        *((f"OffloadManager {p}", 0.15, Manager(seed, p)) for p in ("lru", "arc")),
    ]


def soak(operations: int, seed: int) -> list[tuple[str, int, float]]:
    """(name, operations, seconds) of each; AssertionError at the first thing that is wrong."""
    told = []
    for name, share, thing in soaks(seed):
        begin, count = time.perf_counter(), round(operations * share)
        for _ in range(count):
            thing.operate()
        told.append((name, count, time.perf_counter() - begin))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    told = soak(options.operations, options.seed)
    for name, count, seconds in told:
        print(f"{name:22} {count:8} operations {seconds:7.1f} s")
    total = sum(count for _, count, _ in told)
    print(f"{total} operations, nothing wrong, {sum(s for _, _, s in told):.0f} s")


if __name__ == "__main__":
    main()
