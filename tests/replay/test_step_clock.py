# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a step's time against the clock of the engine that launches it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import kvcore
from kvcore._kernels.step_times import TimeLine
from kvcore.offload import DecodeEngine
from kvcore.replay import ModelProfile
from kvcore.replay.clock.step_clock import StepClock
from kvcore.runtime.profile import DeviceProfile

TOPK, CONTEXT, BLOCK = 2048, 8192, 128


def chosen(step: int, group: int, tokens: int) -> NDArray[np.int64]:
    """The newest, and of the prompt: all new at first, then more and more of the step before."""
    first = sum(max(1, TOPK // (1 + past) // (1 + group)) for past in range(step + 1))
    return np.append((first + np.arange(TOPK - 1)) % CONTEXT, tokens - 1)


@pytest.mark.parametrize("layer_us", [5.0, 200.0, 1000.0])
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("piece_us", [0.001, 0.05])
def test_the_engine_takes_as_long(layer_us: float, batch: int, piece_us: float) -> None:
    """From steps that wait for the host's launches to steps that wait for the link."""
    # Small rows over slow memory: as many bytes' time as large ones, and less to move here.
    model = ModelProfile.named("tiny-sparse")
    lanes = [n for n in model.shape.row_bytes if n]
    profile = DeviceProfile.named("A3").replace(h2d_descriptor=piece_us)
    groups = ModelProfile.named("glm-5.2").groups[:4]
    clock = StepClock(model, profile, groups, lanes=len(lanes))
    steps = [0]
    with kvcore.Device(profile, clock="model") as device:
        blocks = CONTEXT // BLOCK
        full = {
            layer: [device.empty_swapped((blocks + batch, BLOCK, n), "uint8") for n in lanes]
            for group in groups
            for layer in group
        }
        for buffers in full.values():
            for buffer in buffers:
                with buffer.host("w") as rows:
                    rows[...] = 1
        engine = DecodeEngine(
            device, full, groups=groups, max_batch=batch, max_tokens=CONTEXT + BLOCK, topk=TOPK,
            select=lambda request, group, tokens: chosen(steps[0], group, tokens),
            rows=lambda request, layer, first, n: [np.ones((n, size), np.uint8) for size in lanes],
            layer_us=layer_us, policy="previous",
        )  # fmt: skip
        for request in range(batch):
            # All read the same prompt, and write a block of their own.
            engine.admit(request, np.append(np.arange(blocks), blocks + request), CONTEXT)
        ours = theirs = 0.0
        for steps[0] in range(4):
            result = engine.step_blocking(range(batch))
            parts = list(result.requests.values())
            rows = np.array([(p.hits, p.misses, p.recent) for p in parts], float).sum(axis=0).T
            assert rows[0, 1] > 0
            times = clock.step(rows, batch, batch, batch, layer_us)
            ours += times.us
            theirs += result.us
            for request in range(batch):
                engine.accept(request, 1)
        engine.close()
    assert ours == pytest.approx(theirs, rel=0.01)


def test_what_is_waited_for() -> None:
    model, profile = ModelProfile.named("glm-5.2"), DeviceProfile.named("A3")
    hidden, exposed = (
        StepClock(model, profile, [(0, 1, 2)], lanes=2).step(np.array([rows]), 1, 1, 1, 5000.0)
        for rows in ((1900.0, 100.0, 0.0), (0.0, 200_000.0, 0.0))
    )
    assert hidden.link_us < exposed.link_us
    assert hidden.exposed_us < 0.5 * hidden.link_us  # beside the hits, and the layer before
    assert exposed.exposed_us > 0.5 * exposed.link_us
    clock = StepClock(model, profile, [(0,)], lanes=2)
    clock.advance(1000.0)
    assert clock.now == 1000.0


def test_a_look_ahead_leaves_the_time_line_as_it_is() -> None:
    model, profile = ModelProfile.named("glm-5.2"), DeviceProfile.named("A3")
    looked, plain = (StepClock(model, profile, [(0, 1, 2)], lanes=2) for _ in range(2))
    steps = [np.array([(1900.0 - 10 * n, 100.0 + 10 * n, 1.0)]) for n in range(6)]
    for rows in steps:
        ahead = [looked.peek(rows * by, 2, 2, 1, 300.0) for by in (0.5, 1.0, 20.0)]
        times = looked.step(rows, 2, 2, 1, 300.0)
        assert ahead[1] == times == plain.step(rows, 2, 2, 1, 300.0)
        assert ahead[0].us < ahead[2].us
        assert looked.now == plain.now


def test_steps_in_a_row_are_the_steps_one_by_one() -> None:
    model, profile = ModelProfile.named("glm-5.2"), DeviceProfile.named("A3")
    groups = [(0, 1, 2), (3,), (4, 5)]
    draw = np.random.default_rng(5)
    count = 40
    rows = draw.integers(0, 60_000, (count, 3, 3)) * (draw.random((count, 3, 3)) < 0.8)
    tokens = draw.integers(1, 33, count).astype(float)
    sent = tokens * draw.integers(0, 2, count)
    args = (rows.astype(float), tokens, sent, np.ceil(sent / 2), draw.random(count) * 1e3)
    waits = np.where(draw.random(count) < 0.3, draw.random(count) * 1e5, -1.0)
    looks = (draw.random(count) < 0.3).astype(np.uint8)
    looks[-1] = 0
    together, apart = (StepClock(model, profile, groups, lanes=2) for _ in range(2))
    times = together.steps(*args, waits=waits, looks=looks)
    assert len(times) == count
    for n in range(count):
        if waits[n] >= 0:
            apart.advance(waits[n])
        one = (apart.peek if looks[n] else apart.step)(*(each[n] for each in args))
        assert one.us == times.us[n]
        assert one.serve_us == times.serve_us[n]
        assert one.exposed_us == times.exposed_us[n]
        assert one.link_us == times.link_us[n]
        if not looks[n]:
            assert apart.now == times.now_us[n]
    assert together.now == apart.now
    # As far as an arrival, and a step that is looked at comes with the step itself.
    ends = times.now_us[looks == 0]
    until = float(ends[4] + ends[5]) / 2e3
    cut = StepClock(model, profile, groups, lanes=2)
    found = cut.steps(*args, waits=waits, looks=looks, until_ms=until)
    assert np.count_nonzero(looks[: len(found)] == 0) == 6
    assert cut.now == ends[5]
    assert len(cut.steps(*args, until_ms=0.0)) == 1  # the first comes in any case


def test_operations_of_a_step_that_cannot_be() -> None:
    order, before = np.arange(12, dtype=np.int32), np.full((12, 6), -1, np.int32)
    good = {"order": order, "before": before, "row_of": np.zeros(2, np.int32)}
    line = TimeLine(*good.values(), 2, 1.0)
    assert (line.layers, line.operations, line.rows, line.now) == (2, 12, 1, 0.0)
    for name, values in (
        ("order", order[:6]),
        ("order", np.zeros(12, np.int32)),
        ("order", order + 1),
        ("before", before[:6]),
        ("before", before[:, :5].copy()),
        ("before", before + 13),
        ("row_of", np.full(2, -1, np.int32)),
        ("row_of", np.zeros(0, np.int32)),
    ):
        with pytest.raises(ValueError, match="expected"):
            TimeLine(*{**good, name: values}.values(), 2, 1.0)
    prices = [np.zeros((3, 1, 6, 4)), np.zeros((3, 1, 6)), np.zeros(3), np.zeros(3, np.uint8)]
    out = np.zeros((3, 5))
    assert line.run(*prices, np.inf, out) == 3
    for i, each in enumerate(prices):
        fewer = [*prices[:i], each[:2], *prices[i + 1 :]]
        with pytest.raises(ValueError, match="prices of every step"):
            line.run(*fewer, np.inf, out)
