# SPDX-License-Identifier: Apache-2.0
"""A random program on an NPU: what it launches and how it waits; ``fuzz_model`` has the rules."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import numpy as np
from double.direct import Double
from fuzz_model import ROWS, SHAPE, Lane, Op, Spot, World

import kvcore
from kvcore.errors import KVCoreError

#: Seconds after which a wait counts as one without an end.
PATIENCE_S = 40.0
ALL = range(ROWS)
HALVES = (slice(0, 2), slice(2, 4), slice(0, 4, 2), slice(1, 4, 2))


class Program:
    """One thread's share of an episode: its own streams and buffers, on a device of all."""

    def __init__(self, dev: kvcore.Device, double: Double, seed: int, *, alone: bool) -> None:
        self.dev = dev
        self.random = random.Random(seed)
        self.alone = alone
        self.ends: Counter[str] = Counter()
        self.world = World(double)
        self.lanes = [Lane(dev.stream(f"{seed}.{i}")) for i in range(3)]
        makers = [dev.empty] * 4 + [dev.empty_host] * 2 + [dev.empty_swapped]
        self.spots = [Spot(make(SHAPE, "float16")) for make in makers]
        self.spots.append(Spot(np.zeros(SHAPE, np.float16)))
        self.on_device, self.pinned = self.spots[:4], self.spots[4:6]
        self.slots = dev.empty(ROWS, "int32")
        self.graphs: list[tuple[kvcore.Graph, list[Op]]] = []
        self.events: list[tuple[kvcore.Event, dict[Lane, int]]] = []
        self.value = 0
        stream = self.lanes[0].stream
        stream.copy(self.slots, np.arange(ROWS, dtype=np.int32))
        for spot in self.spots:
            stream.fill(spot.target, 0)
        stream.synchronize_blocking()
        key, value, keys, values = [spot.target for spot in self.on_device]
        self.plan = kvcore.plan_scatter_pa_kv_cache(
            key, keys.view((1, *SHAPE)), self.slots, value, values.view((1, *SHAPE))
        )

    def fresh(self) -> int:
        self.value = (self.value + 1) % 2000
        return self.value

    # -- operations that only launch

    def launches(self) -> dict[str, Callable[[], object]]:
        return {
            "fill": self.fill,
            "copy": self.copy,
            "rows": self.copy_rows,
            "batch": self.batch,
            "call": self.call,
            "raise": self.call_that_raises,
            "plan": self.scatter,
            "record": self.record,
            "wait": self.wait_for_event,
            "join": self.join,
            "allocate": self.allocate,
            "capture": self.capture,
            "replay": self.replay,
            "ask": self.ask,
        }

    def pick(self) -> Lane:
        return self.random.choice(self.lanes)

    def put(self, lane: Lane, ops: list[Op], act: Callable[[], object]) -> None:
        """Launch something that does these; what raises here was not launched."""
        self.world.order(lane, ops, self.random)
        act()
        for op in ops:
            self.world.launched(lane, op)

    def fill(self) -> None:
        lane, spot, value = self.pick(), self.random.choice(self.spots), self.fresh()
        self.put(lane, [Op(spot, ALL, value)], lambda: lane.stream.fill(spot.target, value))

    def copy(self) -> None:
        lane, (dst, src) = self.pick(), self.random.sample(self.spots, 2)
        self.put(
            lane,
            [Op(dst, ALL, src, ALL)],
            lambda: lane.stream.copy(dst.target, src.target),
        )

    def copy_rows(self) -> None:
        lane, dst, src = self.pick(), self.random.choice(self.spots), self.random.choice(self.spots)
        to, source = self.random.sample(HALVES, 2)
        self.put(
            lane,
            [Op(dst, ALL[to], src, ALL[source])],
            lambda: lane.stream.copy(dst.target[to], src.target[source]),
        )

    def batch(self) -> None:
        lane = self.pick()
        there, here = self.random.sample(self.on_device, 2), self.pinned
        if self.random.random() < 0.5:
            there, here = here, there
        self.put(
            lane,
            [Op(d, ALL, s, ALL) for d, s in zip(there, here, strict=True)],
            lambda: lane.stream.copy_batch([d.target for d in there], [s.target for s in here]),
        )

    def call(self) -> None:
        lane, spot, value = self.pick(), self.pinned[0], self.fresh()
        call = lane.new_call(spot.array, value)
        self.put(lane, [Op(spot, ALL, value)], lambda: lane.stream.call(call))
        lane.calls.append(call)

    def call_that_raises(self) -> None:
        if self.random.random() < 0.8:
            return
        lane = self.pick()
        lane.stream.call(int, "x")
        lane.must_fail = True

    def scatter(self) -> None:
        key, value, keys, values = self.on_device
        lane = self.pick()
        ops = [Op(keys, ALL, key, ALL), Op(values, ALL, value, ALL)]
        self.put(lane, ops, lambda: lane.stream.launch(self.plan))

    def record(self) -> None:
        lane = self.pick()
        event = self.dev.event(enable_timing=self.random.random() < 0.3)
        event.record(lane.stream)
        self.events = [*self.events[-5:], (event, self.world.seen_from(lane))]

    def wait_for_event(self) -> None:
        if self.events:
            lane, (event, seen) = self.pick(), self.random.choice(self.events)
            lane.stream.wait_event(event)
            lane.knows(seen)

    def join(self) -> None:
        lane, other = self.random.sample(self.lanes, 2)
        self.world.join(lane, other, self.random)

    def allocate(self) -> None:
        make = self.random.choice([self.dev.empty, self.dev.empty_host, self.dev.empty_swapped])
        buffer = make(self.random.choice([1, 100, 5000]), "uint8")
        if self.random.random() < 0.5:
            self.pick().stream.fill(buffer, 3)
        if self.random.random() < 0.5:
            buffer.free()

    def capture(self) -> None:
        if len(self.graphs) > 2:
            self.graphs.pop(0)
        main, side = self.random.sample(self.lanes, 2)
        forks = self.random.random() < 0.5
        ops: list[Op] = []
        with self.dev.capture(main.stream) as graph:
            ops += [self.captured(main.stream) for _ in range(self.random.randint(1, 4))]
            if forks:
                side.stream.wait_stream(main.stream)
                ops.append(self.captured(side.stream))
                main.stream.wait_stream(side.stream)
                ops.append(self.captured(main.stream))
        self.graphs.append((graph, ops))

    def captured(self, stream: kvcore.Stream) -> Op:
        dst, src = self.random.sample(self.on_device, 2)
        if self.random.random() < 0.4:
            value = self.fresh()
            stream.fill(dst.target, value)
            return Op(dst, ALL, value)
        if self.random.random() < 0.5:
            src = self.random.choice(self.pinned)
        stream.copy(dst.target, src.target)
        return Op(dst, ALL, src, ALL)

    def replay(self) -> None:
        if self.graphs:
            lane, (graph, ops) = self.pick(), self.random.choice(self.graphs)
            self.put(lane, ops, lambda: graph.replay(lane.stream))

    def ask(self) -> None:
        assert self.dev.memory().used >= 0
        if len(self.events) > 1:
            events = [event for event, _ in self.random.sample(self.events, 2)]
            if all(event.query() for event in events):
                with contextlib.suppress(kvcore.ParamInvalidError):  # without timing
                    events[0].elapsed_time(events[1])

    # -- waiting

    def wait_blocking(self) -> None:
        lane = self.pick()
        way = self.random.choice(["stream", "event", "poll"])
        if way == "event" and self.events:
            self.random.choice(self.events)[0].synchronize_blocking()
            return
        with self.heard(lane):
            if way == "poll":
                began = time.monotonic()
                while not lane.stream.query():
                    assert time.monotonic() - began < PATIENCE_S
            else:
                lane.stream.synchronize_blocking(PATIENCE_S)

    async def wait(self) -> None:
        lane = self.pick()
        way = self.random.choice(["stream", "event", "run", "cancel", "device"])
        if way == "event" and self.events:
            await self.random.choice(self.events)[0].synchronize()
        elif way == "cancel":
            with anyio.move_on_after(self.random.choice([0, 0.002])), self.heard(lane):
                await lane.stream.synchronize()
        elif way == "run":
            key, value, keys, values = self.on_device
            self.put(lane, [Op(keys, ALL, key, ALL), Op(values, ALL, value, ALL)], int)
            with self.heard(lane):
                await lane.stream.run(self.plan)
        elif way == "device" and self.alone:
            with self.heard(*self.lanes):
                await self.dev.synchronize()
        else:
            with self.heard(lane):
                await lane.stream.synchronize()

    @contextmanager
    def heard(self, *lanes: Lane) -> Iterator[None]:
        """What a wait says of what was launched on the streams."""
        try:
            yield
        except KVCoreError as error:
            if error.argument == "timeout_s":
                raise AssertionError("a wait without an end") from error
            self.count(error)
            if error.__cause__ is not None:  # else the wait itself was not to be had
                for lane in lanes:
                    self.world.failed(lane)
        else:
            for lane in lanes:
                self.world.passed(lane)

    def count(self, error: BaseException) -> None:
        self.ends[type(error).__name__] += 1

    # -- the whole

    def step(self) -> None:
        acts = self.launches()
        try:
            acts[self.random.choice(list(acts))]()
        except KVCoreError as error:
            self.count(error)

    def run_blocking(self, length: int) -> None:
        for _ in range(length):
            self.step()
            if self.random.random() < 0.12:
                try:
                    self.wait_blocking()
                except KVCoreError as error:
                    self.count(error)

    async def run(self, length: int) -> None:
        for _ in range(length):
            self.step()
            if self.random.random() < 0.12:
                try:
                    if self.random.random() < 0.5:
                        self.wait_blocking()
                    else:
                        await self.wait()
                except KVCoreError as error:
                    self.count(error)

    def check_all(self) -> None:
        """At the end: every stream is waited for."""
        for lane in self.lanes:
            for _ in range(2):
                with self.heard(lane):
                    lane.stream.synchronize_blocking(PATIENCE_S)
