# SPDX-License-Identifier: Apache-2.0
"""Prefill to the host: every row arrives, streams overlap, no race, nothing leaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import DeviceOutOfMemoryError, KVCoreError, ParamInvalidError, StreamError
from kvcore.offload.prefill import PrefillOffloader

LAYERS = (0, 4, 5, 9)
BLOCKS, BLOCK = 8, 4


def host_caches(device: Any) -> dict[int, list[Any]]:
    full = {
        layer: [
            device.empty_host((BLOCKS, BLOCK, 6), "bfloat16"),
            device.empty_host((BLOCKS, BLOCK, 2), "uint8"),
        ]
        for layer in LAYERS
    }
    for lanes in full.values():
        for lane in lanes:
            with lane.host("w") as rows:
                rows.view(np.uint8)[...] = 0
    return full


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_every_row_arrives(depth: int, seed: int) -> None:
    """Two chunks of a request, the second not on a block's edge; any order of ready work."""
    async with kvcore.Device("A3", clock="model", race_check="raise", seed=seed) as device:
        full = host_caches(device)
        table = np.array([5, 0, 7, 2], np.int32)
        compute, copies = device.stream("compute"), device.stream("d2h")
        ring = PrefillOffloader(device, full, max_tokens=8, copies=copies, depth=depth)
        for first, count in ((0, 6), (6, 8)):
            for layer in LAYERS:
                staging = ring.take(layer, compute)
                compute.compute(10.0)
                for lane in staging.lanes:
                    compute.fill(lane, 1 + layer + first)
                ring.hand_over(staging, table, first=first, count=count)
        for layer in LAYERS:
            await ring.stored(layer).synchronize()
        for layer, lanes in full.items():
            for lane in lanes:
                with lane.host("r") as rows:
                    for position in range(BLOCK * BLOCKS // 2):
                        row = rows[table[position // BLOCK], position % BLOCK].astype(np.int64)
                        first = 0 if position < 6 else 6
                        assert (row == (1 + layer + first if position < 14 else 0)).all()
        ring.close()
        ring.close()
        assert device.memory().used == 0


def prefill_us(depth: int) -> float:
    with kvcore.Device("A3", clock="model") as device:
        full = {n: [device.empty_host((64, 128, 512), "uint16")] for n in range(12)}
        compute, copies = device.stream("compute"), device.stream("d2h")
        ring = PrefillOffloader(device, full, max_tokens=4096, copies=copies, depth=depth)
        for layer in full:
            staging = ring.take(layer, compute)
            compute.compute(100.0)
            ring.hand_over(staging, np.arange(64), first=0, count=4096)
        copies.synchronize_blocking()
        return device.now


def test_copies_overlap_with_the_next_layers() -> None:
    """One buffer: they take turns.  Two: the longer of both decides."""
    alone, ring = prefill_us(1), prefill_us(2)
    assert ring < 0.7 * alone


async def test_aborts_give_the_buffer_back() -> None:
    async with kvcore.Device("A3", clock="model", race_check="raise") as device:
        full = host_caches(device)
        compute, copies = device.stream("compute"), device.stream("d2h")
        ring = PrefillOffloader(device, full, max_tokens=8, copies=copies, depth=1)
        staging = ring.take(0, compute)
        compute.fill(staging.lanes[0], 1)
        with pytest.raises(StreamError, match=r"expected one of 1 buffers handed over or put"):
            ring.take(4, compute)
        ring.put_back(staging)
        with pytest.raises(ParamInvalidError, match=r"staging: expected a buffer taken and not"):
            ring.put_back(staging)
        other = device.stream("another request's")
        staging = ring.take(4, other)
        other.fill(staging.lanes[0], 2)
        ring.hand_over(staging, np.arange(2), first=0, count=8)
        with pytest.raises(ParamInvalidError, match=r"staging: expected a buffer taken"):
            ring.hand_over(staging, np.arange(2), first=0, count=8)
        assert not ring.stored(0).recorded
        await ring.stored(4).synchronize()
        ring.close()
        with pytest.raises(StreamError, match="closed"):
            ring.take(0, compute)


def test_plain_arrays_without_a_model() -> None:
    full = {2: (np.zeros((4, 4, 3), np.int16),)}
    with kvcore.Device() as device:
        stream, copies = device.stream("s"), device.stream("c")
        ring = PrefillOffloader(device, full, max_tokens=5, copies=copies)
        staging = ring.take(2, stream)
        stream.fill(staging.lanes[0], 7)
        ring.hand_over(staging, np.array([3, 1]), first=2, count=5)
        copies.synchronize_blocking()
        ring.close()
    assert (full[2][0].sum(axis=2) == [[0] * 4, [21, 21, 21, 0], [0] * 4, [0, 0, 21, 21]]).all()


def test_bad_calls_are_refused() -> None:
    good = np.zeros((4, 4, 3), np.int16)
    locked = good.copy()
    locked.flags.writeable = False
    with kvcore.Device() as device, kvcore.Device() as foreign:
        copies = device.stream("c")
        options = {"max_tokens": 8, "copies": copies}
        for full, changes, match in (
            ({}, {}, r"full: expected the lanes"),
            ({0: (good[0],)}, {}, r"full\[0\]: expected lanes \[blocks"),
            ({0: (locked,)}, {}, r"full\[0\]: expected arrays that can be written"),
            ({0: (good, good[:2])}, {}, r"full\[0\]: expected lanes of one block table"),
            ({0: (good,), 1: (good[:, :, :2],)}, {}, r"full\[1\]: expected the shape of the first"),
            ({0: (None,)}, {}, r"full\[0\]: expected an array"),
            ({-1: (good,)}, {}, r"full: expected an integer"),
            ({0: (good,)}, {"max_tokens": 0}, r"max_tokens: expected"),
            ({0: (good,)}, {"depth": 0}, r"depth: expected"),
            ({0: (good,)}, {"copies": foreign.stream("x")}, r"copies: expected a stream of the"),
        ):
            with pytest.raises(KVCoreError, match=match):
                PrefillOffloader(device, full, **{**options, **changes})  # type: ignore[arg-type]
        ring = PrefillOffloader(device, {0: (good,)}, max_tokens=8, copies=copies)
        with pytest.raises(ParamInvalidError, match=r"layer: expected one of 0, got 1"):
            ring.take(1, copies)
        with pytest.raises(ParamInvalidError, match=r"layer: expected one of 0, got 1"):
            ring.stored(1)
        staging = ring.take(0, device.stream("s"))
        for table, first, count, match in (
            (None, 0, 1, r"block_table: expected an int32 or int64 array"),
            ([0], 0, 1, r"block_table: expected an int32 or int64 array"),
            (np.arange(2), 1, 8, r"block_table: expected blocks for 9 tokens"),
            (np.array([0, 4]), 0, 8, r"block_table\[1\]: expected a block below 4, got 4"),
            (np.array([-1, 1]), 0, 8, r"block_table\[0\]: expected a block below 4, got -1"),
            (np.arange(4), -1, 1, r"first: expected"),
            (np.arange(4), 0, 9, r"count: expected"),
        ):
            with pytest.raises(ParamInvalidError, match=match):
                ring.hand_over(staging, table, first=first, count=count)
        ring.hand_over(staging, np.arange(4), first=0, count=0)
        ring.close()


def test_a_device_too_small_keeps_nothing() -> None:
    profile = kvcore.DeviceProfile.named("A3").replace(capacity=100 / 2**20)
    with kvcore.Device(profile) as device:
        full = {0: [np.zeros((64, 4, 512), np.uint16)]}
        with pytest.raises(DeviceOutOfMemoryError):
            PrefillOffloader(device, full, max_tokens=64, copies=device.stream("c"))
        assert device.memory().used == 0
