# SPDX-License-Identifier: Apache-2.0
"""How far assumed figures move a step and a ratio of runs, against runs with other figures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvcore.replay import (
    Deployment,
    ModelProfile,
    OffloadOptions,
    OffloadReplay,
    OffloadReport,
    TraceRequest,
)
from kvcore.replay.clock.band import FACTOR, MISSES, PREFILL, ratio_band, step_band
from kvcore.runtime import DeviceProfile

MODEL = ModelProfile.named("tiny-sparse").replace(layers=3, index_layers=(0, 1), topk=64)
REQUESTS = [TraceRequest(i, 0.0, 500, 30, (i,)) for i in range(4)]
CONTEXT = 515.0


def plain(basis: str = "assumed", **values: float) -> Deployment:
    """All figures of one basis, but those that are given."""
    figures = {key: float(MODEL[key].value) for key in MODEL.figures if key.startswith("step_f")}
    figures |= {key: float(MODEL[key].value) for key in ("step_request", "step_attended")}
    model = MODEL.replace(basis=basis, source="here", **{**figures, "step_indexed": 0.001})
    device = DeviceProfile.named("A3")
    known = {key: device.value(key) for key in device.figures}
    device = device.replace(basis=basis, source="here", **known)
    return Deployment.of(model, device).replace(basis="assumed", **values) if values else (
        Deployment.of(model, device)
    )  # fmt: skip


def run(deployment: Deployment, **more: Any) -> OffloadReport:
    chosen: dict[str, Any] = {
        "batch": 4, "pool": 256, "host_blocks": 64, "prefill_tokens_per_s": None,
        "sample_layers": 2, **more,
    }  # fmt: skip
    return OffloadReplay(REQUESTS, deployment, OffloadOptions(**chosen)).run()


def without(deployment: Deployment, **more: Any) -> OffloadReport:
    return run(deployment, policy="none", pool=None, weights_gib=0, **more)


def test_a_figure_moves_the_step_as_a_run_with_it_does() -> None:
    """The mean step stands for a short run, whose first steps miss everything: within a seventh."""
    base = plain("measured", step_fixed=500.0, h2d_descriptor=2.0)
    assert set(base.assumed()) == {"step_fixed", "h2d_descriptor"}
    report = run(base)
    band = step_band(report, CONTEXT)
    assert set(band.by) == {"step_fixed", "h2d_descriptor", MISSES}
    assert report.step_us is not None
    for key in ("step_fixed", "h2d_descriptor"):
        for side, by in ((0, 1 / FACTOR), (1, FACTOR)):
            moved = run(base.replace(basis="assumed", **{key: base.number(key) * by}))
            assert moved.step_us is not None
            change = moved.step_us / report.step_us - 1
            assert band.by[key][side] == pytest.approx(change, rel=0.15, abs=0.01)
    assert band.high == pytest.approx(math.hypot(*(both[1] for both in band.by.values())))
    assert band.decides == next(iter(band.by))
    low, high = band.around(100.0)
    assert low < 100 < high


def test_where_nothing_is_assumed_there_is_no_band() -> None:
    report = run(plain("measured"))
    band = step_band(report, CONTEXT)
    assert set(band.by) == {MISSES}  # the ids are made
    from kvcore.replay.traces.made_ids import MadeIds

    fitted = plain("measured").with_figures({}, ids=MadeIds("turnover", {}, "fitted", "here"))
    sure = step_band(run(fitted), CONTEXT)
    assert (sure.low, sure.high, sure.decides) == (0, 0, None)
    assert sure.around(5.0) == (5, 5)


def test_what_moves_both_sides_moves_their_ratio_less() -> None:
    base = plain("measured", step_fixed=500.0, h2d_descriptor=2.0)
    report, other = run(base), without(base)
    band = ratio_band(report, other, CONTEXT)
    assert report.tokens_per_s is not None
    assert other.tokens_per_s is not None
    ratio = report.tokens_per_s / other.tokens_per_s
    for key in ("step_fixed", "h2d_descriptor"):
        for by in (1 / FACTOR, FACTOR):
            changed = base.replace(basis="assumed", **{key: base.number(key) * by})
            sides = run(changed).tokens_per_s, without(changed).tokens_per_s
            assert sides[0] is not None
            assert sides[1] is not None
            change = sides[0] / sides[1] / ratio - 1
            # (dearer reads: a lower ratio)
            near = min(abs(change - side) for side in band.by[key])
            assert near < 0.01 + 0.15 * abs(change)
    step = step_band(report, CONTEXT)
    assert band.by["step_fixed"][1] < step.by["step_fixed"][1]
    # Whatever the link costs, the baseline does not see it.
    assert band.by["h2d_descriptor"][0] < 0 < band.by["h2d_descriptor"][1]
    assert set(band.to_dict()) == {"factor", "low", "high", "decides", "by"}


def test_the_rate_of_prefill_counts_where_it_is_assumed() -> None:
    base = plain("measured")
    both = run(base, prefill_tokens_per_s=3344.0), without(base, prefill_tokens_per_s=3344.0)
    assert PREFILL in ratio_band(*both, CONTEXT).by
    assert PREFILL not in step_band(both[0], CONTEXT).by
    given = run(base, prefill_tokens_per_s=5000.0), without(base, prefill_tokens_per_s=5000.0)
    assert PREFILL not in ratio_band(*given, CONTEXT).by
