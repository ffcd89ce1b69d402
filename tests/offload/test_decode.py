# SPDX-License-Identifier: Apache-2.0
"""Decode with the full cache on the host: what is attended to equals decode without offload."""

from __future__ import annotations

from collections.abc import Hashable

import anyio
import pytest

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
            if waiting and draw.random() < 0.7:
                request = next(iter(waiting))
                if world.start(request, waiting[request]):
                    del waiting[request]
            else:
                fresh += 1
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


CASES = [
    (1, "lru", "write_through", "model"),
    (2, "lru", "write_back", "wall"),
    (1, "fifo", "write_back", "model"),
    (2, "arc", "write_through", "wall"),
    (2, "arc", "write_back", "model"),
    (1, "previous", "write_back", "model"),
]


@pytest.mark.parametrize(("seed", "policy", "writes", "clock"), CASES)
async def test_attention_inputs_equal_those_without_offload(
    seed: int, policy: str, writes: str, clock: str
) -> None:
    async with device(clock, seed) as dev:
        world = World(
            dev, seed, policy=policy, write_policy=writes, num_blocks=30,
            capacity=6 if policy == "previous" else 16, recent_rows=9 if seed == 1 else None,
            depth=1 + seed, layer_us=3.0 if clock == "model" else 0.0,
        )  # fmt: skip
        await live(world, 80)
        assert world.compared > 300
        totals = world.engine.totals
        assert min(totals.misses, totals.recent, totals.preempted, totals.aborted) > 0
        world.engine.close()
        if clock == "model":
            for lanes in world.full.values():
                for lane in lanes:
                    lane.free()
            assert dev.memory().used == 0
