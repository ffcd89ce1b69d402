# SPDX-License-Identifier: Apache-2.0
"""What a device pool serves: always the full cache's bytes, and no more rows read than needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvcore
from kvcore.errors import DeviceOutOfMemoryError, KVCoreError, ParamInvalidError, StreamError
from kvcore.offload.rows.device_pool import DevicePool, DevicePoolStatistics, Selection
from kvcore.offload.rows.policy import POLICIES

LAYERS = (3, 7, 40)  # layer ids need not be dense
BLOCK = 4
COLUMNS = 12
NUM_BLOCKS = 2 * COLUMNS
TOPK = 6
MAX_TOKENS = BLOCK * COLUMNS


class World:
    """A full cache whose rows change when they are written again, and a pool in front of it."""

    def __init__(self, policy: str, seed: int, **options: Any) -> None:
        self.draw = np.random.default_rng(seed)
        self.full = {
            layer: (
                self.bytes(NUM_BLOCKS, BLOCK, 10),
                self.bytes(NUM_BLOCKS, BLOCK, 3),
            )
            for layer in LAYERS
        }
        self.table = self.draw.permutation(NUM_BLOCKS)[:COLUMNS].astype(np.int32)
        capacity = TOPK if policy == "previous" else 16
        options = {"ways": 4, **options} if policy == "fifo" else options
        self.pool = DevicePool(
            self.full, capacity=capacity, topk=TOPK, max_tokens=MAX_TOKENS, policy=policy, **options
        )

    def bytes(self, *shape: int) -> NDArray[np.uint8]:
        return self.draw.integers(0, 256, shape, np.uint8)

    def out(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return self.bytes(TOPK, 10), self.bytes(TOPK, 3)

    def ids(self) -> NDArray[np.int64]:
        ids = self.draw.choice(MAX_TOKENS, TOPK, replace=False)
        ids[self.draw.random(TOPK) < 0.1] = -1
        return ids[: self.draw.integers(0, TOPK + 1)]

    def rewrite(self, first: int) -> None:
        """New bytes for all tokens from ``first`` on."""
        for position in range(first, MAX_TOKENS):
            block, row = self.table[position // BLOCK], position % BLOCK
            for lanes in self.full.values():
                for lane in lanes:
                    lane[block, row] = self.bytes(lane.shape[2])

    def check(self, ids: NDArray[np.int64], layer: int, out: Any, before: Any) -> None:
        for lane, rows, old in zip(self.full[layer], out, before, strict=True):
            for i, position in enumerate(ids.tolist()):
                if position < 0:
                    assert (rows[i] == old[i]).all(), "a row nobody asked for was written"
                else:
                    expected = lane[self.table[position // BLOCK], position % BLOCK]
                    assert (rows[i] == expected).all()
            assert (rows[len(ids) :] == old[len(ids) :]).all()

    def step(self, layers: tuple[int, ...] = LAYERS) -> Selection:
        ids = self.ids()
        selection = self.pool.plan("a", ids, self.table)
        outs = {}
        for layer in layers:
            out, before = self.out(), None
            before = tuple(rows.copy() for rows in out)
            self.pool.serve(selection, layer, out)
            self.check(ids, layer, out, before)
            outs[layer] = out
        for layer in layers:
            self.pool.install(selection, layer, outs[layer])
        return selection


@pytest.mark.parametrize("policy", POLICIES)
def test_soak(policy: str) -> None:
    """Steps, rejected drafts, rewritten tokens, abandoned steps, departures: no wrong byte."""
    world = World(policy, seed=11)
    pool = world.pool
    pool.admit("a")
    for _ in range(400):
        what = world.draw.random()
        if what < 0.08:
            first = int(world.draw.integers(MAX_TOKENS))
            pool.invalidate("a", first)
            world.rewrite(first)
        elif what < 0.12:
            pool.evict("a")
            assert pool.used == 0
            world.table = world.draw.permutation(NUM_BLOCKS)[:COLUMNS].astype(np.int32)
            pool.admit("a")
        elif what < 0.2:
            # Given up with some layers served and one of them installed.
            selection = pool.plan("a", world.ids(), world.table)
            out = world.out()
            pool.serve(selection, 7, out)
            if what < 0.16:
                pool.install(selection, 7, out)
            pool.abandon(selection)
        else:
            world.step()
        assert pool.used + pool.free == pool.capacity
        held = pool.held()
        assert len(set(held.values())) == len(held) == pool.used
        # What is held is right in every layer, not only what was asked for.
        for layer in LAYERS if what >= 0.2 else ():
            for lane, state in zip(world.full[layer], pool._layer(layer).lanes, strict=True):
                for position, place in held.items():
                    row = lane[world.table[position // BLOCK], position % BLOCK]
                    assert (state.array[place] == row).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_copied_once_and_misses_alone_read_the_host(policy: str) -> None:
    world = World(policy, seed=2)
    world.pool.admit("a")
    for _ in range(20):
        ids = np.flatnonzero(world.draw.random(MAX_TOKENS) < 0.1)[:TOPK]
        held = world.pool.held()
        selection = world.pool.plan("a", ids, world.table)
        assert selection.hits == sum(i in held for i in ids.tolist())
        out = world.out()
        for layer in LAYERS:
            move = world.pool.plan_serve(selection, layer, out)
            move.run()
            assert move.num_descriptors == 2 * len(ids)
            assert move.bytes_moved == 13 * len(ids)
            by_name = {access.argument: access for access in move.touched()[0]}
            assert by_name["full[0]"].nbytes == 10 * selection.misses
            assert by_name["full[1]"].nbytes == 3 * selection.misses
            assert by_name["pool[0]"].nbytes == 10 * selection.hits
            assert sum(access.nbytes for access in move.touched()[1]) == 13 * len(ids)
            move = world.pool.plan_install(selection, layer, out)
            move.run()
            kept = int((selection.target >= 0).sum())
            assert move.bytes_moved == 13 * kept == sum(a.nbytes for a in move.touched()[1])


def test_steps_may_be_planned_ahead() -> None:
    """The books run ahead of the bytes; each layer still goes in order."""
    world = World("lru", seed=3)
    pool = world.pool
    pool.admit("a")
    wanted = [np.arange(6), np.arange(3, 9), np.arange(6)]
    plans = [pool.plan("a", ids, world.table) for ids in wanted]
    assert [plan.hits for plan in plans] == [0, 3, 6]
    for layer in LAYERS:
        for ids, plan in zip(wanted, plans, strict=True):
            out = world.out()
            before = tuple(rows.copy() for rows in out)
            pool.serve(plan, layer, out)
            world.check(ids, layer, out, before)
            pool.install(plan, layer, out)


def test_order_of_a_layer_is_checked() -> None:
    world = World("lru", seed=4)
    pool, out = world.pool, world.out()
    pool.admit("a")
    first = pool.plan("a", np.arange(4), world.table)
    second = pool.plan("a", np.arange(2, 6), world.table)
    with pytest.raises(StreamError, match=r"expected this selection served first in layer 3"):
        pool.install(first, 3, out)
    with pytest.raises(StreamError, match=r"expected selection 1 installed first in layer 3"):
        pool.serve(second, 3, out)
    pool.serve(first, 3, out)
    with pytest.raises(StreamError, match=r"expected selection 1 installed first"):
        pool.serve(second, 3, out)
    pool.install(first, 3, out)
    with pytest.raises(StreamError, match=r"expected one install in layer 3, got a second"):
        pool.install(first, 3, out)
    with pytest.raises(StreamError, match=r"expected a serve before the install"):
        pool.serve(first, 3, out)
    pool.serve(second, 3, out)
    pool.install(second, 3, out)
    with pytest.raises(ParamInvalidError, match=r"selection: expected the newest selection"):
        pool.abandon(first)
    pool.abandon(second)
    with pytest.raises(ParamInvalidError, match=r"not yet abandoned"):
        pool.abandon(second)


def test_identity() -> None:
    world = World("lru", seed=5)
    pool = world.pool
    with pytest.raises(ParamInvalidError, match=r"request: expected the request being served"):
        pool.plan("a", np.arange(3), world.table)
    with pytest.raises(ParamInvalidError, match=r"request: expected an identity, got None"):
        pool.admit(None)
    pool.admit("a")
    with pytest.raises(ParamInvalidError, match=r"no request before 'a' is evicted, got 'b'"):
        pool.admit("b")
    with pytest.raises(ParamInvalidError, match=r"request being served \('a'\), got 'b'"):
        pool.evict("b")
    with pytest.raises(ParamInvalidError, match=r"request being served"):
        pool.invalidate("b", 0)
    world.step()
    late = pool.plan("a", np.arange(3), world.table)
    out = world.out()
    move = pool.plan_serve(late, 3, out)
    pool.evict("a")
    kept = [rows.copy() for rows in out]
    move.run()
    assert move.skipped
    assert (move.bytes_moved, move.num_descriptors, move.touched()) == (0, 0, ((), ()))
    assert all((a == b).all() for a, b in zip(out, kept, strict=True))
    # A newcomer finds nothing, and layers that the last step never reached do not hold it up.
    pool.admit("b")
    fresh = pool.plan("b", np.arange(3), world.table)
    assert (fresh.hits, fresh.misses) == (0, 3)
    pool.serve(fresh, 7, out)
    pool.install(fresh, 7, out)


BAD_IDS: list[tuple[Any, str]] = [
    (None, r"ids: expected an array, got None"),
    ([1, 2], r"ids: expected an int32 or int64 array, got list"),
    (np.zeros(2, np.uint64), r"ids: expected an int32 or int64 array, got uint64"),
    (np.array([1.0, np.nan]), r"ids: expected an int32 or int64 array, got float64"),
    (np.zeros((1, 2), np.int64), r"ids: expected one axis"),
    (np.arange(TOPK + 1), r"ids: expected at most topk \(6\) ids, got 7"),
    (np.array([1, 5, 1]), r"ids\[2\]: expected each id once, got 1"),
    (np.array([1, MAX_TOKENS]), r"ids\[1\]: expected ids below 48, got 48"),
    (np.array([1, 2**62]), r"ids\[1\]: expected ids below 48"),
    (np.array([1, 2**32 + 1]), r"ids\[1\]: expected ids below 48"),
]


@pytest.mark.parametrize(("ids", "match"), BAD_IDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_bad_ids_change_nothing(policy: str, ids: Any, match: str) -> None:
    world = World(policy, seed=6)
    world.pool.admit("a")
    world.step()
    before = world.pool.held()
    with pytest.raises(KVCoreError, match=match):
        world.pool.plan("a", ids, world.table)
    assert world.pool.held() == before
    world.step()


def test_bad_tables_are_refused() -> None:
    world = World("lru", seed=7)
    world.pool.admit("a")
    table = world.table.copy()
    table[1] = NUM_BLOCKS
    ids = np.array([-1, 2, 5])
    with pytest.raises(ParamInvalidError, match=r"block_table\[1\]: expected a block below 24"):
        world.pool.plan("a", ids, table)
    table[1] = -1
    with pytest.raises(ParamInvalidError, match=r"block_table\[1\]"):
        world.pool.plan("a", ids, table)
    with pytest.raises(ParamInvalidError, match=r"ids\[2\]: expected a token of 1 blocks, got 5"):
        world.pool.plan("a", ids, table[:1])
    with pytest.raises(KVCoreError, match=r"block_table: expected an array, got None"):
        world.pool.plan("a", ids)
    assert world.pool.used == 0


def test_bad_outputs_are_refused() -> None:
    world = World("lru", seed=8)
    pool = world.pool
    pool.admit("a")
    selection = pool.plan("a", np.arange(4), world.table)
    rows, rope = world.out()
    readonly = rows.copy()
    readonly.flags.writeable = False
    held = pool._layer(3).lanes[0].array
    for out, match in (
        (rows, r"out: expected a sequence with an array a lane"),
        ((rows,), r"out: expected 2 arrays, one a lane, got 1"),
        ((rows[:3], rope), r"out\[0\]: expected \[at least 4, size\]"),
        ((rows, rope[:, :2]), r"out\[1\]: expected rows of 3 bytes, got 2"),
        ((readonly, rope), r"out\[0\]: expected an array that can be written"),
        ((world.full[3][0].reshape(-1, 10), rope), r"out\[0\]: .* apart from the full"),
        ((held, rope), r"out\[0\]: expected memory apart from the pool"),
        ((rows[::-1], rope), r"out\[0\]: expected rows apart"),
        ((rows, None), r"out\[1\]: expected an array"),
    ):
        with pytest.raises(KVCoreError, match=match):
            pool.plan_serve(selection, 3, out)
    with pytest.raises(ParamInvalidError, match=r"layer: expected one of 3, 7, 40, got 4"):
        pool.plan_serve(selection, 4, (rows, rope))
    with pytest.raises(ParamInvalidError, match=r"selection: expected a Selection"):
        pool.plan_serve(None, 3, (rows, rope))  # type: ignore[arg-type]


def test_bad_full_caches_are_refused() -> None:
    good = np.zeros((4, 4, 8), np.uint8)
    sizes = {"capacity": 4, "topk": 4, "max_tokens": 16}
    for full, match in (
        ({}, r"full: expected the lanes of each layer"),
        ([good], r"full: expected the lanes of each layer"),
        ({0: good}, r"full\[0\]: expected a sequence of arrays"),
        ({0: ()}, r"full\[0\]: expected a sequence of arrays"),
        ({-1: (good,)}, r"full: expected an integer"),
        ({0: (good[0, 0],)}, r"full\[0\]: expected rows"),
        ({0: (good[:, :, ::2],)}, r"full\[0\]: expected a contiguous last axis"),
        ({0: (good,), 1: (good[:2],)}, r"full\[1\]: expected 1 lanes of one block table"),
        ({0: (good,), 1: (good, good)}, r"full\[1\]: expected 1 lanes of one block table"),
        ({0: (None,)}, r"full\[0\]: expected an array"),
    ):
        with pytest.raises(KVCoreError, match=match):
            DevicePool(full, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", [0, 1, -5, 2**40])
@pytest.mark.parametrize("shape", [(6, 1, 8), (1, 6, 8), (6, 8), (6, 2, 1), (1, 1, 1)])
def test_strides_of_axes_of_one_mean_nothing(odd: int, shape: tuple[int, ...]) -> None:
    """In the full cache, and in the array that takes one row."""

    def oddly(array: Any) -> Any:
        steps = [odd if n == 1 else s for n, s in zip(array.shape, array.strides, strict=True)]
        return np.lib.stride_tricks.as_strided(array, strides=steps)

    full = np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint8).reshape(shape)
    tokens = int(np.prod(shape[:-1]))
    blocks = 1 if len(shape) == 2 else shape[0]
    pool = DevicePool({0: (oddly(full),)}, capacity=1, topk=1, max_tokens=tokens)
    pool.admit("a")
    table = None if len(shape) == 2 else np.arange(blocks)
    for token in (tokens - 1, 0):
        whole = np.zeros((3, shape[-1]), np.uint8)
        selection = pool.plan("a", np.array([token]), table)
        pool.plan_serve(selection, 0, (oddly(whole[1:2]),)).run()
        pool.plan_install(selection, 0, (oddly(whole[1:2]),)).run()
        assert np.array_equal(whole[1], full.reshape(tokens, -1)[token])
        assert not whole[::2].any()


def test_flat_caches_of_any_dtype_and_odd_blocks() -> None:
    """Rows by id, strided; and blocks whose size is no power of two."""
    wide = np.arange(60 * 9, dtype=np.float32).reshape(60, 9)
    for full, table in (
        (wide[:, 2:7], None),
        (wide.reshape(20, 3, 9)[:, :, 2:7], np.arange(20)),
    ):
        pool = DevicePool({0: [full]}, capacity=8, topk=4, max_tokens=60)
        pool.admit(1)
        for ids in (np.array([59, 0, 31], np.int32), np.array([31, 58, 0], np.int32)):
            selection = pool.plan(1, ids, table)
            out = np.zeros((4, 5), np.float32)
            pool.serve(selection, 0, [out])
            assert (out[:3] == wide[ids, 2:7]).all()
            assert not out[3].any()
            pool.install(selection, 0, [out])
    with pytest.raises(ParamInvalidError, match=r"ids\[0\]: expected a row of the full cache"):
        DevicePoolOf(wide).plan(1, np.array([60]))
    with pytest.raises(ParamInvalidError, match=r"block_table: expected none for a flat"):
        DevicePoolOf(wide).plan(1, np.array([6]), np.arange(2))


def DevicePoolOf(rows: NDArray[Any]) -> DevicePool:
    pool = DevicePool({0: [rows]}, capacity=8, topk=4, max_tokens=100)
    pool.admit(1)
    return pool


def test_many_threads_serve_the_same_bytes() -> None:
    draw = np.random.default_rng(1)
    full = draw.integers(0, 256, (4096, 1152), np.uint8)
    pool = DevicePool({0: [full]}, capacity=2048, topk=1024, max_tokens=4096)
    pool.admit(1)
    before = kvcore.get_num_threads()
    try:
        for workers in (1, 2, 5):
            kvcore.set_num_threads(workers)
            ids = draw.choice(4096, 1024, replace=False)
            out = np.zeros((1024, 1152), np.uint8)
            selection = pool.plan(1, ids)
            pool.serve(selection, 0, [out])
            pool.install(selection, 0, [out])
            assert (out == full[ids]).all()
    finally:
        kvcore.set_num_threads(before)


# ---------------------------------------------------------------- on a device
async def test_installs_on_a_side_stream_do_not_race() -> None:
    """Two layers, installs on their own stream, ordered by events both ways."""
    async with kvcore.Device("A3", clock="model", race_check="raise") as device:
        draw = np.random.default_rng(9)
        full, outs = {}, {}
        for layer in (0, 5):
            full[layer] = [device.empty_swapped((8, 4, 16), "uint8")]
            with full[layer][0].host("w") as rows:
                rows[...] = draw.integers(0, 256, rows.shape, np.uint8)
            outs[layer] = [device.empty((6, 16), "uint8")]
        pool = DevicePool(full, capacity=12, topk=6, max_tokens=32, device=device)
        compute, side = device.stream("compute"), device.stream("side")
        pool.admit("r")
        table = np.arange(8)
        installed = {layer: device.event() for layer in full}
        served = {layer: device.event() for layer in full}
        for _ in range(5):
            ids = draw.choice(32, 6, replace=False)
            selection = pool.plan("r", ids, table)
            for layer in full:
                compute.wait_event(installed[layer])
                compute.launch(pool.plan_serve(selection, layer, outs[layer]))
                served[layer].record(compute)
                side.wait_event(served[layer])
                side.launch(pool.plan_install(selection, layer, outs[layer]))
                installed[layer].record(side)
            await compute.synchronize()
            for layer in full:
                with full[layer][0].host("r") as rows, outs[layer][0].host("r") as got:
                    assert (got == rows.reshape(-1, 16)[ids]).all()
        await side.synchronize()
        assert device.now > 0
        pool.close()
        pool.close()


async def test_a_missing_event_is_found() -> None:
    async with kvcore.Device("A3", clock="model", race_check="record") as device:
        full = {0: [device.empty_swapped((4, 4, 16), "uint8")]}
        out = [device.empty((4, 16), "uint8")]
        pool = DevicePool(full, capacity=4, topk=4, max_tokens=16, device=device)
        pool.admit("r")
        selection = pool.plan("r", np.arange(4), np.arange(4))
        compute, side = device.stream("compute"), device.stream("side")
        compute.launch(pool.plan_serve(selection, 0, out))
        await compute.synchronize()
        side.launch(pool.plan_install(selection, 0, out))
        compute.fill(out[0], 0)  # the next step's output, before the install has read this one's
        await compute.synchronize()
        await side.synchronize()
        assert len(device.races) == 1
        pool.close()


def test_a_device_too_small_keeps_nothing() -> None:
    profile = kvcore.DeviceProfile.named("A3").replace(capacity=100 / 2**20)
    with kvcore.Device(profile) as device:
        full = {n: [np.zeros((1024, 64), np.uint8)] for n in range(4)}
        with pytest.raises(DeviceOutOfMemoryError):
            DevicePool(full, capacity=512, topk=4, max_tokens=1024, device=device)
        assert device.memory().used == 0


def test_statistics_of_a_pool() -> None:
    full = {0: [np.zeros((32, 4), np.uint8)]}
    pool = DevicePool(full, capacity=8, topk=4, max_tokens=32)
    assert pool.statistics() == DevicePoolStatistics("lru", 8, 0, 8, None, 0, 0, 0, 0, 0)
    pool.admit("a")
    out = [np.zeros((4, 4), np.uint8)]
    for ids in ([0, 1, 2, 3], [2, 3, 4, -1]):
        selection = pool.plan("a", np.array(ids))
        pool.serve(selection, 0, out)
        pool.install(selection, 0, out)
    seen = pool.statistics()
    assert (seen.used, seen.free, seen.request) == (5, 3, "a")
    assert (seen.selections, seen.hits, seen.misses, seen.abandoned) == (2, 2, 5, 0)
    pool.abandon(pool.plan("a", np.array([20, 21])))
    assert pool.invalidate("a", 3) == 2
    pool.evict("a")
    after = pool.statistics()
    assert (after.used, after.request, after.abandoned, after.invalidated) == (0, None, 1, 2)
    # A snapshot, which nobody writes.
    assert (seen.selections, after.selections) == (2, 3)
    with pytest.raises(AttributeError):
        seen.hits = 0  # type: ignore[misc]
