# SPDX-License-Identifier: Apache-2.0
"""Predictions of published deployments: what is fitted is met, what is predicted is near."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvcore.errors import ParamInvalidError
from kvcore.replay import ModelProfile
from kvcore.replay.clock.prediction import (
    Deployment,
    calibrate,
    decode_bytes,
    most_requests,
    predict,
    sensitivity,
)

ROOT = Path(__file__).parents[2]
#: What hit_rate makes of score_trace, rounded; the example takes them from there.
RATES = {8192: 0.857, 16_384: 0.933}


def test_two_figures_are_fitted_and_the_rest_is_predicted() -> None:
    deployment = Deployment.glm_5_2()
    rows = predict(deployment, RATES)
    fitted = [p for p in rows if p.row.use != "predicted"]
    assert [p.error for p in fitted] == pytest.approx([0] * 3, abs=1e-6)
    predicted = {(p.row.mode, p.row.pool): p.error for p in rows if p.row.use == "predicted"}
    assert set(predicted) == {("GE graph", 16_384), ("NPUGraph", 8192), ("NPUGraph", 16_384)}
    # As the page reports them: not a bound that was aimed at.
    assert max(map(abs, predicted.values())) < 0.05
    for p in rows:
        assert sum(p.parts) == pytest.approx(p.ms)
        published = {71.21: 2427, 100.55: 3437, 92.03: 3755, 71.59: 2414, 105.04: 3290, 95.67: 3612}
        exact = p.row.batch * 2.7 / p.row.ms * 1e3
        assert exact == pytest.approx(published[p.row.ms], abs=1)
    fixed, piece_us = calibrate(deployment, RATES)
    assert set(fixed) == {"GE graph", "NPUGraph"}
    assert 0 < piece_us < 1


def test_more_misses_and_dearer_reads_take_longer() -> None:
    deployment = Deployment.glm_5_2()
    best, worst = (predict(deployment, {**RATES, 16_384: rate})[2].ms for rate in (0.99, 0.86))
    assert best < worst
    moved = {(figure, by): change for figure, by, change in sensitivity(deployment, RATES)}
    assert len({figure for figure, _ in moved}) >= 10
    # The row that calibrates takes most of a change back; the one of the same pool takes all.
    assert moved["misses of 8192 entries", 1.5][1] == pytest.approx(0, abs=1e-6)
    assert all(len(change) == 3 for change in moved.values())
    assert not any(math.isnan(x) for change in moved.values() for x in change)


def test_what_cannot_be_calibrated_is_refused() -> None:
    deployment = Deployment.glm_5_2()
    slow = replace(deployment, device=deployment.device.replace(hbm_descriptor=1.0))
    with pytest.raises(ParamInvalidError, match=r"row GE graph, 8192: expected at most 100\.55 ms"):
        predict(slow, RATES)
    with pytest.raises(ParamInvalidError, match=r"hit_rates: expected a rate for 16384 entries"):
        predict(deployment, {8192: 0.857})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("value = 32", "value = -1"), "dies: expected a number of at least 0, got -1"),
        (("value = 32", "value = true"), "dies: expected a number"),
        (("[dies]", "[cards]"), "dies: expected a table of value, basis and source"),
        (('model = "glm-5.2"', 'model = "gpt"'), "model: expected one of tiny"),
        (('use = "calibrates host reads"', 'use = "predicted"'), "rows: expected one row that"),
        (('use = "predicted"', 'use = "other"'), r"rows\.use: expected one of"),
        (("pool = 8192", "pol = 8192"), "rows: expected mode, pool, batch, ms and use"),
        (("[dies]", "[dies"), "deployment: expected a TOML file"),
    ],
)
def test_broken_deployments(tmp_path: Path, change: tuple[str, str], match: str) -> None:
    text = (ROOT / "kvcore" / "replay" / "clock" / "published_glm_5_2.toml").read_text()
    assert change[0] in text
    path = tmp_path / "own.toml"
    path.write_text(text.replace(*change))
    with pytest.raises(ParamInvalidError, match=match):
        Deployment.load(path)


@pytest.mark.parametrize(
    ("before", "after"),
    # The published limits without and with offload: batch of 128 dies, length.
    [((1024, 65_536), (2048, 65_536)), ((128, 262_144), (128, 393_216))],
)
def test_deepseek_grows_as_published(before: tuple[int, int], after: tuple[int, int]) -> None:
    """The budget that the row without offload sets holds the larger one only with offload."""
    model, dies = ModelProfile.named("deepseek-v3.2-c8"), 128
    budget = decode_bytes(model, before[0] // dies, before[1])
    larger = after[0] // dies, after[1]
    assert decode_bytes(model, *larger) > budget
    assert decode_bytes(model, *larger, drafts=3, pool=0) <= budget
    assert most_requests(model, budget, after[1], drafts=3, pool=0) * dies >= after[0]
    # Without offload the budget is one row's: it holds that row and no more.
    assert most_requests(model, budget, before[1]) * dies == before[0]


def test_glm_doubles_its_batch_as_published() -> None:
    model = ModelProfile.named("glm-5.2")
    budget = decode_bytes(model, 2, 65_536)  # batch 64 of 32 dies
    assert most_requests(model, budget, 65_536) * 32 == 64
    for pool in (8192, 16_384):
        assert most_requests(model, budget, 65_536, drafts=3, pool=pool) * 32 >= 128


def test_the_example_prints_both(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "predict_offload.py", "--steps", "40"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    lines = done.stdout.splitlines()
    assert sum(line.endswith("predicted") for line in lines) == 3
    assert any(line.startswith("device hbm_descriptor") for line in lines)
    assert "the budget holds batch" in done.stdout
