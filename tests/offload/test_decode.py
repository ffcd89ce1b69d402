# SPDX-License-Identifier: Apache-2.0
"""Decode with the full cache on the host: what is attended to equals decode without offload."""

from __future__ import annotations

from collections.abc import Hashable

import anyio
import numpy as np
import pytest

import kvcore
from kvcore.offload import DecodeEngine
from offload.decode_world import BATCH, DRAFTS, MAX_TOKENS, World, device


async def live(world: World, steps: int) -> None:
    """Steps in random batches, with everything on the way that may happen to a request."""
    draw, engine = world.draw, world.engine
    waiting: dict[Hashable, int] = {}  # preempted, by tokens
    fresh = 0
    for _ in range(steps):
        running = list(engine.requests)
        what = draw.random()
        if len(running) < BATCH and (what < 0.4 or not running):
            fresh += 1
            if running and what < 0.15:
                await fork(world, running[draw.integers(len(running))], f"r{fresh}")
            elif waiting and draw.random() < 0.7:
                request = next(iter(waiting))
                if world.start(request, waiting[request]):
                    del waiting[request]
            else:
                world.start(f"r{fresh}", int(draw.integers(1, 30)))
            continue
        request = running[draw.integers(len(running))]
        if what < 0.45:
            waiting[request] = engine.context(request)
            assert await engine.preempt(request) == waiting[request]
            world.check_host(request, waiting[request])
            world.release(request, waiting[request])
            continue
        if what < 0.5:
            tokens = engine.context(request)
            assert await engine.evict(request) == tokens
            world.check_host(request, tokens)
            world.release(request, tokens)
            continue
        if what < 0.54:
            assert await engine.flush(request) == engine.context(request)
            world.check_host(request, engine.context(request))
        elif what < 0.58:
            engine.invalidate(request, int(draw.integers(0, engine.context(request) + 1)))
        batch = [running[i] for i in draw.permutation(len(running))[: draw.integers(1, BATCH + 1)]]
        drafts = {r: int(draw.integers(0, DRAFTS + 1)) for r in batch}
        step = world.launch(batch, drafts)
        if what > 0.93:
            # The task that waits is cancelled, and one of the batch aborted in mid-copy.
            with anyio.CancelScope() as scope:
                scope.cancel()
                await step.wait()
            on_host = await engine.abort(batch[0])
            world.check_host(batch[0], on_host)
            world.release(batch[0], on_host)
            world.seen.clear()
            continue
        result = await step.wait()
        world.compare(result)
        for r, part in result.requests.items():
            if part.outcome == "exhausted":
                # Who got no block gives all of its own back.
                if part.first < MAX_TOKENS:
                    waiting[r] = engine.context(r)
                    await engine.preempt(r)
                    world.release(r, waiting[r])
                else:
                    await engine.evict(r)
                    world.release(r, part.first)
            else:
                engine.accept(r, int(draw.integers(1, part.tokens + 1)))
        world.check_books()
    for request in list(engine.requests):
        tokens = engine.context(request)
        assert await engine.evict(request) == tokens
        world.check_host(request, tokens)
        world.release(request, tokens)
    assert world.blocks.used == 0


async def fork(world: World, request: Hashable, twin: Hashable) -> None:
    """Another request of the same beginning, which goes on in its own way."""
    tokens = await world.engine.flush(request)
    world.share(request)
    world.plain[twin] = {
        layer: [lane.copy() for lane in lanes] for layer, lanes in world.plain[request].items()
    }
    if tokens and world.start(twin, int(world.draw.integers(1, tokens + 1))):
        # Back into what the two may share: written again, it must be a block of its own.
        world.engine.invalidate(request, int(world.draw.integers(0, tokens)))


CASES = [
    (3, "lru", "write_through", "model"),
    (2, "lru", "write_back", "wall"),
    (3, "fifo", "write_back", "model"),
    (2, "arc", "write_through", "wall"),
    (2, "arc", "write_back", "model"),
    (3, "previous", "write_back", "model"),
]


@pytest.mark.parametrize(("seed", "policy", "writes", "clock"), CASES)
async def test_attention_inputs_equal_those_without_offload(
    seed: int, policy: str, writes: str, clock: str
) -> None:
    async with device(clock, seed) as dev:
        world = World(
            dev, seed, policy=policy, write_policy=writes, num_blocks=30,
            capacity=6 if policy == "previous" else 16, recent_rows=9 if seed == 3 else None,
            depth=seed - 1, layer_us=3.0 if clock == "model" else 0.0,
        )  # fmt: skip
        await live(world, 80)
        assert world.compared > 300
        totals = world.engine.totals
        counts = (totals.misses, totals.recent, totals.preempted, totals.aborted, world.copies)
        assert min(counts) > 0, counts
        world.engine.close()
        if clock == "model":
            for lanes in world.full.values():
                for lane in lanes:
                    lane.free()
            assert dev.memory().used == 0


@pytest.mark.parametrize("writes", ["write_through", "write_back"])
async def test_steps_launched_ahead_of_any_wait(writes: str) -> None:
    async with device("model", 5) as dev:
        world = World(dev, 5, write_policy=writes)
        assert world.start("a", 9)
        assert world.start("b", 14)
        steps = []
        for order in (["a", "b"], ["b", "a"], ["b"], ["a", "b"]):
            drafts = {"a": 2, "b": 1}
            steps.append(world.launch(order, drafts))
            for request in order:
                world.engine.accept(request, 1 + drafts[request])
        results = [await step.wait() for step in reversed(steps)][::-1]
        assert [result.number for result in results] == [1, 2, 3, 4]
        ends = [result.end_us for result in results]
        assert ends == sorted(ends)
        seen, world.seen = world.seen, []
        for result in results:
            here = 3 * sum(part.outcome == "stepped" for part in result.requests.values())
            world.seen, seen = seen[:here], seen[here:]
            world.compare(result)
        assert seen == []
        await world.engine.aclose()


@pytest.mark.parametrize("lanes", [1, 3])
def test_plain_arrays_without_a_profile(lanes: int) -> None:
    """Any number of lanes, any types of one size; strided blocks."""
    wide = [np.zeros((8, 4, 6 + i), np.uint16)[:, :, :5] for i in range(lanes)]
    seen = []
    with kvcore.Device() as dev:
        engine = DecodeEngine(
            dev, {4: wide}, groups=((4,),), max_batch=1, max_tokens=32, topk=8,
            select=lambda request, group, tokens: np.arange(max(0, tokens - 8), tokens),
            rows=lambda request, layer, first, count: [
                np.full((count, 5), 100 * i + first, np.float16).view(np.uint16)
                for i in range(lanes)
            ],
            attend=lambda given: seen.append([lane.copy() for lane in given.rows("a")]),
        )  # fmt: skip
        table = np.array([7, 2, 0, 5, 1, 3, 4, 6])
        engine.admit("a", table, 0)
        for _ in range(20):
            engine.step_blocking(["a"])
            engine.accept("a", 1)
        assert engine.evict_blocking("a") == 20
        for step, rows in enumerate(seen):
            for i, lane in enumerate(rows):
                expected = 100 * i + np.arange(max(0, step - 7), step + 1)
                assert (lane.view(np.float16) == expected[:, None]).all()
        for i, lane in enumerate(wide):
            flat = np.ascontiguousarray(lane[table]).reshape(32, 5).view(np.float16)
            assert (flat[:20] == (100 * i + np.arange(20))[:, None]).all()
            assert not flat[20:].any()
        engine.close()
