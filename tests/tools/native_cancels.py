# SPDX-License-Identifier: Apache-2.0
"""Random programs of the decode engine under asyncio's own cancels.

    python tests/tools/native_cancels.py [programs] [seed]

Each program makes a device (wall or model clock, race check on, a seed) and an engine, lets
requests come, decode, share steps and leave, and cancels a task of it at a random wait in a
random way (see ``cancels``), the leaving of the device included.  It looks that

- a task that was cancelled ends with its cancel, and its count of requests to cancel is whole;
- every row attended to is what it is without offload, and the host has what it is said to have;
- a request that leaves is among the engine's until no operation of it runs;
- places, blocks and the device's memory are all given back, and no thread is left.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cancels import WAYS, run
from offload.decode_world import DRAFTS, MAX_TOKENS, World, device

seen: Counter[str] = Counter()


class Program(World):
    """One device, one engine and its requests; host functions are held at random."""

    def __init__(self, dev: Any, seed: int) -> None:
        self.dice = np.random.default_rng(seed)
        self.go = threading.Event()
        self.go.set()
        self.running = 0
        writes = ("write_through", "write_back")[seed % 2]
        super().__init__(dev, seed, write_policy=writes, max_batch=3)
        self.names = 0

    def rows(self, request: Any, layer: int, first: int, count: int) -> Any:
        self.running += 1
        assert self.go.wait(50)
        made = super().rows(request, layer, first, count)
        self.running -= 1
        return made

    async def cancelled(self, name: str, wait: Callable[[], Awaitable[Any]]) -> bool:
        """Await it as a task that is cancelled, or not; whether it was."""
        at = int(self.dice.integers(-1, 9))
        way = WAYS[self.dice.integers(len(WAYS))]

        async def open_later() -> None:
            for _ in range(int(self.dice.integers(1, 30))):
                await asyncio.sleep(0)
            self.go.set()

        async def body() -> None:
            await wait()

        opener = asyncio.ensure_future(open_later())
        outcome = await run(body, at, way)
        assert outcome.error is None, (name, outcome.error)
        assert outcome.cancelled == (outcome.cancels > 0), name
        assert outcome.count == outcome.cancels, name
        await opener
        seen["cancels"] += outcome.cancels
        seen[f"{name}, cancelled" if outcome.cancelled else name] += 1
        return outcome.cancelled

    async def one(self) -> None:
        """One thing that happens."""
        engine, dice = self.engine, self.dice
        running = list(engine.requests)
        if len(running) < 3 and dice.random() < 0.7:
            self.names += 1
            if self.start(self.names, int(dice.integers(1, 20))):
                running.append(self.names)
        if not running:
            return
        batch = running[: int(dice.integers(1, len(running) + 1))]
        held = dice.random() < 0.5
        if held:
            self.go.clear()
        step = self.launch_held(batch, held)
        what = dice.random()
        leaver = flushed = None
        if what < 0.5:
            if await self.cancelled("step.wait", step.wait):
                self.go.set()
            result = await step.wait()
        elif what < 0.6:
            await self.cancelled("events", engine.events.synchronize)
            result = await step.wait()
        elif what < 0.7:
            await self.cancelled("device", self.device.synchronize)
            result = await step.wait()
        elif what < 0.8:
            flushed = batch[0]  # what the step wrote of it and was not accepted is forgotten
            await self.cancelled("flush", lambda: engine.flush(flushed))
            assert engine.on_host(flushed) == engine.context(flushed)
            result = await step.wait()
        else:
            leaver = batch[0]
            how = ("preempt", "evict", "abort")[dice.integers(3)]
            result = await self.leave(leaver, how, step)
        if leaver is None:
            self.compare(result)
        for name in batch:
            if name != leaver and result.requests[name].outcome != "stepped":
                await self.leave(name, "evict", None)
            elif name not in (leaver, flushed):
                engine.accept(name, int(dice.integers(1, result.requests[name].tokens + 1)))
        self.seen.clear()
        self.check_books()

    def launch_held(self, batch: list[Any], held: bool) -> Any:
        """A step; where it is held, blocks are got before, since that may wait for the host."""
        drafts = {name: int(self.dice.integers(0, DRAFTS + 1)) for name in batch}
        if held:
            self.go.set()
            for name in batch:
                self.grow(name, 1 + drafts[name])
            self.go.clear()
        return self.launch(batch, drafts)

    async def leave(self, name: Any, how: str, step: Any) -> Any:
        engine = self.engine
        tokens, certain = engine.context(name), engine.on_host(name)

        async def wait() -> None:
            try:
                await getattr(engine, how)(name)
            finally:
                assert name not in engine.requests
                assert step is None or step._end.query()

        waiting = asyncio.ensure_future(step.wait()) if step and self.dice.random() < 0.5 else None
        await self.cancelled(how, wait)
        self.check_host(name, certain if how == "abort" else tokens)
        self.release(name, 0, keep=False)
        if step is None:
            return None
        return await (waiting or step.wait())


async def program(seed: int) -> None:
    clock = ("wall", "model")[seed // 2 % 2]
    dice = np.random.default_rng([seed, 1])

    async def whole() -> None:
        async with device(clock, seed) as dev:
            before = dev.memory("device").used
            world = Program(dev, seed)
            for _ in range(12):
                await world.one()
                assert all(world.engine.context(r) < MAX_TOKENS for r in world.engine.requests)
            if dice.random() < 0.5:
                await world.cancelled("aclose", world.engine.aclose)
                assert dev.memory("device").used == before
            devices.append(dev)
            if dice.random() < 0.5:
                world.go.clear()
                stream = dev.stream()
                stream.call(world.go.wait, 50)
                asyncio.get_running_loop().call_soon(world.go.set)
            leaving.set()

    devices: list[Any] = []
    leaving = asyncio.Event()
    await whole() if dice.random() < 0.3 else await _cancel_the_leaving(whole, leaving, dice)
    for space in ("device", "host", "swapped"):
        assert devices[0].memory(space).used == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("kvcore")]


async def _cancel_the_leaving(
    whole: Callable[[], Any], leaving: asyncio.Event, dice: np.random.Generator
) -> None:
    """Run it all as a task, and cancel that some turns after its device is being left."""
    task = asyncio.ensure_future(whole())
    waiting = asyncio.ensure_future(leaving.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for _ in range(int(dice.integers(1, 4))):
        for _ in range(int(dice.integers(0, 3))):
            await asyncio.sleep(0)
        if task.cancel():
            seen["cancels"] += 1
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    seen["leaving, cancelled" if task.cancelled() else "leaving"] += 1


def main() -> int:
    programs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    start = time.monotonic()
    for seed in range(first, first + programs):
        try:
            asyncio.run(asyncio.wait_for(program(seed), 120))
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
    print(f"{programs} programs in {time.monotonic() - start:.0f} s")
    for name, number in sorted(seen.items()):
        print(f"  {name}: {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
