# SPDX-License-Identifier: Apache-2.0
"""Bad input, exhausted blocks, failed copies: clear errors before, counted outcomes during."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import DeviceOutOfMemoryError, KVCoreError, ParamInvalidError, StreamError
from kvcore.offload import DecodeEngine, DecodeFailed
from kvcore.offload.decode.moves import RingStore
from offload.decode_world import BLOCK, GROUPS, LAYERS, MAX_TOKENS, World, device


def make(full: Any, dev: Any, **options: Any) -> DecodeEngine:
    given: dict[str, Any] = {
        "groups": GROUPS, "max_batch": 2, "max_tokens": 64, "topk": 6,
        "select": lambda request, group, tokens: np.arange(min(tokens, 6)),
        "rows": lambda request, layer, first, count: [np.ones((count, 8), np.uint8)],
    }  # fmt: skip
    return DecodeEngine(dev, full, **{**given, **options})


def full_of(dev: Any, layers: tuple[int, ...] = LAYERS) -> dict[int, list[Any]]:
    full = {layer: [dev.empty_swapped((16, BLOCK, 8), "uint8")] for layer in layers}
    for lanes in full.values():
        with lanes[0].host("w") as rows:
            rows[...] = 1
    return full


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"policy": "lfu"}, r"policy: expected one of previous, lru, fifo, arc, got 'lfu'"),
    ({"write_policy": "lazy"}, r"write_policy: expected one of write_through, write_back"),
    ({"capacity": 5}, r"capacity: expected at least topk \(6\) places, got 5"),
    ({"policy": "previous", "capacity": 12}, r"capacity: expected topk \(6\) places"),
    ({"max_drafts": 4, "recent_rows": 4}, r"recent_rows: expected at least 5 rows for 4 drafts"),
    (
        {"max_drafts": 4, "recent_rows": 9, "write_policy": "write_back"},
        r"recent_rows: expected at least 10 rows for 4 drafts a step \(write_back\), got 9",
    ),
    ({"max_drafts": -1}, r"max_drafts: expected an integer from 0"),
    ({"max_batch": 0}, r"max_batch: expected an integer from 1"),
    ({"max_tokens": 2**40}, r"max_tokens: expected an integer from 1"),
    ({"topk": 0}, r"topk: expected an integer of at least 1"),
    ({"depth": 0}, r"depth: expected an integer from 1"),
    ({"ways": 3}, r"ways: expected none for lru"),
    ({"select": None}, r"select: expected a callable, got NoneType"),
    ({"rows": 3}, r"rows: expected a callable, got int"),
    ({"attend": 3}, r"attend: expected a callable, got int"),
    ({"groups": ()}, r"groups: expected a sequence of layer ids"),
    ({"groups": ((0,), 2, (6,))}, r"groups\[1\]: expected layer ids, got 2"),
    ({"groups": ((0,), (2, 2))}, r"groups\[1\]: expected each layer once, got 2"),
    ({"groups": ((0,), (2,))}, r"groups: expected a group with layer 6 of full"),
    ({"groups": ((0,), (2.0,))}, r"groups\[1\]: expected an integer"),
]


@pytest.mark.parametrize(("options", "match"), BAD_OPTIONS)
def test_bad_options_are_refused_before_any_work(options: dict[str, Any], match: str) -> None:
    with kvcore.Device("A3", clock="model") as dev:
        full = full_of(dev)
        with pytest.raises(ParamInvalidError, match=match):
            make(full, dev, **options)
        assert dev.memory().used == 0


@pytest.mark.parametrize("option", ["pace", "max_real", "policies"])
def test_options_that_do_not_exist_are_refused_as_by_any_call(option: str) -> None:
    with kvcore.Device("A3", clock="model") as dev:
        with pytest.raises(TypeError, match=rf"^DecodeEngine\(\) got an unexpected .* '{option}'$"):
            make(full_of(dev), dev, **{option: 1})
        with pytest.raises(TypeError, match=r"missing 1 required keyword-only argument: 'topk'"):
            DecodeEngine(dev, full_of(dev), groups=GROUPS, max_batch=1, max_tokens=1,
                         select=int, rows=list)  # type: ignore[call-arg]  # fmt: skip
        assert dev.memory().used == 0


def test_bad_full_caches_are_refused() -> None:
    with kvcore.Device("A3", clock="model") as dev:
        good = full_of(dev)
        frozen = np.zeros((16, BLOCK, 8), np.uint8)
        frozen.flags.writeable = False
        for full, match in (
            ({}, r"full: expected the lanes of each layer"),
            ({0: [np.zeros((16, 4, 8))]}, r"full\[0\]: expected swapped or device memory on"),
            ({0: [dev.empty_host((16, 4, 8), "uint8")]}, r"full\[0\]: .* got host memory"),
            ({0: [np.zeros((16, 8))]}, r"full\[0\]: .* got a flat one"),
            ({0: [frozen]}, r"full\[0\]: expected arrays that can be written"),
            (
                {**good, 2: [dev.empty_swapped((16, 4, 9), "uint8")]},
                r"full\[2\]: expected rows of \[8\] bytes, got \[9\]",
            ),
        ):
            with pytest.raises(ParamInvalidError, match=match):
                make(full, dev, groups=((0,), (2, 6)))


def test_a_device_too_small_keeps_nothing() -> None:
    profile = kvcore.DeviceProfile.named("A3").replace(capacity=4096 / 2**30)
    with kvcore.Device(profile, clock="model") as dev:
        full = full_of(dev)
        for options in ({"capacity": 600}, {"recent_rows": 300}):
            with pytest.raises(DeviceOutOfMemoryError):
                make(full, dev, **options)
            assert dev.memory().used == 0


def test_bad_requests_change_nothing() -> None:
    with kvcore.Device("A3", clock="model", race_check="raise") as dev:
        ids: list[Any] = []
        layer_us: list[Any] = [1.0]
        engine = make(
            full_of(dev), dev, select=lambda request, group, tokens: ids[group],
            max_drafts=2, layer_us=lambda layer, batch, tokens: layer_us[0],
        )  # fmt: skip
        table = np.full(16, -1, np.int32)
        table[:3] = 5, 3, 1
        for args, match in (
            ((None, table, 4), r"request: expected an identity"),
            (("a", None, 4), r"table: expected an array, got None"),
            (("a", [1], 4), r"table: expected an int32 or int64 array, got list"),
            (("a", table.reshape(4, 4), 4), r"table: expected one axis"),
            (("a", table, 65), r"context: expected an integer from 0 to 64, got 65"),
            (("a", table, 4.0), r"context: expected an integer"),
        ):
            with pytest.raises(KVCoreError, match=match):
                engine.admit(*args)
        engine.admit("a", table, 4)
        with pytest.raises(ParamInvalidError, match=r"request: expected one not admitted yet"):
            engine.admit("a", table, 4)
        other = np.full(16, -1, np.int32)
        other[:3] = 0, 2, 4
        engine.admit("b", other, 4)
        with pytest.raises(ParamInvalidError, match=r"at most max_batch \(2\) requests at a time"):
            engine.admit("c", table, 4)

        good = np.arange(5)
        ids[:] = [good, good]
        for requests, drafts, match in (
            (["x"], 0, r"requests\[0\]: expected a request that was admitted, got 'x'"),
            (["a", "a"], 0, r"requests: expected each request once"),
            (["a"], 3, r"drafts: expected an integer from 0 to 2, got 3"),
            (["a"], {"a": -1}, r"drafts: expected an integer from 0 to 2, got -1"),
        ):
            with pytest.raises(ParamInvalidError, match=match):
                engine.launch(requests, drafts)
        for bad, match in (
            ([1], r"ids: expected an int32 or int64 array, got list"),
            (np.zeros((1, 1, 1), np.int64), r"ids: expected \[n\] or \[queries, n\]"),
            (np.arange(7), r"ids: expected at most topk \(6\) ids, got 7"),
            (np.array([1, 5]), r"ids\[1\]: expected positions below 5, got 5"),
            (np.array([1, 2**62]), r"ids\[1\]: expected positions below 5"),
            (np.array([2, 2]), r"ids\[1\]: expected each id once, got 2"),
            (np.array([4, 4]), r"ids: expected each id once"),
            (None, r"ids: expected an int32 or int64 array, got NoneType"),
        ):
            ids[:] = [good, bad]
            with pytest.raises(KVCoreError, match=match):
                engine.launch(["b", "a"])
            assert engine.pool("a", 0).used == 0, "the first group's plan was taken back"
        ids[:] = [good, good]
        for layer_us[0] in (-1, math.nan, "1", None):
            with pytest.raises(ParamInvalidError, match=r"layer_us: expected microseconds"):
                engine.launch(["a"])
            assert engine.pool("a", 1).used == 0
        layer_us[0] = 1.0
        table[1] = 16
        with pytest.raises(ParamInvalidError, match=r"table\[1\]: expected a block below 16"):
            engine.launch(["a"])
        table[1] = 3
        assert engine.totals.steps == 0

        with pytest.raises(ParamInvalidError, match=r"tokens: expected at most the 0 written"):
            engine.accept("a", 1)
        result = engine.step_blocking(["b", "a"], {"a": 1})
        assert [part.tokens for part in result.requests.values()] == [1, 2]
        with pytest.raises(ParamInvalidError, match=r"tokens: expected at most the 2 written"):
            engine.accept("a", 3)
        with pytest.raises(ParamInvalidError, match=r"tokens: expected an integer of at least 1"):
            engine.accept("a", 0)
        engine.accept("a", 1)
        with pytest.raises(ParamInvalidError, match=r"tokens: expected at most the 0 written"):
            engine.accept("a", 1)
        with pytest.raises(ParamInvalidError, match=r"from_pos: expected an integer from 0 to 5"):
            engine.invalidate("a", 6)
        with pytest.raises(ParamInvalidError, match=r"group: expected one of 0, 1, got 2"):
            engine.pool("a", 2)
        engine.close()
        engine.close()
        with pytest.raises(StreamError, match=r"engine: expected an open one"):
            engine.launch([])
        with pytest.raises(StreamError, match=r"engine: expected an open one"):
            engine.admit("a", table, 4)


async def test_without_a_block_a_request_is_exhausted_and_the_others_go_on() -> None:
    async with device("model") as dev:
        world = World(dev, 1, num_blocks=4)
        assert world.start("a", 4)
        assert world.start("b", 6)
        result = await world.launch(["a", "b"], {"a": 3, "b": 3}).wait()
        # a took the last block, so b has the two rows of its second.
        assert [part.tokens for part in result.requests.values()] == [4, 2]
        assert world.engine.totals.cut_drafts == 2
        world.compare(result)
        world.engine.accept("a", 4)
        world.engine.accept("b", 2)
        result = await world.launch(["b", "a"], {"a": 0, "b": 0}).wait()
        assert [part.outcome for part in result.requests.values()] == ["exhausted"] * 2
        assert (result.rows, result.us, world.engine.totals.exhausted) == (0, 0, 2)
        # Who gives way gives blocks; the other goes on.
        tokens = await world.engine.preempt("a")
        world.release("a", tokens)
        result = await world.launch(["b"], {"b": 0}).wait()
        assert result.requests["b"].outcome == "stepped"
        world.compare(result)
        world.engine.close()


async def test_a_request_may_fill_the_engine() -> None:
    async with device("wall") as dev:
        world = World(dev, 2)
        assert world.start("a", MAX_TOKENS - 3)
        result = await world.launch(["a"], {"a": 3}).wait()
        assert result.requests["a"].tokens == 3
        world.compare(result)
        world.engine.accept("a", 3)
        result = await world.engine.step(["a"])
        assert result.requests["a"].outcome == "exhausted"
        assert await world.engine.evict("a") == MAX_TOKENS
        world.check_host("a", MAX_TOKENS)


@pytest.mark.parametrize("clock", ["model", "wall"])
@pytest.mark.parametrize("writes", ["write_through", "write_back"])
async def test_a_failed_operation_puts_the_requests_out(clock: str, writes: str) -> None:
    async with device(clock, 3) as dev:
        fail_at: list[tuple[Any, int]] = []
        world = World(dev, 3, write_policy=writes)
        plain_rows = world.rows

        def rows(request: Any, layer: int, first: int, count: int) -> Any:
            if (request, layer) in fail_at:
                raise RuntimeError("the layer broke")
            return plain_rows(request, layer, first, count)

        world.engine._run._make = rows
        for request in ("a", "b", "c"):
            assert world.start(request, 9)
        for _ in range(3):
            result = await world.launch(["a", "b"], {"a": 0, "b": 1}).wait()
            world.compare(result)
            world.engine.accept("a", 1)
            world.engine.accept("b", 1)
        fail_at.append(("b", 2))
        with pytest.raises(DecodeFailed, match=r"its requests are out") as caught:
            await world.launch(["b", "a"], {"a": 2, "b": 2}).wait()
        lost = caught.value.lost
        assert list(lost) == ["a", "b", "c"]
        # The last step's copies were waited for by no later step.
        assert lost == {"a": 11, "b": 11, "c": 9} if writes == "write_through" else {**lost}
        assert all(9 <= tokens <= 12 for tokens in lost.values())
        assert (world.engine.requests, world.engine.totals.failed) == ((), 3)
        # What is said to be on the host is; and the engine goes on.
        fail_at.clear()
        world.seen.clear()
        for request, tokens in lost.items():
            world.check_host(request, tokens)
            world.release(request, tokens)
        for request, tokens in lost.items():
            assert world.start(request, tokens)
        for _ in range(3):
            result = await world.launch(["c", "b", "a"], {"a": 1, "b": 0, "c": 2}).wait()
            world.compare(result)
            for request in lost:
                world.engine.accept(request, 1)
        assert await world.engine.evict("b") == lost["b"] + 3
        world.check_host("b", lost["b"] + 3)
        world.engine.close()


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_failed_copy_to_the_host_is_never_taken_for_done(
    blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found by whoever waits next: the next step, a flush, a preemption."""
    plain_run = RingStore.run
    left = [1000]

    def run(self: RingStore) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("the link broke")
        plain_run(self)

    monkeypatch.setattr(RingStore, "run", run)
    async with device("model", 4) as dev:
        world = World(dev, 4)
        engine = world.engine

        async def notice(what: str) -> object:
            if what == "step":
                return await world.launch(["a", "b"], {"a": 0, "b": 0}).wait()
            if what == "flush":
                return engine.flush_blocking("b") if blocking else await engine.flush("b")
            return engine.preempt_blocking("a") if blocking else await engine.preempt("a")

        for what in ("step", "flush", "preempt", "waiting step"):
            assert world.start("a", 9)
            assert world.start("b", 5)
            result = await world.launch(["a", "b"], {"a": 0, "b": 0}).wait()
            world.compare(result)
            engine.accept("a", 1)
            engine.accept("b", 1)
            await engine.streams["d2h"].synchronize()  # so that the count is the next step's
            left[0] = 2
            step = world.launch(["a"], {"a": 0})
            if what != "waiting step":
                await step.wait()  # whose copies trail behind
                engine.accept("a", 1)
            with pytest.raises(DecodeFailed) as caught:
                await notice(what)
            assert isinstance(caught.value.__cause__, StreamError)
            if what == "waiting step":
                # Told to the one who preempted, and to the one who still waits.  (The copies of
                # the step before are sure only once a later step was waited for.)
                assert caught.value.lost == {"a": 9}
                with pytest.raises(DecodeFailed) as caught:
                    await step.wait()
            assert engine.requests == ()
            for request, tokens in (("a", 9 if what == "waiting step" else 10), ("b", 5)):
                world.check_host(request, tokens)
                world.release(request, tokens, keep=False)
            world.seen.clear()
        engine.close()


async def test_rows_without_a_block_are_not_forgotten() -> None:
    """A table that was emptied too early is an error, and the rows are still there."""
    async with device("model") as dev:
        world = World(dev, 5, write_policy="write_back")
        assert world.start("a", 8)
        world.compare(await world.launch(["a"], {"a": 0}).wait())
        world.engine.accept("a", 1)
        kept = world.tables["a"].copy()
        world.tables["a"][:] = -1
        for leave in (world.engine.preempt, world.engine.evict, world.engine.flush):
            with pytest.raises(
                ParamInvalidError, match=r"table\[2\]: expected a block below 40 for token 8"
            ):
                await leave("a")
        assert world.engine.requests == ("a",)
        world.tables["a"][:] = kept
        assert await world.engine.preempt("a") == 9
        world.check_host("a", 9)


@pytest.mark.parametrize("clock", ["model", "wall"])
@pytest.mark.parametrize("what", ["preempt", "flush", "evict", "aclose"])
async def test_a_failure_that_somebody_else_was_told_of(
    what: str, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A synchronise of the whole device takes it; the engine counts what ran by itself."""
    plain_run = RingStore.run
    broken = False

    def run(self: RingStore) -> None:
        if broken:
            raise OSError("the link broke")
        plain_run(self)

    monkeypatch.setattr(RingStore, "run", run)
    async with device(clock, 4) as dev:
        world = World(dev, 4)
        engine = world.engine
        for breaks in (False, True):
            broken = breaks
            assert world.start("a", 9)
            assert world.start("b", 5)
            world.compare(await world.launch(["a", "b"], {"a": 0, "b": 0}).wait())
            engine.accept("a", 1)
            engine.accept("b", 1)
            if not breaks:  # the legal twin: nobody was told, since nothing failed
                await dev.synchronize()
                for request in ("a", "b"):
                    tokens = engine.context(request)
                    assert await engine.preempt(request) == tokens
                    world.check_host(request, tokens)
                    world.release(request, tokens, keep=False)
        with pytest.raises(StreamError, match=r"the link broke"):
            await dev.synchronize()
        broken = False
        with pytest.raises(DecodeFailed, match=r"reported outside the engine"):
            await (engine.aclose() if what == "aclose" else getattr(engine, what)("a"))
        if what == "aclose":
            return
        assert engine.requests == ()
        for request, tokens in (("a", 9), ("b", 5)):
            world.check_host(request, tokens)
            world.release(request, tokens, keep=False)
            assert world.start(request, tokens)
        world.compare(await world.launch(["a", "b"], {"a": 1, "b": 0}).wait())
        engine.close()


def test_select_cannot_change_the_engine_that_asks_it() -> None:
    """The step goes on as if nothing had been tried; looking at the engine is allowed."""
    with kvcore.Device("A3", clock="model", race_check="raise") as dev:
        tried: list[str] = []
        table = np.arange(16, dtype=np.int32)

        def select(request: Any, group: int, tokens: int) -> Any:
            assert engine.context("a") == 4
            assert engine.requests == ("a",)
            for call in (
                lambda: engine.launch(["a"]),
                lambda: engine.admit("b", table, 4),
                lambda: engine.accept("a", 1),
                lambda: engine.invalidate("a", 2),
                lambda: engine.preempt_blocking("a"),
                lambda: engine.evict_blocking("a"),
                lambda: engine.abort_blocking("a"),
                lambda: engine.flush_blocking("a"),
                lambda: engine.close(),
            ):
                with pytest.raises(StreamError, match=r"select\(\) to return ids and leave"):
                    call()
                tried.append("refused")
            return np.arange(3)

        engine = make(full_of(dev), dev, select=select)
        engine.admit("a", table, 4)
        engine.step_blocking(["a"])
        assert tried
        engine.accept("a", 1)
        assert engine.context("a") == 5
        assert engine.requests == ("a",)
        engine.abort_blocking("a")
        engine.close()
