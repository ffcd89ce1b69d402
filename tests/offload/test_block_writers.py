# SPDX-License-Identifier: Apache-2.0
"""Blocks of the full caches that two requests would write: told before anything is launched.

Each has its neighbour that steps: the same block shared for reading, or copied before the write.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import ParamInvalidError
from kvcore.offload import DecodeEngine, PrefillOffloader

BLOCK, BLOCKS, SIZE = 16, 8, 4
WHO = {"a": 1, "b": 2, "c": 3}


class World:
    """An engine whose requests write their own byte; rows of block k hold 100 + k before."""

    def __init__(self, device: Any, **options: Any) -> None:
        self.full = device.empty_swapped((BLOCKS, BLOCK, SIZE), "uint8")
        with self.full.host("w") as rows:
            rows[...] = 100 + np.arange(BLOCKS)[:, None, None]
        self.served: dict[Any, Any] = {}
        self.engine = DecodeEngine(
            device,
            {0: [self.full]},
            **{
                "groups": ((0,),), "max_batch": 3, "max_tokens": BLOCK * BLOCKS, "topk": 8,
                "select": lambda request, group, tokens: np.arange(max(0, tokens - 8), tokens),
                "rows": lambda request, layer, first, count: [
                    np.full((count, SIZE), WHO[request], np.uint8)
                ],
                "attend": self.attend, "max_drafts": 3, **options,
            },
        )  # fmt: skip

    def attend(self, given: Any) -> None:
        for request in given.requests:
            self.served[request] = given.rows(request)[0][:, 0].tolist()

    def admit(self, name: str, table: list[int], context: int, **options: Any) -> None:
        self.engine.admit(name, np.array(table, np.int64), context, **options)

    def rows(self) -> Any:
        with self.full.host("r") as rows:
            return rows[:, :, 0].copy()


@pytest.fixture(params=["write_through", "write_back"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_two_requests_that_write_one_block(policy: str) -> None:
    async with kvcore.Device("A3", clock="model", race_check="raise") as device:
        world = World(device, write_policy=policy)
        engine = world.engine
        world.admit("a", [0, 1], 20)
        world.admit("b", [2, 1], 25)  # another row of the block
        before = world.rows()
        totals = engine.totals.steps
        match = r"^table\[1\]: expected a block that only request 'b' writes .*, got block 1, which"
        for _ in range(2):
            with pytest.raises(ParamInvalidError, match=match + " request 'a' writes too"):
                engine.launch(["a", "b"])
        assert (world.rows() == before).all()
        assert engine.totals.steps == totals
        assert (engine.context("a"), engine.context("b")) == (20, 25)
        # The block was copied, and the table changed: the same step goes.
        await engine.abort("b")
        world.admit("b", [2, 3], 25)
        await engine.step(["a", "b"])
        for name in ("a", "b"):
            engine.accept(name, 1)
            await engine.evict(name)
        wanted = before
        wanted[1, 20 - BLOCK], wanted[3, 25 - BLOCK] = 1, 2
        assert (world.rows() == wanted).all()
        await engine.aclose()


async def test_a_block_shared_for_reading(policy: str) -> None:
    """Tables [0, 1] and [0, 2]: block 0 is whole, and nobody writes it."""
    async with kvcore.Device("A3", clock="model", race_check="raise") as device:
        world = World(device, write_policy=policy)
        engine = world.engine
        world.admit("a", [0, 1], 16)
        world.admit("b", [0, 2], 16)
        for _ in range(3):
            await engine.step(["a", "b"], drafts=1)
            for name in ("a", "b"):
                engine.accept(name, 1)
        assert world.served["a"] == [100] * 4 + [1] * 4
        assert world.served["b"] == [100] * 4 + [2] * 4
        await engine.aclose()


async def test_a_write_over_a_row_that_stands(policy: str) -> None:
    """One writer of the step, and a request of the past step (or of none) that has the row."""
    async with kvcore.Device("A3", clock="model", race_check="raise") as device:
        world = World(device, write_policy=policy)
        engine = world.engine
        world.admit("a", [0, 1], 20)
        world.admit("b", [2, 1], 20)
        await engine.step(["a"])
        engine.accept("a", 1)  # row 4 of block 1 is a's token 20 now
        match = (
            r"^table\[1\]: .* row 4 request 'b' may write, got block 1, .* token 20 of request 'a'"
        )
        with pytest.raises(ParamInvalidError, match=match):
            engine.launch(["b"])
        world.admit("c", [1], 4)  # b's prefix of four rows is shared: a writes behind it
        await engine.step(["a"])
        engine.accept("a", 1)
        with pytest.raises(ParamInvalidError, match=r"^table\[0\]: .* row 4 request 'c' may write"):
            engine.launch(["c"])
        await engine.abort("a")
        await engine.step(["b"])
        await engine.aclose()


async def test_one_request_with_a_block_twice(policy: str) -> None:
    async with kvcore.Device("A3", clock="model", race_check="raise") as device:
        world = World(device, write_policy=policy)
        engine = world.engine
        world.admit("a", [1, 1], 16)
        with pytest.raises(ParamInvalidError, match=r"^table\[1\]: .* token 0 of request 'a'"):
            engine.launch(["a"])
        await engine.abort("a")
        world.admit("a", [0, 1, 1], 30)
        with pytest.raises(ParamInvalidError, match=r"^table\[2\]: .* which itself writes too"):
            engine.launch(["a"], drafts=3)
        await engine.step(["a"], drafts=1)  # up to the end of the block
        await engine.abort("a")
        world.admit("a", [0, 1, 2], 30)
        await engine.step(["a"], drafts=3)
        await engine.aclose()


async def test_tables_of_others_may_hold_anything() -> None:
    """Of a table counts what holds tokens; what lies behind them is looked at when it is used."""
    async with kvcore.Device("A3", clock="model", race_check="raise") as device:
        world = World(device)
        world.admit("a", [0, 1], 20)
        world.admit("b", [-1, 2, 1, 1 << 40], 20)
        world.admit("c", [], 20)
        await world.engine.step(["a"])
        await world.engine.aclose()


def ring(device: Any, layers: int) -> tuple[Any, Any]:
    full = {n: [np.zeros((BLOCKS, 4, SIZE), np.uint8)] for n in range(layers)}
    return PrefillOffloader(device, full, max_tokens=16, copies=device.stream(), depth=4), full


def test_a_hand_over_of_one_block_twice() -> None:
    with kvcore.Device() as device:
        offloader, full = ring(device, 1)
        compute = device.stream()
        staging = offloader.take(0, compute)
        compute.fill(staging.lanes[0], 7)
        match = (
            r"^block_table\[2\]: expected each block once, got block 5 of block_table\[0\] again"
        )
        with pytest.raises(ParamInvalidError, match=match):
            offloader.hand_over(staging, np.array([5, 1, 5]), first=0, count=9)
        assert not full[0][0].any()
        # A block twice among those that are not written is none of its business.
        offloader.hand_over(staging, np.array([5, 1, 5]), first=0, count=8)
        offloader.stored(0).synchronize_blocking()
        written = np.flatnonzero(full[0][0].all(axis=(1, 2))).tolist()
        assert written == [1, 5]
        offloader.close()


def test_two_hand_overs_of_one_row() -> None:
    """Those of a layer that follow one another are one step: nobody else's block is in it."""
    with kvcore.Device() as device:
        offloader, full = ring(device, 2)
        compute = device.stream()
        for layer in (0, 1, 0):  # the next step may write them again
            for number, (table, first, count) in enumerate(
                (([0, 1], 0, 6), ([0, 2], 4, 4), ([3, 1], 6, 2))  # another row of block 1
            ):
                staging = offloader.take(layer, compute)
                compute.fill(staging.lanes[0], 1 + number)
                offloader.hand_over(staging, np.array(table), first=first, count=count)
            staging = offloader.take(layer, compute)
            match = r"^block_table\[1\]: .* no other hand-over of layer %d .*, got row 0 of block 1"
            with pytest.raises(ParamInvalidError, match=match % layer):
                offloader.hand_over(staging, np.array([4, 1]), first=0, count=6)
            with pytest.raises(ParamInvalidError, match=r"got row 3 of block 2"):
                offloader.hand_over(staging, np.array([4, 2]), first=7, count=1)
            offloader.put_back(staging)
            compute.synchronize_blocking()
            offloader.stored(layer).synchronize_blocking()
        wanted = np.zeros((BLOCKS, 4), np.uint8)
        wanted[0], wanted[1, :2], wanted[2], wanted[1, 2:] = 1, 1, 2, 3
        for lanes in full.values():
            assert (lanes[0] == wanted[:, :, None]).all()
        offloader.close()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_lanes_that_share_bytes(kind: str) -> None:
    """Lanes of two layers, or two of one, on the same memory; layers of one slab have their own."""
    slab = np.zeros((BLOCKS, 3, BLOCK, 2 * SIZE), np.uint8)
    apart = {
        layer: [slab[:, layer, :, :SIZE], slab[:, layer, :, SIZE:]] for layer in range(3)
    }  # every lane lies between the bytes of every other
    with kvcore.Device() as device:

        def make(full: Any) -> None:
            if kind == "prefill":
                copies = device.stream("copies")
                PrefillOffloader(device, full, max_tokens=4, copies=copies).close()
                return
            DecodeEngine(
                device, full, groups=((0, 1, 2),), max_batch=1, max_tokens=BLOCK, topk=2,
                select=lambda *_: [0], rows=lambda *_: [], attend=lambda _: None,
            ).close()  # fmt: skip

        make(apart)
        for full, seen in (
            (apart | {2: apart[0]}, r"full\[2\].*bytes shared with full\[0\]"),
            (apart | {1: [apart[1][0]] * 2}, r"full\[1\].*bytes shared with full\[1\]"),
            (
                apart | {1: [slab[:, 1, :, 1 : SIZE + 1], apart[1][1]]},
                r"full\[1\].*memory of its own.*bytes shared with full\[1\]",
            ),
        ):
            with pytest.raises(ParamInvalidError, match=seen):
                make(full)
