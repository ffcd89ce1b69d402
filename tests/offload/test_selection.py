# SPDX-License-Identifier: Apache-2.0
"""Selections over many steps: drafts rejected, places exchanged, requests coming and going."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvcore
from kvcore.errors import DeviceOutOfMemoryError, KVCoreError, ParamInvalidError
from kvcore.offload.rows.selection import SelectionCache

BATCH, STEPS, TOPK, FULL_BLOCK, COLUMNS = 4, 3, 6, 4, 6
LONGEST = FULL_BLOCK * COLUMNS


class World:
    """Requests that grow, with their rows in a paged full cache; and the selection of a layer."""

    def __init__(self, seed: int, block: int, rope: bool = True) -> None:
        self.draw = np.random.default_rng(seed)
        blocks = (BATCH + 2) * COLUMNS
        self.full = self.draw.integers(0, 2**15, (blocks, FULL_BLOCK, 5), np.int16)
        self.rope = self.draw.integers(0, 2**15, (blocks, FULL_BLOCK, 2), np.int16)
        self.cache = SelectionCache(
            self.full,
            self.rope if rope else None,
            batch=BATCH,
            steps=STEPS,
            topk=TOPK,
            block=block,
            page=4,
        )
        self.block = block
        self.kept: dict[str, int] = {}  # tokens that are settled
        self.tables: dict[str, NDArray[np.int32]] = {}
        self.free_blocks = [int(b) for b in self.draw.permutation(blocks)]
        self.names = 0

    def admit(self) -> None:
        name = f"request {self.names}"
        self.names += 1
        self.cache.admit(name)
        self.kept[name] = int(self.draw.integers(0, LONGEST // 2))
        self.tables[name] = np.array([self.free_blocks.pop() for _ in range(COLUMNS)], np.int32)

    def evict(self, name: str) -> None:
        self.cache.evict(name)
        self.free_blocks += self.tables.pop(name).tolist()
        del self.kept[name]

    def write(self, name: str, position: int) -> None:
        block, row = self.tables[name][position // FULL_BLOCK], position % FULL_BLOCK
        self.full[block, row] = self.draw.integers(0, 2**15, 5)
        self.rope[block, row] = self.draw.integers(0, 2**15, 2)

    def step(self) -> dict[str, Any]:
        draw, cache = self.draw, self.cache
        kv, q = np.zeros((2, BATCH), np.int32)
        table = np.zeros((BATCH, COLUMNS), np.int32)
        topk = np.full((BATCH, STEPS, 1, TOPK), -1, np.int32)
        for place, name in enumerate(cache.requests):
            if name is None:
                continue
            assert isinstance(name, str)
            q[place] = draw.integers(1, STEPS + 1)
            kv[place] = min(self.kept[name] + q[place], LONGEST)
            q[place] = min(q[place], kv[place] - self.kept[name])
            for position in range(self.kept[name], kv[place]):
                self.write(name, position)
            table[place] = self.tables[name]
            ids = -(-kv[place] // self.block)
            for row in topk[place, :, 0]:
                chosen = draw.permutation(ids)[:TOPK]
                row[: len(chosen)] = chosen
        stats: dict[str, Any] = {}
        lengths = cache.gather(topk, table, kv, q, stats=stats)
        self.check(topk, kv, q, lengths)
        for place, name in enumerate(cache.requests):
            if isinstance(name, str):
                # Some drafts are rejected; what comes there next is another token.
                accepted = int(draw.integers(0, q[place] + 1))
                self.kept[name] = min(self.kept[name] + accepted, LONGEST - 1)
                cache.invalidate(name, self.kept[name])
        return stats

    def check(self, topk: Any, kv: Any, q: Any, lengths: Any) -> None:
        block, cache = self.block, self.cache
        for place, name in enumerate(cache.requests):
            for step in range(STEPS):
                length = 0 if name is None else int(kv[place])
                if step < q[place]:
                    length -= int(q[place]) - 1 - step
                last = -(-length // block) - 1
                wanted = {int(i) for i in topk[place, step, 0] if 0 <= i <= last}
                tokens = sum(min(block, length - i * block) for i in wanted)
                assert lengths[place * STEPS + step] == tokens
                if not isinstance(name, str):
                    continue
                found = self.rows_of(place, step)
                assert set(found) == wanted
                for i, (at, row) in found.items():
                    for t in range(min(block, length - i * block)):
                        position = i * block + t
                        here = self.tables[name][position // FULL_BLOCK], position % FULL_BLOCK
                        assert (cache.kv[at, row + t] == self.full[here]).all()
                        if cache.rope is not None:
                            assert (cache.rope[at, row + t] == self.rope[here]).all()

    def rows_of(self, place: int, step: int) -> dict[int, tuple[int, int]]:
        """By id, where it lies: from status and table alone, a partial last block too."""
        status = self.cache.status[place, step, 0]
        table = self.cache.table[place * STEPS + step]
        count = -(-int(status[-1]) // self.block)
        return {
            int(status[p]): (int(table[p * self.block // 4]), p * self.block % 4)
            for p in range(count)
        }


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("block", [1, 2])
def test_soak(block: int, rope: bool) -> None:
    """Every row of every step holds the full cache's bytes, whatever happened in between."""
    world = World(seed=block, block=block, rope=rope)
    reused = 0
    for _ in range(150):
        names = [name for name in world.cache.requests if isinstance(name, str)]
        what = world.draw.random()
        if len(names) < BATCH and what < 0.3:
            world.admit()
        elif names and what < 0.4:
            world.evict(names[int(world.draw.integers(len(names)))])
        elif what < 0.6:
            before = world.cache.requests
            order = world.draw.permutation(BATCH)
            world.cache.permute(order.tolist())
            assert world.cache.requests == tuple(before[i] for i in order)
        elif names and what < 0.75:
            # Tokens that were settled are written again, outside of any step.
            name = names[int(world.draw.integers(len(names)))]
            first = int(world.draw.integers(LONGEST))
            for position in range(first, LONGEST):
                world.write(name, position)
            world.cache.invalidate(name, first)
        stats = world.step()
        reused += int(stats["reused"].sum())
    assert reused > 100, "nothing was kept: the test shows nothing"


def test_a_newcomer_finds_nothing() -> None:
    world = World(seed=7, block=1)
    world.admit()
    world.step()
    (name, *_) = world.cache.requests
    assert isinstance(name, str)
    world.kept[name] = 10
    world.step()
    assert any(world.cache.selected(name))
    world.evict(name)
    assert (world.cache.status[..., :-1] == -1).all()
    world.cache.admit("other", 0)
    assert world.cache.selected("other") == [{}] * STEPS


def test_invalidate_forgets_blocks_that_reach_there() -> None:
    world = World(seed=8, block=2)
    world.cache.admit("a", 2)
    status = world.cache.status[2]
    status[:, 0, :TOPK] = [4, 0, 2, -1, 3, 1]
    status[:, 0, TOPK] = 12
    assert world.cache.invalidate("a", 5) == 3 * STEPS  # blocks of 4-5, 6-7 and 8-9
    assert (status[:, 0, :TOPK] == [-1, 0, -1, -1, -1, 1]).all()
    assert [sorted(row) for row in world.cache.selected("a")] == [[0, 1]] * STEPS
    assert world.cache.invalidate("a", 5) == 0
    assert world.cache.invalidate("a", 0) == 2 * STEPS


async def test_on_a_device() -> None:
    """The same on streams: launched plans, no race when the host waits before it forgets."""
    async with kvcore.Device("A3", clock="model", race_check="raise") as device:
        full = device.empty_swapped((6, 4, 8), "bfloat16")
        with full.host("w") as rows:
            rows.view(np.uint16)[...] = np.arange(6 * 4 * 8).reshape(6, 4, 8)
        cache = SelectionCache(full, batch=2, steps=1, topk=4, page=4, device=device)
        table = np.arange(6, dtype=np.int32).reshape(2, 3)
        index = {
            "topk": device.empty((2, 1, 1, 4), "int32"),
            "table": device.empty((2, 3), "int32"),
            "kv": device.empty((2,), "int32"),
            "q": device.empty((2,), "int32"),
        }
        values: dict[str, Any] = {"table": table, "kv": [12, 0], "q": [1, 0]}
        cache.admit("a")
        compute = device.stream("compute")
        plan = cache.plan(index["topk"], index["table"], index["kv"], index["q"])
        for ids in ([0, 3, 5, 11], [5, 3, 8, 2]):
            for name, value in {**values, "topk": np.array([ids, ids])[:, None, None]}.items():
                with index[name].host("w") as array:
                    array[...] = value
            compute.launch(plan)
            await compute.synchronize()
            (where,) = cache.selected("a")
            assert set(where) == set(ids)
            with cache.kv.host("r") as got, full.host("r") as rows:
                for i, (at, row) in where.items():
                    assert got[at, row].tobytes() == rows[i // 4, i % 4].tobytes()
        cache.invalidate("a", 5)
        assert set(cache.selected("a")[0]) == {3, 2}
        cache.permute([1, 0])
        assert cache.requests == (None, "a")
        cache.close()
        cache.close()
        assert device.memory().used == sum(x.nbytes for x in index.values())


def test_identity_and_bad_calls() -> None:
    world = World(seed=9, block=1)
    cache = world.cache
    cache.admit("a")
    cache.admit("b", 3)
    before = cache.status.copy(), cache.table.copy()
    for call, match in (
        (lambda: cache.admit("a"), r"request: expected one not admitted yet, got 'a'"),
        (lambda: cache.admit(None), r"request: expected an identity"),
        (lambda: cache.admit("c", 3), r"place: expected a free place, got that of 'b'"),
        (lambda: cache.admit("c", 4), r"place: expected an integer from 0 to 3, got 4"),
        (lambda: cache.evict("c"), r"request: expected a request that was admitted, got 'c'"),
        (lambda: cache.evict(None), r"request: expected a request that was admitted"),
        (lambda: cache.invalidate("c", 0), r"request: expected a request that was admitted"),
        (lambda: cache.invalidate("a", -1), r"from_pos: expected"),
        (lambda: cache.permute([0, 1, 2]), r"order: expected each place below 4 once"),
        (lambda: cache.permute([0, 1, 2, 2]), r"order: expected each place below 4 once"),
        (lambda: cache.permute([0, 1, 2, 2**64]), r"order: expected each place below 4 once"),
        (lambda: cache.permute([0, 1, 2, 3.0]), r"order\[3\]: expected a place, got 3.0"),  # type: ignore[list-item]
        (lambda: cache.permute([0, 1, 2, True]), r"order\[3\]: expected a place, got True"),
        (lambda: cache.plan(None, None, None, None), r"expected an array, got None"),
    ):
        with pytest.raises(KVCoreError, match=match):
            call()
    assert (cache.status == before[0]).all()
    assert (cache.table == before[1]).all()
    assert cache.requests == ("a", None, None, "b")
    cache.admit("c")
    cache.admit("d")
    with pytest.raises(ParamInvalidError, match=r"request: expected at most 4 requests"):
        cache.admit("e")


def test_bad_sizes_are_refused() -> None:
    full = np.zeros((4, 4, 8), np.int8)
    good: dict[str, Any] = {"batch": 2, "steps": 1, "topk": 4}
    for array, changes, match in (
        (full[0], {}, r"full_kv_cache: expected \[blocks"),
        (None, {}, r"full_kv_cache: expected an array"),
        (full, {"batch": 0}, r"batch: expected"),
        (full, {"steps": 2**20}, r"steps: expected"),
        (full, {"topk": True}, r"topk: expected"),
        (full, {"block": 3, "page": 64}, r"page: expected a multiple of block \(3\), got 64"),
    ):
        with pytest.raises(KVCoreError, match=match):
            SelectionCache(array, **{**good, **changes})
    profile = kvcore.DeviceProfile.named("A3").replace(capacity=1 / 2**20)
    with kvcore.Device(profile) as device:
        with pytest.raises(DeviceOutOfMemoryError):
            SelectionCache(full, batch=2, steps=1, topk=4, page=64, device=device)
        assert device.memory().used == 0
