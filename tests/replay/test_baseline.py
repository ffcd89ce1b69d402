# SPDX-License-Identifier: Apache-2.0
"""The baseline of offload: all caches on the device, and no more requests than fit there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli.program import main
from kvcore.errors import ParamInvalidError
from kvcore.replay import (
    ModelProfile,
    OffloadOptions,
    OffloadReplay,
    OffloadReport,
    OnDevice,
    Replay,
    TraceRequest,
)
from kvcore.replay.answer import baseline
from kvcore.replay.answer.baseline import run_baseline
from kvcore.runtime import DeviceProfile

MODEL = ModelProfile.named("tiny-sparse").replace(layers=3, index_layers=(0, 1), topk=64)
GLM = ModelProfile.named("glm-5.2")
GIB = 2**30
REQUESTS = [TraceRequest(i, 0.0, 500 - 12 * i, 30, (i,)) for i in range(9)]
#: Bytes of a token in all caches: rows of 160 bytes in three layers, two indexers of 32.
TOKEN = 3 * 160 + 2 * 32


def run(model: ModelProfile = MODEL, **options: Any) -> OffloadReport:
    options = {"policy": "none", "batch": 4, **options}
    return OffloadReplay(REQUESTS, model, OffloadOptions(**options)).run()


def room_for(blocks: float) -> float:
    """The GiB of weights that leave room for so many blocks of 128 tokens."""
    return (DeviceProfile.named("A3").capacity_bytes - blocks * 128 * TOKEN) / GIB


def test_nothing_is_offloaded() -> None:
    report = run()
    offloaded = run(policy="lru", fidelity="full", host_blocks=400)
    assert report.counters == offloaded.counters
    assert report.totals.written == offloaded.totals.written
    assert report.totals.compute_us == pytest.approx(offloaded.totals.compute_us)
    figures = report.to_dict()
    assert set(figures["bytes"].values()) == {0}
    assert figures["hit_rate"] is figures["interval"] is figures["overlap"] is None
    assert figures["rows"]["real"] == figures["verified"]["samples"] == 0
    assert report.step_us < offloaded.step_us  # type: ignore[operator]
    assert report.step_us >= figures["model_time_us"]["compute"] / report.totals.steps  # type: ignore[operator]
    rows = dict(report.table("made up"))
    assert rows["pool"] == "none: all caches on the device, nothing offloaded"
    assert rows["fidelity"] == "the steps' arithmetic alone: no row is moved"
    same = Replay(REQUESTS, OnDevice(MODEL, OffloadOptions(policy="none", batch=4))).run()
    assert same.totals == report.totals


def test_the_device_has_room_for_so_many_blocks() -> None:
    capacity = DeviceProfile.named("A3").capacity_bytes
    for weights in (None, 0.0, 40.0, room_for(20.5)):
        memory = run(weights_gib=weights).to_dict()["memory"]
        left = capacity - int((weights or 0.0) * GIB)
        assert memory["device_blocks"] == min(2**24, left // (128 * TOKEN))
        assert memory["peak_device_bytes"] == memory["peak_device_blocks"] * 128 * TOKEN
        assert memory["peak_device_bytes"] <= left
        assert memory["host_blocks"] == memory["peak_host_blocks"] == memory["peak_host_bytes"] == 0
        assert memory["weight_bytes"] == int((weights or 0.0) * GIB)
    assert memory["device_blocks"] == 20
    peak = dict(run(weights_gib=40.0).table("made up"))["peak memory"]
    assert "of 64 GiB beside 40.0 of weights" in peak


def test_requests_wait_for_room_on_the_device() -> None:
    """With the host's memory behind it the batch is full; on the device alone it is not."""
    roomy, cramped = (run(weights_gib=room_for(blocks)) for blocks in (100.5, 11.5))
    offloaded = run(policy="lru", fidelity="full", host_blocks=400, weights_gib=room_for(100.5))
    assert roomy.counters == offloaded.counters
    assert cramped.totals.steps > roomy.totals.steps
    assert cramped.totals.request_steps / cramped.totals.steps < 3
    assert cramped.finished_requests == len(REQUESTS)
    queues = [report.latencies.summaries()["queue"] for report in (roomy, cramped)]
    assert queues[0].mean < queues[1].mean  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pool": 256}, "pool: expected none: without offload there is no pool, got 256"),
        ({"weights_gib": 64.0}, "weights_gib: expected room for a block of .* of A3, got 64"),
        ({"weights_gib": 1e6}, "weights_gib: expected room for a block"),
        ({"weights_gib": -1.0}, "weights_gib: expected a number"),
        ({"weights_gib": math.nan}, "weights_gib: expected a number"),
        ({"weights_gib": "40"}, "weights_gib: expected a number"),
        ({"weights_gib": True}, "weights_gib: expected a number"),
        ({"weights_gib": room_for(4.5)}, "request 0: expected at most 4 blocks of 128 tokens"),
        (
            {"policy": "lru", "weights_gib": 63.9999, "batch": 4096, "pool": 256},
            r"batch: expected at most \d+ requests: 64 GiB of A3, less 64.0 of weights, for pools",
        ),
        (
            {"policy": "lru", "weights_gib": 70.0},
            r"batch: expected at most 0 requests: 64 GiB of A3, less 70.0 of weights, for pools",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ParamInvalidError, match=match):
        run(**options)


def test_a_model_must_say_what_its_weights_take() -> None:
    with pytest.raises(
        ParamInvalidError, match=r"^weights_gib: expected GiB of weights .* 'weights' of glm-5\.2$"
    ):
        OffloadOptions(policy="none").check(GLM)
    assert GLM.weights_gib is None
    assert OffloadOptions(policy="none", weights_gib=40.0).check(GLM)[1] == 0
    assert OffloadOptions(policy="none").check(GLM.replace(weights=40.0))[1] == 0
    # With offload they are not known and not counted, as the table says.
    assert OffloadOptions(policy="lru", batch=2).check(GLM)


def test_the_published_step_without_offload() -> None:
    """Two requests of 64K a die and three drafts: the row that the model's figures are from."""
    requests = [
        TraceRequest(i, 0.0, 65_536, 40, tuple(range(128 * i, 128 * (i + 1)))) for i in (0, 1)
    ]
    options = OffloadOptions(
        policy="none", drafts=3, batch=2, weights_gib=30.0, prefill_tokens_per_s=None
    )
    report = OffloadReplay(requests, GLM, options).run()
    assert report.step_us == pytest.approx(71_210, rel=0.01)


def test_the_command_takes_it_and_sweeps_over_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    assert main(["replay", "--requests", "2", "--policy", "none", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["memory"]["host_blocks"] == 0
    assert "all caches on the device" in capsys.readouterr().out
    ends = ["--model", "glm-5.2", "--requests", "1", "--policy", "none"]
    assert main(["replay", *ends]) == 2
    assert "--weights-gib" in capsys.readouterr().err
    folder = tmp_path / "many"
    sweep = ["--sweep", "policy=lru,none", "--results", str(folder), "--jobs", "1"]
    assert main(["replay", "--requests", "1", *sweep]) == 0
    assert {p.name for p in folder.iterdir()} == {"policy=lru.json", "policy=none.json"}


@pytest.mark.parametrize("of_all", [{}, {"drafts": 1}, {"abort_share": 0.5}], ids=str)
@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 7},
        {"sample_seed": 7},
        {"policy": "fifo"},
        {"pool": 512},
        {"write_policy": "write_back"},
        {"batch": 3},
        {"arrivals": "time"},
    ],
    ids=str,
)
def test_runs_share_a_baseline_only_where_it_is_the_same(
    changed: dict[str, Any], of_all: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [TraceRequest(i, 40.0 * i, 500 - 12 * i, 30, (i,)) for i in range(9)]
    first, second = (
        OffloadOptions(**{"batch": 4, "host_blocks": 400, "weights_gib": 1.0, **of_all, **change})
        for change in ({}, changed)
    )
    served: list[OffloadOptions] = []

    def counted(*args: Any, **named: Any) -> baseline.Baseline:
        served.append(args[2])
        return run_baseline(*args, **named)

    monkeypatch.setattr(baseline, "run_baseline", counted)
    kept = baseline.Baselines()
    got = [kept.serve(requests, MODEL, own) for own in (first, second, first)]
    alone = [run_baseline(requests, MODEL, own) for own in (first, second, first)]
    for one, other in zip(got, alone, strict=True):
        assert one.report is not None
        assert other.report is not None
        assert baseline_figures(one.report) == baseline_figures(other.report)
    differs = not {"seed", "sample_seed", "policy", "pool", "write_policy"} & set(changed)
    assert len(served) == 1 + (differs or ("seed" in changed and bool(of_all)))


def baseline_figures(report: OffloadReport) -> dict[str, Any]:
    found = report.to_dict()
    return {name: value for name, value in found.items() if name not in ("options", "seconds")}


def test_a_baseline_that_was_interrupted_is_not_kept() -> None:
    kept = baseline.Baselines()
    options = OffloadOptions(batch=4, host_blocks=400, weights_gib=1.0)
    assert kept.serve(REQUESTS, MODEL, options, stop=lambda: True).report is None
    assert kept.serve(REQUESTS, MODEL, options).report is not None
