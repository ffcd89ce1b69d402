# SPDX-License-Identifier: Apache-2.0
"""Requests decoded with the engine, and beside it without any offload at all.

The plain side is an array [tokens, row bytes] a request, layer and lane: a step writes its rows
there and reads what it attends to with an index.  It knows nothing of blocks, pools or streams.
Every write of a position has bytes of its own, so that a stale row is seen.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvcore
from kvcore.offload import AttentionInput, BlockPool, DecodeEngine, StepResult

GROUPS = ((0,), (2, 6), (9,))  # layer 9 has no rows
LAYERS = (0, 2, 6)
LANES = (24, 10)
BLOCK, MAX_TOKENS, TOPK, BATCH, DRAFTS = 4, 64, 6, 4, 3


class World:
    """An engine, its host blocks, and the same requests without offload."""

    def __init__(self, device: Any, seed: int, *, num_blocks: int = 40, **options: Any) -> None:
        self.device, self.draw = device, np.random.default_rng(seed)
        self.full = {
            layer: [device.empty_swapped((num_blocks, BLOCK, size), "uint8") for size in LANES]
            for layer in LAYERS
        }
        self.blocks = BlockPool(num_blocks)
        self.tables: dict[Hashable, NDArray[np.int32]] = {}
        self.plain: dict[Hashable, dict[int, list[NDArray[np.uint8]]]] = {}
        self.seen: list[tuple[int, Hashable, NDArray[np.int64], Any]] = []
        self.compared = self.copies = 0
        self.engine = DecodeEngine(
            device, self.full,
            **{
                "groups": GROUPS, "max_batch": BATCH, "max_tokens": MAX_TOKENS, "topk": TOPK,
                "select": self.select, "rows": self.rows, "attend": self.attend,
                "max_drafts": DRAFTS, "capacity": 16, **options,
            },
        )  # fmt: skip

    # -- what the engine calls

    def select(self, request: Hashable, group: int, tokens: int) -> NDArray[Any]:
        assert group != 2, "the group without rows has nothing to choose"
        # As an indexer does: the newest often, some of the last step's again, anything.
        high = min(tokens, TOPK)
        ids = self.draw.choice(tokens, high, replace=False)
        if self.draw.random() < 0.5:
            newest = np.arange(max(0, tokens - 3), tokens)
            old = np.setdiff1d(np.arange(0, tokens, 5), newest)[: TOPK - len(newest)]
            ids = np.concatenate([old, newest])
        if self.draw.random() < 0.2:
            ids[self.draw.integers(len(ids))] = -1
        if self.draw.random() < 0.2 and len(ids) >= 4:
            return ids[:4].reshape(2, 2).astype(np.int32)
        return ids

    def rows(self, request: Hashable, layer: int, first: int, count: int) -> Any:
        return [lane[first : first + count].copy() for lane in self.plain[request][layer]]

    def attend(self, given: AttentionInput) -> None:
        for request in given.requests:
            ids = given.ids(request)
            index = given.index(request)
            assert index is None or (index < len(ids)).all()
            rows = [lane.copy() for lane in given.rows(request)]
            self.seen.append((given.layer, request, ids.copy(), rows))

    # -- requests

    def bytes(self, *shape: int) -> NDArray[np.uint8]:
        return self.draw.integers(0, 256, shape, np.uint8)

    def keys(self, request: Hashable, tokens: int) -> list[tuple[Hashable, ...]]:
        """Names of the whole blocks of a request's first tokens: their very bytes."""
        plain = self.plain[request]
        return [
            tuple(
                lane[: (column + 1) * BLOCK].tobytes() for lanes in plain.values() for lane in lanes
            )
            for column in range(tokens // BLOCK)
        ]

    def start(self, request: Hashable, tokens: int) -> bool:
        """Prefill: the host gets the rows of what is not found in its blocks; False: no room."""
        if request not in self.plain:
            self.plain[request] = {
                layer: [self.bytes(MAX_TOKENS, size) for size in LANES] for layer in LAYERS
            }
        hits = self.blocks.match(self.keys(request, tokens))
        self.blocks.acquire(hits)
        fresh = self.blocks.allocate(-(-tokens // BLOCK) - len(hits))
        if fresh is None:
            self.blocks.release(hits[::-1])
            return False
        table = np.full(MAX_TOKENS // BLOCK, -1, np.int32)
        table[: len(hits) + len(fresh)] = hits + fresh
        self.tables[request] = table
        for layer, lanes in self.full.items():
            for lane, plain in zip(lanes, self.plain[request][layer], strict=True):
                for column in range(len(hits), len(hits) + len(fresh)):
                    rows = plain[column * BLOCK : min((column + 1) * BLOCK, tokens)]
                    with lane[int(table[column]), : len(rows)].host("w") as array:
                        array[...] = rows
        self.engine.admit(request, table, tokens)
        return True

    def grow(self, request: Hashable, tokens: int) -> None:
        """Blocks of its own for the next ``tokens``, as far as there are any."""
        table, context = self.tables[request], self.engine.context(request)
        end = min(context + tokens, MAX_TOKENS)
        for column in range(context // BLOCK, -(-end // BLOCK)):
            shared = int(table[column])
            if shared >= 0 and self.blocks.prepare_write(shared, max(0, context - column * BLOCK)):
                continue
            found = self.blocks.allocate()
            if found is None:
                if shared >= 0:
                    # Not its own: it must not be written.
                    self.blocks.release([shared])
                    table[column] = -1
                return
            if shared >= 0:
                self.copy_block(request, shared, found[0])
                self.blocks.release([shared])
            table[column] = found[0]

    def copy_block(self, request: Hashable, source: int, target: int) -> None:
        """On the host, where the rows must have come first."""
        self.engine.flush_blocking(request)
        for lanes in self.full.values():
            for lane in lanes:
                with lane[source].host("r") as old, lane[target].host("w") as new:
                    new[...] = old
        self.copies += 1

    def share(self, request: Hashable) -> None:
        """Let others find the whole blocks that the host has."""
        table = self.tables[request]
        for i, key in enumerate(self.keys(request, self.engine.on_host(request))):
            self.blocks.register(int(table[i]), key, BLOCK)

    def release(self, request: Hashable, on_host: int, *, keep: bool = True) -> None:
        """Give the blocks back, those that are whole on the host findable."""
        table = self.tables.pop(request)
        held = [int(block) for block in table if block >= 0]
        if keep:
            for block, key in zip(held, self.keys(request, on_host), strict=False):
                self.blocks.register(block, key, BLOCK)
        self.blocks.release(held[::-1])

    def check_host(self, request: Hashable, tokens: int) -> None:
        """The full cache has the request's first tokens, byte for byte."""
        table = self.tables[request]
        for layer, lanes in self.full.items():
            for lane, plain in zip(lanes, self.plain[request][layer], strict=True):
                for column in range(-(-tokens // BLOCK)):
                    rows = plain[column * BLOCK : min((column + 1) * BLOCK, tokens)]
                    with lane[int(table[column]), : len(rows)].host("r") as found:
                        assert (found == rows).all(), (request, layer, column)

    # -- steps

    def launch(self, requests: list[Hashable], drafts: dict[Hashable, int]) -> Any:
        """Launch a step; new bytes for what it writes, on the plain side too."""
        for request in requests:
            self.grow(request, 1 + drafts[request])
            context = self.engine.context(request)
            for lanes in self.plain[request].values():
                for lane in lanes:
                    new = lane[context : context + 1 + drafts[request]]
                    new[...] = self.bytes(*new.shape)
        return self.engine.launch(requests, drafts)

    def compare(self, result: StepResult) -> None:
        """What every layer attended to is what it would have without offload."""
        stepped = [r for r, part in result.requests.items() if part.outcome == "stepped"]
        assert sorted((layer, str(r)) for layer, r, _, _ in self.seen) == sorted(
            (layer, str(r)) for layer in LAYERS for r in stepped
        )
        for layer, request, ids, rows in self.seen:
            used = ids >= 0
            for lane, plain in zip(rows, self.plain[request][layer], strict=True):
                assert (lane[used] == plain[ids[used]]).all(), (layer, request)
            self.compared += int(used.sum())
        self.seen.clear()

    def check_books(self) -> None:
        assert self.blocks.used + self.blocks.free == self.blocks.capacity
        held = [int(b) for table in self.tables.values() for b in table if b >= 0]
        assert len(set(held)) <= self.blocks.used
        for request in self.engine.requests:
            assert 0 <= self.engine.on_host(request) <= self.engine.context(request)
            for group in (0, 1):
                pool = self.engine.pool(request, group)
                assert pool.used + pool.free == pool.capacity
                held_tokens = pool.held()
                assert all(token < self.engine.context(request) for token in held_tokens)


def device(clock: str, seed: int | None = None) -> Any:
    return kvcore.Device(
        "A3" if clock == "model" else None, clock=clock, race_check="raise", seed=seed
    )
