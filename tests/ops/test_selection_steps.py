# SPDX-License-Identifier: Apache-2.0
"""A serving loop on one selection, many steps long, and what must hold after each of them.

Requests grow by drafts, of which some are rejected and rewritten; they shrink, are replaced, sit
out steps, have tokens rewritten further back, and change places in the batch.  The books are kept
with the package's own helpers: slots, permute_rows, invalidate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import kvcore
from oracle_numbers import Array

GUARD = 0xABCD
SEEDS = st.integers(0, 2**32 - 1)


class Loop(RuleBasedStateMachine):
    """kv: tokens of each request that count.  What lies past them in the full cache is stale."""

    @initialize(
        batch=st.integers(1, 3),
        steps=st.integers(1, 3),
        topk=st.sampled_from([1, 2, 5, 8, 33, 40]),
        block=st.sampled_from([1, 1, 2, 4]),
        pages=st.integers(1, 3),
        rope=st.booleans(),
        tnd=st.booleans(),
        index=st.sampled_from([np.int32, np.int64]),
        threads=st.sampled_from([1, 2]),
        seed=SEEDS,
    )
    def begin(
        self,
        batch: int,
        steps: int,
        topk: int,
        block: int,
        pages: int,
        rope: bool,
        tnd: bool,
        index: Any,
        threads: int,
        seed: int,
    ) -> None:
        self.batch, self.steps, self.topk, self.block, self.index = batch, steps, topk, block, index
        self.threads = threads
        self.rng = rng = np.random.default_rng(seed)
        self.rows = batch * steps
        self.page = page = pages * block
        self.full_page = full_page = 2 * block
        columns, self.full_columns = -(-topk // pages), 12 if topk < 10 else 40
        self.most = self.full_columns * full_page
        spare = 3
        blocks = rng.permutation(self.rows * columns + spare)
        self.table = blocks[:-spare].reshape(self.rows, columns).astype(index)
        self.full_table = rng.permutation(batch * self.full_columns)
        self.full_table = self.full_table.reshape(batch, self.full_columns).astype(index)
        sizes = {"kv_cache": 3, "k_rope": 2} if rope else {"kv_cache": 5}
        self.here = {n: np.full((len(blocks), page, k), GUARD, np.uint16) for n, k in sizes.items()}
        self.full = {
            n: rng.integers(0, 2**16, (batch * self.full_columns, full_page, k), np.uint16)
            for n, k in sizes.items()
        }
        outer = (self.rows,) if tnd else (batch, steps)
        self.status = np.full((*outer, 1, topk + 1), -1, index)
        self.status[..., topk] = 0
        self.ids = np.full((*outer, 1, topk), -1, index)
        self.kv = np.array([int(rng.integers(0, self.most // 2)) for _ in range(batch)], index)
        self.q = np.zeros(batch, index)
        self.stats: dict[str, Array] = {}
        self.plan = kvcore.plan_gather_selection_kv_cache(
            *self.arguments(), selection_topk_block_size=block, stats=self.stats,
            num_threads=threads,
        )  # fmt: skip

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.here.get("k_rope"), self.here["kv_cache"], self.table, self.status, self.ids,
            self.full.get("k_rope"), self.full["kv_cache"], self.full_table, self.kv, self.q,
        )  # fmt: skip

    # ------------------------------------------------------------ what a server does

    def write(self, slots: Array) -> None:
        """New bytes into those slots of the full cache; negative ones are padding."""
        flat = slots.reshape(-1)
        caches = [c.reshape(*c.shape[:2], 1, c.shape[2]) for c in self.full.values()]
        tokens = [
            self.rng.integers(0, 2**16, (len(flat), 1, c.shape[3]), np.uint16) for c in caches
        ]
        for cache, token in zip(caches, tokens, strict=True):
            kvcore.scatter_pa_kv_cache(token, cache, flat)

    def draft(self) -> None:
        """Each request grows by q new tokens, as many as fit."""
        self.q[...] = np.minimum(
            self.rng.integers(0, self.steps + 1, self.batch), self.most - self.kv
        )
        self.kv += self.q
        self.write(
            kvcore.slots.speculative(self.full_table, self.kv, self.q, self.full_page, self.steps)
        )

    def choose(self, kind: str) -> None:
        """Top-k ids of every row."""
        flat = self.ids.reshape(self.rows, self.topk)
        before = self.status.reshape(self.rows, self.topk + 1)
        for r in range(self.rows):
            last = max(int(self.kv[r // self.steps]) - 1, 0) // self.block
            pick = self.rng.permutation(last + 1)[: self.topk]
            if kind == "newest":
                pick = np.arange(last, max(last - self.topk, -1), -1)
            elif kind == "same":
                pick = self.rng.permutation(before[r, : self.topk])
            elif kind == "mostly":
                kept = self.rng.permutation(before[r, : self.topk])[: -(-self.topk * 2 // 3)]
                pick = np.concatenate([kept, pick])[: self.topk]
            elif kind == "odd":
                pick = self.rng.integers(-3, last + 4, self.topk)
            flat[r] = -1
            flat[r, : len(pick)] = pick
            if kind == "few":
                flat[r, int(self.rng.integers(0, self.topk + 1)) :] = -1

    @rule(
        kind=st.sampled_from(["any", "newest", "same", "mostly", "mostly", "odd", "few"]),
        planned=st.booleans(),
    )
    def step(self, kind: str, planned: bool) -> None:
        self.draft()
        self.choose(kind)
        self.gather(planned)
        # some of the drafts are rejected; the next ones take their places
        self.kv -= self.rng.integers(0, self.q + 1, dtype=self.index)

    @rule(planned=st.booleans())
    def held_and_final(self, planned: bool) -> None:
        """The same ids once more, no new tokens, every full copy poisoned: nothing is read."""
        self.q[...] = 0
        self.choose("same")
        self.gather(planned)
        if (self.kv % self.block).any():
            self.choose("few")  # a partial block is read whenever it is wanted
            flat = self.ids.reshape(self.rows, self.topk)
            whole = np.repeat(self.kv // self.block, self.steps)[:, None]
            flat[flat >= whole] = -1
            self.gather(planned)
        kept = {n: c.copy() for n, c in self.full.items()}
        for cache in self.full.values():
            cache[...] = 0xDEAD
        before = {n: c.copy() for n, c in self.here.items()}
        flat = self.ids.reshape(self.rows, self.topk)
        flat[...] = self.rng.permuted(flat, axis=1)
        self.run(planned)
        assert self.stats["bytes_read"].sum() == 0
        if not (self.block > 1 or self.topk <= 32):
            for name, was in before.items():
                np.testing.assert_array_equal(self.here[name], was)
        for name, cache in kept.items():
            self.full[name][...] = cache
        self.check_rows()

    @rule(seed=SEEDS)
    def sit_out(self, seed: int) -> None:
        """A step without a gather: what it wrote may be held from rejected drafts."""
        before = self.kv.copy()
        self.draft()
        for b in range(self.batch):
            self.forget(b, int(before[b]))

    @rule(b=st.integers(0, 2), part=st.floats(0, 1))
    def rewrite(self, b: int, part: float) -> None:
        b %= self.batch
        if self.kv[b]:
            first = int(part * (int(self.kv[b]) - 1))
            lengths = np.zeros(self.batch, self.index)
            starts = np.zeros(self.batch, self.index)
            starts[b], lengths[b] = first, min(3, int(self.kv[b]) - first)
            self.write(kvcore.slots.prefill(self.full_table, starts, lengths, self.full_page))
            self.forget(b, first)

    @rule(b=st.integers(0, 2), part=st.floats(0, 1))
    def replace(self, b: int, part: float) -> None:
        """Another request takes the place."""
        b %= self.batch
        self.kv[b] = int(part * self.most)
        lengths = np.where(np.arange(self.batch) == b, self.kv, 0).astype(self.index)
        self.write(
            kvcore.slots.prefill(self.full_table, np.zeros_like(lengths), lengths, self.full_page)
        )
        self.forget(b, 0)

    @rule(b=st.integers(0, 2), part=st.floats(0, 1))
    def shrink(self, b: int, part: float) -> None:
        b %= self.batch
        self.kv[b] = int(part * int(self.kv[b]))

    def forget(self, b: int, position: int) -> None:
        rows = np.arange(b * self.steps, (b + 1) * self.steps)
        kvcore.invalidate(self.status, rows, position, selection_topk_block_size=self.block)

    @precondition(lambda self: self.batch > 1)
    @rule(seed=SEEDS, by_row=st.booleans())
    def permute(self, seed: int, by_row: bool) -> None:
        order = np.random.default_rng(seed).permutation(self.batch)
        wide = (order[:, None] * self.steps + np.arange(self.steps)).reshape(-1)
        kvcore.permute_rows(wide if by_row else order, self.table, self.status)
        for array in (self.full_table, self.kv, self.q):
            array[...] = array[order]

    # ------------------------------------------------------------ what must hold

    def run(self, planned: bool) -> Array:
        if planned:
            returned: Array = self.plan.run()
            return returned
        self.stats.clear()
        once: Array = kvcore.gather_selection_kv_cache(
            *self.arguments(), selection_topk_block_size=self.block, stats=self.stats,
            num_threads=self.threads,
        )  # fmt: skip
        return once

    def gather(self, planned: bool) -> None:
        inputs = [self.table, self.full_table, self.ids, self.kv, self.q, *self.full.values()]
        before = [a.copy() for a in inputs]
        here = {n: c.copy() for n, c in self.here.items()}
        returned = self.run(planned)
        for array, was in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(array, was)
        lengths = self.check_rows()
        assert returned.dtype == np.int32
        assert returned.tolist() == lengths
        s = self.stats
        assert (s["reused"] + s["moved"] + s["refreshed"] + s["read"]).tolist() == lengths
        token = sum(2 * c.shape[2] for c in self.full.values())
        assert (s["bytes_read"] == (s["read"] + s["refreshed"]) * token).all()
        assert (s["bytes_moved"] == s["moved"] * token).all()
        if planned:
            reads = {x.argument: x.nbytes for x in self.plan.touched()[0]}
            full = sum(n for name, n in reads.items() if name in ("full_kv_cache", "full_k_rope"))
            # rows of one request may read the same tokens
            assert full <= s["bytes_read"].sum()
            if self.steps == 1:
                assert full == s["bytes_read"].sum()
        # no block is written but those that hold the rows' tokens
        used = np.zeros(len(here["kv_cache"]), bool)
        for r, length in enumerate(lengths):
            used[self.table[r, : -(-length // self.page)]] = True
        for name, was in here.items():
            np.testing.assert_array_equal(self.here[name][~used], was[~used])

    def check_rows(self) -> list[int]:
        """Each row holds what it wanted, with the full cache's bytes; returns the lengths."""
        ids = self.ids.reshape(self.rows, self.topk)
        status = self.status.reshape(self.rows, self.topk + 1)
        lengths = []
        for r in range(self.rows):
            b, s = divmod(r, self.steps)
            kv, q = int(self.kv[b]), int(self.q[b])
            seen = max(kv - (q - 1 - s) if s < q else kv, 0)
            last = (seen - 1) // self.block
            wanted = {int(i) for i in ids[r] if 0 <= i <= last}
            n = len(wanted)
            assert set(status[r, :n].tolist()) == wanted
            assert (status[r, n : self.topk] == -1).all()
            lengths.append(int(status[r, self.topk]))
            tokens = [
                (place * self.block + t, int(status[r, place]) * self.block + t)
                for place in range(n)
                for t in range(self.block)
                if int(status[r, place]) * self.block + t < seen
            ]
            assert len(tokens) == lengths[r]
            if self.block > 1 or self.topk <= 32:
                assert [here for here, _ in tokens] == list(range(lengths[r]))
            if tokens:
                here, there = np.array(tokens).T
                for name, cache in self.full.items():
                    np.testing.assert_array_equal(
                        self.here[name][self.table[r, here // self.page], here % self.page],
                        cache[self.full_table[b, there // self.full_page], there % self.full_page],
                    )
        return lengths


TestLoop = Loop.TestCase
TestLoop.settings = settings(
    max_examples=settings.default.max_examples * 2 // 3, stateful_step_count=50
)
