# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a step's time against the clock of the engine that launches it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.offload import DecodeEngine
from kvcore.offload.decode.sample import MissModel
from kvcore.replay import ModelProfile
from kvcore.replay.clock.step_clock import StepClock
from kvcore.runtime.profile import DeviceProfile


def estimate(_: MissModel, age: int, group: int, wanted: int) -> tuple[int, int, int]:
    """All is missing at first; then more is held from step to step, more in later groups."""
    misses = wanted // (1 + age) // (1 + group)
    return wanted - misses - 2 * (age > 0), misses, 2 * (age > 0)


def unused(*_: Any) -> Any:
    raise AssertionError("no request is real")


@pytest.mark.parametrize("layer_us", [5.0, 200.0, 1000.0])
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("piece_us", [0.001, 0.05])
def test_the_engine_takes_as_long(
    layer_us: float, batch: int, piece_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From steps that wait for the host's launches to steps that wait for the link."""
    monkeypatch.setattr(MissModel, "estimate", estimate)
    model = ModelProfile.named("glm-5.2")
    profile = DeviceProfile.named("A3").replace(h2d_descriptor=piece_us)
    groups = model.groups[:6]
    clock = StepClock(model, profile, groups, lanes=2)
    with kvcore.Device(profile, clock="model") as device:
        full = {0: [device.empty_swapped((1, 128, n), "uint8") for n in (1024, 128)]}
        engine = DecodeEngine(
            device, full, groups=groups, max_batch=batch, max_real=0, max_tokens=70_000,
            topk=2048, select=unused, rows=unused, layer_us=layer_us,
        )  # fmt: skip
        table = np.zeros(600, np.int64)
        for request in range(batch):
            engine.admit(request, table, 65_536, real=False)
        ours = theirs = 0.0
        for _ in range(4):
            result = engine.step_blocking(range(batch))
            parts = list(result.requests.values())
            rows = np.array([(p.hits, p.misses, p.recent) for p in parts], float).sum(axis=0).T
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
