# SPDX-License-Identifier: Apache-2.0
"""The engine's parts: order and time on the streams, accounting, write policies, layer events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import ParamInvalidError, StreamError
from kvcore.offload import WRITE_POLICIES, DecodeEngine, DevicePool, LayerEvents
from kvcore.offload.decode.request import DecodeRequest
from kvcore.offload.decode.write_policy import make_write_policy
from kvcore.replay import TurnoverIds

GROUPS = ((3,), (5, 8, 13))
LAYERS = (3, 5, 8, 13)
TOPK, TOKENS, BLOCK, ROW = 64, 2048, 16, 576
PROMPT = 1900


def run(
    steps: int,
    *,
    layers: tuple[int, ...] = LAYERS,
    accept: int = 1,
    drafts: int = 0,
    **options: Any,
) -> Any:
    """(results, device): four requests whose ids turn over as those of a published trace."""
    with kvcore.Device("A3", clock="model", trace=True, race_check="raise") as dev:
        full = {layer: [dev.empty_swapped((512, BLOCK, ROW), "uint8")] for layer in layers}
        for lanes in full.values():
            with lanes[0].host("w") as rows:
                rows[...] = 1
        ids = {
            (request, group): TurnoverIds(TOPK, seed=10 * request + group)
            for request in range(4)
            for group in range(2)
        }
        engine = DecodeEngine(
            dev, full,
            **{
                "groups": GROUPS, "max_batch": 4, "max_tokens": TOKENS, "topk": TOPK,
                "select": lambda request, group, tokens: ids[request, group].next(PROMPT),
                "rows": lambda request, layer, first, count: [np.full((count, ROW), 1, np.uint8)],
                "layer_us": 50.0, "max_drafts": drafts, **options,
            },
        )  # fmt: skip
        for request in range(4):
            table = np.arange(128) + 128 * request
            engine.admit(request, table, PROMPT)
        results = []
        for _ in range(steps):
            results.append(engine.step_blocking([2, 0, 3, 1], drafts))
            for request in range(4):
                engine.accept(request, accept)
        # (before the requests leave, which sends what write_back still owes)
        engine.results, engine.busy = results, dev.busy
        for request in range(4):
            assert engine.evict_blocking(request) == PROMPT + steps * accept
        engine.close()
        return engine, dev


def spans_of(dev: Any, step: int) -> dict[str, tuple[float, float]]:
    """(start, end) of every operation of a step, by name."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for span in dev.trace.spans:
        by_name.setdefault(span.name, []).append((span.start, span.end))
    return {name: spans[step] for name, spans in by_name.items() if len(spans) > step}


def test_the_model_clock_says_the_same_every_time() -> None:
    first, second = (run(4)[0].results for _ in range(2))
    assert first == second
    assert all(result.us >= 4 * 50 for result in first)
    assert [result.number for result in first] == [1, 2, 3, 4]


def test_what_overlaps_with_what() -> None:
    _, dev = run(3, layer_us=100.0)
    at = spans_of(dev, 1)
    start, end = 0, 1
    # A group's first layer needs the choice, made behind the layer before and the new rows.
    assert at["misses 5"][start] >= max(at["layer 3"][end], at["write 5"][end])
    # The next one loads while the first attends.
    assert at["misses 8"][end] < at["layer 5"][end]
    assert at["hits 8"][start] < at["layer 5"][end] + 20, "only the new rows come between"
    # Hits do not wait for misses; the attention waits for both.
    assert at["hits 5"][start] < at["misses 5"][end] <= at["layer 5"][start]
    # Installs leave the computing stream, behind both halves.
    assert at["install 5"][start] >= max(at["misses 5"][end], at["hits 5"][end])
    assert at["install 5"][start] < at["layer 5"][end]
    # New rows go to the host behind their writing, beside everything else.
    assert at["write 8"][end] <= at["save 8"][start] < at["layer 8"][end]
    _, dev = run(3, depth=1, layer_us=100.0)
    at = spans_of(dev, 1)
    assert at["misses 8"][start] >= max(at["layer 5"][end], at["install 5"][end])


def test_rows_and_bytes_add_up() -> None:
    engine, dev = run(5, drafts=1, accept=2, write_policy="write_through")
    totals = engine.totals
    assert totals.rows == totals.hits + totals.misses + totals.recent == 5 * 4 * 4 * TOPK
    assert totals.h2d_bytes == totals.misses * ROW == sum(r.h2d_bytes for r in engine.results)
    assert totals.hit_bytes == totals.hits * ROW
    assert totals.d2h_bytes == 5 * 4 * 2 * 4 * ROW
    assert (totals.steps, totals.tokens, totals.accepted) == (5, 40, 40)
    moved = {"misses": 0, "save": 0}
    for span in dev.trace.spans:
        kind = span.name.split()[0]
        if kind in moved:
            moved[kind] += span.bytes_moved
    assert moved == {"misses": totals.h2d_bytes, "save": totals.d2h_bytes}
    for result in engine.results:
        for part in result.requests.values():
            sums = np.array([part.hits, part.misses, part.recent]).sum(axis=0)
            assert sums.tolist() == [TOPK, TOPK]


def test_a_layer_without_rows_takes_its_time_and_nothing_else() -> None:
    """Layers of a group of its own (3) and of one that has rows (13)."""
    whole, _ = run(6, drafts=1, accept=2)
    part, dev = run(6, drafts=1, accept=2, layers=(5, 8))
    assert (part.totals.rows * 2, part.totals.d2h_bytes * 2) == (
        whole.totals.rows, whole.totals.d2h_bytes,
    )  # fmt: skip
    for all_rows, some in zip(whole.results, part.results, strict=True):
        for request, outcome in some.requests.items():
            full = all_rows.requests[request]
            assert outcome.misses == (0, full.misses[1])
            assert outcome.hits == (0, full.hits[1])
    kinds: dict[str, set[str]] = {}
    for span in dev.trace.spans:
        kind, _, layer = span.name.partition(" ")
        kinds.setdefault(kind, set()).add(layer)
    assert kinds["layer"] == {"3", "5", "8", "13"}
    for kind in ("write", "misses", "hits", "install", "save"):
        assert kinds[kind] == {"5", "8"}
    assert all(result.us >= 4 * 50 for result in part.results)


def test_statistics_of_an_engine() -> None:
    with kvcore.Device() as dev:
        full = {0: [np.zeros((4, 8, 2), np.uint8)]}
        engine = DecodeEngine(
            dev, full, groups=((0,),), max_batch=3, max_tokens=16, topk=4, max_drafts=1,
            select=lambda request, group, tokens: np.arange(max(0, tokens - 4), tokens),
            rows=lambda request, layer, first, count: [np.ones((count, 2), np.uint8)],
        )  # fmt: skip
        before = engine.statistics()
        assert (before.max_batch, before.free_places, before.requests) == (3, 3, 0)
        for name, block in (("a", 0), ("b", 1)):
            engine.admit(name, np.array([block]), 4)
        step = engine.launch(["a", "b"], {"a": 1, "b": 0})
        seen = engine.statistics()
        assert (seen.free_places, seen.requests, seen.leaving, seen.open_steps) == (1, 2, 0, 1)
        step.wait_blocking()
        engine.accept("a", 2)
        engine.evict_blocking("a")
        after = engine.statistics()
        assert (after.free_places, after.requests, after.open_steps) == (2, 1, 0)
        assert (after.steps, after.tokens, after.accepted, after.evicted) == (1, 3, 2, 1)
        assert after.rows == after.hits + after.misses + after.recent == 8
        # A snapshot: neither written, nor moved on by what follows.
        with pytest.raises(AttributeError):
            after.steps = 2  # type: ignore[misc]
        engine.step_blocking(["b"])
        assert (after.steps, engine.statistics().steps) == (1, 2)
        assert not after.closed
        engine.close()
        closed = engine.statistics()
        assert (closed.closed, closed.requests, closed.free_places) == (True, 0, 0)


def test_write_back_sends_fewer_pieces() -> None:
    through, _ = run(40, drafts=3, accept=2, write_policy="write_through", recent_rows=64)
    back, _ = run(40, drafts=3, accept=2, write_policy="write_back", recent_rows=64)
    # Rejected drafts went along; and each token was a piece of its own.
    assert through.totals.d2h_bytes == 40 * 4 * 4 * 4 * ROW
    assert back.totals.d2h_bytes == 40 * 4 * 2 * 4 * ROW
    assert back.busy["d2h"] < through.busy["d2h"] / 4
    assert back.totals.misses == through.totals.misses


def test_write_policies() -> None:
    assert WRITE_POLICIES == ("write_through", "write_back")
    through, back = (make_write_policy(name) for name in WRITE_POLICIES)
    assert through.due(clean=5, accepted=7, end=9, rows=8, most=2) == 9
    assert back.due(clean=5, accepted=7, end=9, rows=6, most=2) == 5, "one more step fits"
    assert back.due(clean=5, accepted=7, end=9, rows=5, most=2) == 7, "drafts are not sent"
    assert (through.rows_needed(3), back.rows_needed(3)) == (3, 6)
    assert (through.pieces(12, 4), back.pieces(12, 4), back.pieces(250, 4)) == (4, 1.0, 2.5)
    with pytest.raises(ParamInvalidError, match=r"expected one of write_through, write_back"):
        make_write_policy("none")


def test_copies_of_what_was_rolled_back_confirm_nothing() -> None:
    request = DecodeRequest("a", np.arange(4), 10, 0, {})
    request.wrote(3, rows=8)
    request.clean, epoch = 13, request.epoch
    request.accept(2)
    request.confirm(13, epoch)
    assert (request.context, request.clean, request.confirmed, request.window) == (12, 12, 12, 10)
    request.roll_back(9)
    assert (request.context, request.clean, request.confirmed, request.window) == (9, 9, 9, 9)
    # Written again, and a wait of before the roll-back comes back only now.
    request.wrote(3, rows=8)
    request.accept(3)
    request.clean = 12
    request.confirm(12, epoch)
    assert request.confirmed == 9
    request.confirm(12, request.epoch)
    assert request.confirmed == 12


async def test_layer_events_by_any_id() -> None:
    async with kvcore.Device("A3", clock="model", race_check="raise") as dev:
        events = LayerEvents(dev, (0, 2, 6))
        assert events.layers == (0, 2, 6)
        load, save, compute = dev.stream("load"), dev.stream("save"), dev.stream("compute")
        host = {layer: dev.empty_host((64,), "uint8") for layer in events.layers}
        rows = {layer: dev.empty((64,), "uint8") for layer in events.layers}
        back = {layer: dev.empty_host((64,), "uint8") for layer in events.layers}
        for layer, buffer in host.items():
            with buffer.host("w") as array:
                array[...] = layer
        for layer in events.layers:
            events.wait_for_layer_load(layer, compute)  # of nothing: no remark, no wait
            load.copy(rows[layer], host[layer])
            events.layer_loaded(layer, load)
        for layer in reversed(events.layers):
            events.wait_for_layer_load(layer, compute)
            compute.fill(rows[layer], layer + 1)
            save.wait_stream(compute)
            save.copy(back[layer], rows[layer])
            events.layer_saved(layer, save)
            events.wait_for_layer_save(layer, compute)
            compute.fill(rows[layer], 0)
        events.wait_for_save(load)
        load.copy(rows[2], host[2])  # in order behind compute's? no: behind the saves alone
        await events.synchronize()
        events.synchronize_blocking()
        assert dev.race_remarks == ()
        for layer, buffer in back.items():
            with buffer.host("r") as array:
                assert (array == layer + 1).all()
        for call in (events.layer_loaded, events.wait_for_layer_load, events.wait_for_layer_save):
            with pytest.raises(ParamInvalidError, match=r"layer: expected one of 0, 2, 6, got 1"):
                call(1, compute)
        for layers, match in (
            ((0, 0), r"layers\[1\]: expected each layer once"),
            ((-1,), "layers"),
        ):
            with pytest.raises(ParamInvalidError, match=match):
                LayerEvents(dev, layers)


@pytest.mark.parametrize("policy", ["lru", "fifo", "arc", "previous"])
def test_a_serve_in_halves_is_a_serve(policy: str) -> None:
    draw = np.random.default_rng(3)
    full = {
        layer: [draw.integers(0, 256, (40, size), np.uint8) for size in (9, 4)] for layer in (1, 4)
    }
    pools = [
        DevicePool(full, capacity=6 if policy == "previous" else 12, topk=6, max_tokens=40,
                   policy=policy)
        for _ in range(2)
    ]  # fmt: skip
    for pool in pools:
        pool.admit("a")
    for step in range(30):
        ids = draw.choice(40, 6, replace=False)
        ids[draw.random(6) < 0.1] = -1
        outs = [[np.zeros((6, size), np.uint8) for size in (9, 4)] for _ in range(2)]
        one, two = (pool.plan("a", ids) for pool in pools)
        for layer in (1, 4):
            pools[0].serve(one, layer, outs[0])
            pools[0].install(one, layer, outs[0])
            halves = [
                pools[1].plan_hits(two, layer, outs[1]), pools[1].plan_misses(two, layer, outs[1])
            ]  # fmt: skip
            if step % 2:
                halves.reverse()
            moved = []
            for half in halves:
                with pytest.raises(StreamError, match=r"expected this selection served first"):
                    pools[1].install(two, layer, outs[1])
                half.run()
                moved.append(half.bytes_moved)
            pools[1].install(two, layer, outs[1])
            # Each wanted row once, by one of the halves.
            assert sum(moved) == 13 * int((ids >= 0).sum()) == 13 * (two.hits + two.misses)
            reads = halves[step % 2].touched()[0]
            assert {a.argument: a.nbytes for a in reads}["full[0]"] == 0
            for a, b in zip(outs[0], outs[1], strict=True):
                assert (a == b).all()
