# SPDX-License-Identifier: Apache-2.0
"""torch tensors, bfloat16 above all, wherever the offload engine takes an array.

The oracle indexes the tensors' bytes in plain numpy.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.offload import DecodeEngine, DecodeFailed, DevicePool, PrefillOffloader, SelectionCache
from kvcore.replay import hit_rate

torch = pytest.importorskip("torch", reason="torch is not installed")

KINDS = ("bfloat16", "float16", "float8_e4m3fn", "float32")


def cache(kind: str, *shape: int, seed: int = 0) -> Any:
    """A tensor of random bits."""
    dtype = getattr(torch, kind)
    *outer, last = shape
    raw = np.random.default_rng(seed).integers(0, 256, (*outer, last * dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype)


def raw_of(tensor: Any) -> np.ndarray[Any, Any]:
    """The tensor's bytes [..., size in bytes], shared."""
    found: np.ndarray[Any, Any] = tensor.view(torch.uint8).numpy()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_a_device_pool(kind: str, index: str) -> None:
    full = [cache(kind, 8, 4, 16), cache(kind, 8, 4, 3, seed=1)]
    pool = DevicePool({0: full}, capacity=8, topk=5, max_tokens=32)
    pool.admit("a")
    table = torch.tensor([7, 2, 0, 5, 1, 6, 3, 4]).to(getattr(torch, index))
    for ids in ([0, 9, 31, -1, 4], [4, 9, 8], [30, 31]):
        out = [cache(kind, 6, 16, seed=8), cache(kind, 6, 3, seed=9)]
        wanted = [raw_of(lane).copy() for lane in out]
        for row, id in enumerate(ids):
            for lane, lane_full in zip(wanted, full, strict=True):
                if id >= 0:
                    lane[row] = raw_of(lane_full)[int(table[id // 4]), id % 4]
        selection = pool.plan("a", torch.tensor(ids).to(getattr(torch, index)), table)
        pool.serve(selection, 0, out)
        pool.install(selection, 0, out)
        for lane, rows in zip(out, wanted, strict=True):
            assert (raw_of(lane) == rows).all()
    assert selection.hits == 1


def test_a_pool_whose_tensors_moved_is_refused() -> None:
    """Rows are read and written by address: of a tensor resized since, there is none left."""
    full, out = (cache("bfloat16", *shape).clone() for shape in ((8, 4, 16), (4, 16)))
    pool = DevicePool({0: [full]}, capacity=8, topk=4, max_tokens=32)
    pool.admit("a")
    selection = pool.plan("a", torch.arange(4), torch.arange(8))
    move = pool.plan_serve(selection, 0, [out])
    out.resize_(1 << 16, 16)
    with pytest.raises(kvcore.ParamInvalidError, match=r"^out\[0\]: .* changed since"):
        move.run()
    fresh = cache("bfloat16", 4, 16)
    before = raw_of(fresh).copy()
    full.resize_(1 << 14, 4, 16)
    with pytest.raises(kvcore.ParamInvalidError, match=r"^full\[0\]: .* changed since"):
        pool.serve(selection, 0, [fresh])
    assert (raw_of(fresh) == before).all()


@pytest.mark.parametrize("kind", KINDS)
def test_prefill(kind: str) -> None:
    full = {3: [cache(kind, 6, 4, 8), cache(kind, 6, 4, 5, seed=1)]}
    wanted = [raw_of(lane).copy() for lane in full[3]]
    with kvcore.Device() as device:
        compute, copies = device.stream(), device.stream()
        ring = PrefillOffloader(device, full, max_tokens=7, copies=copies)
        staging = ring.take(3, compute)
        rows = [cache(kind, 7, size, seed=size) for size in (8, 5)]
        for lane, given in zip(staging.lanes, rows, strict=True):
            assert lane.dtype == kind
            compute.copy(lane, given)
        ring.hand_over(staging, torch.tensor([5, 0, 3]), first=3, count=7)
        copies.synchronize_blocking()
        ring.close()
    for n, token in enumerate(range(3, 10)):
        for lane, given in zip(wanted, rows, strict=True):
            lane[(5, 0, 3)[token // 4], token % 4] = raw_of(given)[n]
    for lane, expected in zip(full[3], wanted, strict=True):
        assert (raw_of(lane) == expected).all()


@pytest.mark.parametrize("smaller", ["storage", "shape"])
def test_prefill_into_a_tensor_that_shrank(smaller: str) -> None:
    # (the storage of a tensor that numpy made, or has seen, keeps its size)
    full = {layer: [torch.zeros((6, 4, 5), dtype=torch.bfloat16)] for layer in range(2)}
    with kvcore.Device() as dev:
        stream, copies = dev.stream(), dev.stream()
        ring = PrefillOffloader(dev, full, max_tokens=8, copies=copies)
        staging = ring.take(0, stream)
        stream.fill(staging.lanes[0], 1.0)
        if smaller == "storage":
            full[0][0].untyped_storage().resize_(64)
        else:
            full[0][0].resize_(1, 4, 5)
        with pytest.raises(kvcore.ParamInvalidError, match=r"^full\[0\]: expected"):
            ring.hand_over(staging, torch.arange(6), first=0, count=8)
        ring.put_back(staging)
        staging = ring.take(1, stream)
        stream.fill(staging.lanes[0], 1.0)
        ring.hand_over(staging, torch.arange(6), first=0, count=8)
        copies.synchronize_blocking()
        ring.close()
    assert (full[1][0].view(24, 5)[:8] == 1).all()


@pytest.mark.parametrize("strides", [(0, 5, 1), (10, 5, 1), (20, 0, 1)])
def test_full_caches_whose_rows_share_bytes(strides: tuple[int, ...]) -> None:
    """Refused where they are written; a pool reads them like any other."""
    folded = cache("bfloat16", 1, 120)[0].as_strided((6, 4, 5), strides)
    spread = torch.zeros(300, dtype=torch.bfloat16).as_strided((6, 4, 5), (5, 40, 1))
    with kvcore.Device() as dev:
        match = r"^full\[0\]: expected elements with bytes of their own"

        def ring(full: Any) -> None:
            copies = dev.stream()
            PrefillOffloader(dev, {0: [full]}, max_tokens=8, copies=copies).close()

        def engine(full: Any) -> None:
            DecodeEngine(
                dev, {0: [full]}, groups=((0,),), max_batch=1, max_tokens=16, topk=4,
                select=lambda *_: np.arange(4), rows=lambda *_: [], layer_us=1.0,
            ).close()  # fmt: skip

        for make in (ring, engine):
            make(spread)
            with pytest.raises(kvcore.ParamInvalidError, match=match):
                make(folded)
    pool = DevicePool({0: [folded]}, capacity=8, topk=4, max_tokens=24)
    pool.admit("a")
    out = [torch.zeros(4, 5, dtype=torch.bfloat16)]
    pool.serve(pool.plan("a", np.arange(4), block_table=np.arange(6)), 0, out)
    assert (raw_of(out[0]) == raw_of(folded[0].contiguous())).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_selection(kind: str, on_device: bool) -> None:
    full, rope = cache(kind, 6, 4, 8), cache(kind, 6, 4, 16, seed=1)
    table = torch.tensor([[5, 0, 2]], dtype=torch.int32)
    with kvcore.Device() as device:
        own = device if on_device else None
        selected = SelectionCache(full, rope, batch=1, steps=1, topk=4, page=4, device=own)
        assert str(selected.kv.dtype).removeprefix("torch.") == kind
        assert isinstance(selected.kv, torch.Tensor) != on_device
        selected.admit("a")
        for ids in ([0, 3, 5, 11], [5, 3, 8, 2]):
            topk = torch.tensor(ids, dtype=torch.int32)[None, None, None]
            lens = torch.tensor([12], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
            selected.gather(topk, table, *lens)
            found = selected.selected("a")[0]
            assert sorted(found) == sorted(ids)
            for buffers, whole in ((selected.kv, full), (selected.rope, rope)):
                seen = (
                    buffers.view(dtype="uint8").numpy() if on_device else raw_of(buffers)
                )  # fmt: skip
                for id, (block, row) in found.items():
                    expected = raw_of(whole)[int(table[0, id // 4]), id % 4]
                    assert (seen[block, row] == expected).all()
        selected.close()


async def test_the_engine() -> None:
    """Caches, tables, ids and rows are tensors; what is attended to is what they hold."""
    full = {0: [cache("bfloat16", 6, 4, 8)]}
    plain = raw_of(full[0][0]).copy()
    table = torch.tensor([4, 1, -1, -1], dtype=torch.int32)
    news = {n: cache("bfloat16", 1, 8, seed=n) for n in range(4, 12)}
    seen: list[tuple[list[int], Any]] = []
    async with kvcore.Device() as device:
        engine = DecodeEngine(
            device, full, groups=((0,),), max_batch=1, max_tokens=16, topk=8, capacity=8,
            select=lambda request, group, tokens: torch.arange(max(0, tokens - 8), tokens),
            rows=lambda request, layer, first, count: [news[first]],
            attend=lambda given: seen.append(
                (given.ids("a").tolist(), given.rows("a")[0].copy())
            ),
        )  # fmt: skip
        engine.admit("a", table, 4)
        for position in range(4, 12):
            if position == 8:
                table[2] = 0  # read at every step
            await engine.step(["a"])
            engine.accept("a", 1)
        assert await engine.evict("a") == 12
        await engine.aclose()
    for position in range(4, 12):
        plain[(4, 1, 0)[position // 4], position % 4] = raw_of(news[position])[0]
    assert (raw_of(full[0][0]) == plain).all()
    for ids, rows in seen:
        assert (rows == plain[[(4, 1, 0)[i // 4] for i in ids], [i % 4 for i in ids]]).all()
    assert len(seen) == 8


@pytest.mark.parametrize("moved", [True, False])
async def test_a_full_cache_that_moved_under_the_engine(moved: bool) -> None:
    """Its rows are written by address: the step fails, and memory that is gone is not touched."""
    full = cache("bfloat16", 6, 4, 8).clone()
    async with kvcore.Device() as device:
        engine = DecodeEngine(
            device, {0: [full]}, groups=((0,),), max_batch=1, max_tokens=16, topk=8, capacity=8,
            select=lambda request, group, tokens: torch.empty(0, dtype=torch.int64),
            rows=lambda request, layer, first, count: [torch.zeros(count, 8).bfloat16()],
        )  # fmt: skip
        engine.admit("a", torch.arange(4), 4)
        before = raw_of(full.clone())  # (torch lets nobody resize what numpy has seen)
        if moved:
            full.resize_(1 << 14, 4, 8)
            with pytest.raises(DecodeFailed, match=r"full\[0\]: .* changed since"):
                await engine.step(["a"])
            assert (raw_of(full)[:6] == before).all()
        else:
            await engine.step(["a"])
            engine.accept("a", 1)
            assert await engine.evict("a") == 5
            before[1, 0] = 0
            assert (raw_of(full) == before).all()
        await engine.aclose()


def test_traces_of_ids() -> None:
    ids = np.stack([np.arange(n, n + 4) for n in range(6)])[:, None]
    expected = hit_rate(ids, "lru", 8)
    assert hit_rate(torch.from_numpy(ids), "lru", 8) == expected > 0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.arange(4, dtype=torch.int16), "int32 or int64 array, got int16"),
        (lambda: torch.zeros(4, dtype=torch.bfloat16), "int32 or int64 array, got bfloat16"),
        (lambda: torch.zeros(2, 2, dtype=torch.int32), "one axis"),
        (lambda: torch.zeros(4, dtype=torch.int32).to_sparse(), "a dense"),
        (lambda: torch.zeros(4, dtype=torch.int32, device="meta"), "a tensor on 'cpu'"),
        (lambda: [0, 1], "int32 or int64 array, got list"),
    ],
)
def test_indices_that_are_none(make: Any, match: str) -> None:
    pool = DevicePool({0: [cache("bfloat16", 8, 4, 16)]}, capacity=8, topk=4, max_tokens=32)
    pool.admit("a")
    with pytest.raises(kvcore.ParamInvalidError, match=f"^ids: expected .*{match}"):
        pool.plan("a", make(), torch.arange(8))
    with pytest.raises(kvcore.ParamInvalidError, match=f"^block_table: expected .*{match}"):
        pool.plan("a", torch.arange(4), make())
    with pytest.raises(kvcore.ParamInvalidError, match=r"^block_table\[1\]: .* below 8, got 9$"):
        pool.plan("a", torch.arange(4, 8), torch.tensor([0, 9]))
    assert pool.plan("a", torch.arange(4), torch.arange(8)).misses == 4


def test_offload_does_not_bring_torch() -> None:
    program = (
        "import sys, numpy as np, kvcore\n"
        "from kvcore.offload import DevicePool, SelectionCache\n"
        "SelectionCache(np.zeros((2, 4, 8)), batch=1, steps=1, topk=4, page=4)\n"
        "pool = DevicePool({0: [np.zeros((2, 4, 8))]}, capacity=4, topk=2, max_tokens=8)\n"
        "pool.admit(1); pool.plan(1, np.arange(2), np.arange(2))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
