# SPDX-License-Identifier: Apache-2.0
"""Sampled replays against full ones: near, and as sure as they say."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.errors import ParamInvalidError
from kvcore.replay import (
    ModelProfile,
    OffloadOptions,
    OffloadReplay,
    OffloadReport,
    TraceRequest,
    TurnoverIds,
    generate_trace,
)
from kvcore.replay.report.comparison import compare
from kvcore.replay.serving.interval import Usage, interval_of, quantile
from kvcore.replay.serving.miss_table import AGES, MissTable, classes_of
from kvcore.replay.serving.sample import draw_groups, draw_requests
from kvcore.replay.sweep import grid
from kvcore.replay.traces import request_rows

MODEL = ModelProfile.named("tiny-sparse").replace(layers=4, index_layers=(0, 1), topk=64)
COUNT = 24
#: Samples of the same workload that are looked at.
SEEDS = 6


@lru_cache
def trace(count: int = COUNT) -> list[TraceRequest]:
    """Requests of prompts from 200 to 2,000 tokens, with 12 to 40 to generate."""
    return [
        TraceRequest(r.index, r.timestamp_ms, 200 + 75 * i, 12 + 7 * (i % 5), tuple(
            100 * i + n for n in range(-(-(200 + 75 * i) // 512))
        ))
        for i, r in enumerate(generate_trace(count))
    ]  # fmt: skip


def run(**options: Any) -> OffloadReport:
    options = {
        "fidelity": "sampled", "batch": 6, "host_blocks": 600, "pool": 256, "verify_samples": 40,
        **options,
    }  # fmt: skip
    return OffloadReplay(trace(), MODEL, OffloadOptions(**options)).run()


@lru_cache
def full_run() -> OffloadReport:
    """The workload, served in full."""
    return run(fidelity="full")


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first third of the requests keep less of their selections than the others."""
    original = request_rows.RequestRows.ids_of

    def ids_of(self: request_rows.RequestRows, index: Any, group: int) -> TurnoverIds:
        ids = original(self, index, group)
        ids.overlap = 0.2 if index < COUNT // 3 else 0.7
        return ids

    monkeypatch.setattr(request_rows.RequestRows, "ids_of", ids_of)


@pytest.mark.parametrize("sample", [8, 16])
def test_most_samples_cover_what_the_full_replay_says(sample: int) -> None:
    full = full_run()
    assert full.hit_rate is not None
    assert full.interval is None
    covered = [0, 0]
    for seed in range(SEEDS):
        report = run(sample_requests=sample, sample_layers=1, sample_seed=seed)
        assert report.ok
        interval = report.interval
        assert interval is not None
        assert interval.hit_rate is not None
        assert interval.step_us is not None
        assert (interval.requests, interval.of) == (sample, COUNT)
        assert abs(report.hit_rate - full.hit_rate) < 0.03  # type: ignore[operator]
        covered[0] += abs(report.hit_rate - full.hit_rate) <= interval.hit_rate  # type: ignore[operator]
        covered[1] += abs(report.step_us - full.step_us) <= interval.step_us  # type: ignore[operator]
        # The workload is the same, whoever is in the sample.
        assert report.counters == full.counters
        assert report.totals.accepted == full.totals.accepted
    assert min(covered) >= SEEDS - 1, covered


def test_first_requests_that_miss_twice_as_often_count_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    full = run(fidelity="full")
    assert full.hit_rate is not None
    for seed in range(2):
        report = run(sample_requests=12, sample_seed=seed)
        interval = report.interval
        assert interval is not None
        assert interval.hit_rate is not None
        error = abs(report.hit_rate - full.hit_rate)  # type: ignore[operator]
        assert error <= interval.hit_rate, (seed, error, interval)
        assert interval.hit_rate > 0.005, "requests differ, and the interval must say so"


def test_with_four_requests_it_says_too_few_to_say() -> None:
    full = full_run()
    report = run(sample_requests=4)
    assert report.interval is not None
    assert report.interval.hit_rate is report.interval.step_us is None
    assert report.hit_rate == pytest.approx(full.hit_rate, abs=0.03)
    rows = dict(report.table("made up"))
    assert rows["sample"].startswith("4 of 24 requests, sample seed 0: too few to say how sure")
    assert "±" not in rows["hit rate"] + rows["step"]
    assert report.to_dict()["interval"] == {
        "level": 0.95, "sampled": 4, "of": 24, "hit_rate": None, "step_us": None,
    }  # fmt: skip


def test_the_table_and_the_report_have_the_interval() -> None:
    report = run(sample_requests=10)
    rows = dict(report.table("made up"))
    assert "±" in rows["hit rate"]
    assert "±" in rows["step"]
    assert rows["sample"].startswith("10 of 24 requests, sample seed 0; ± is the half")
    low, high = report.to_dict()["interval"]["hit_rate"]
    assert low < report.hit_rate < high  # type: ignore[operator]
    assert dict(full_run().table("made up")).get("sample") is None


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_sample_of_all_is_the_full_replay(drafts: int) -> None:
    options: dict[str, Any] = {"drafts": drafts, "accept": 0.6, "abort_share": 0.3}
    full = run(fidelity="full", **options)
    report = run(sample_requests=COUNT, sample_layers=2, **options)
    assert report.hit_rate == pytest.approx(full.hit_rate, abs=1e-9)
    assert report.totals.misses == pytest.approx(full.totals.misses)
    assert report.totals.recent == pytest.approx(full.totals.recent)
    assert report.interval is not None
    assert report.interval.hit_rate == 0.0
    # The step is by arithmetic still.
    assert report.interval.step_us == pytest.approx(0.01 * report.step_us)  # type: ignore[operator]
    assert report.step_us == pytest.approx(full.step_us, rel=0.01)


def test_another_sample_of_the_same_workload() -> None:
    one, two, three = (
        run(sample_requests=8, sample_seed=sample_seed, seed=seed)
        for sample_seed, seed in ((0, 0), (1, 0), (0, 1))
    )
    assert one.hit_rate != two.hit_rate
    assert one.counters == two.counters
    assert one.totals.written == two.totals.written
    assert {r.index for r in draw_requests(trace(), one.options)} == {
        r.index for r in draw_requests(trace(), three.options)
    }
    with pytest.raises(ParamInvalidError, match=r"^sample_seed: expected an integer from 0"):
        run(sample_seed=-1)


@pytest.mark.parametrize("count", [1, 5, 7, 24, 40])
def test_a_request_of_each_class_of_length(count: int) -> None:
    seen = set()
    for seed in range(200):
        chosen = draw_requests(trace(), OffloadOptions(sample_requests=count, sample_seed=seed))
        assert len({r.index for r in chosen}) == len(chosen) == min(count, COUNT)
        seen |= {r.index for r in chosen}
        ordered = sorted(trace(), key=lambda r: (r.total_tokens, r.index))
        places = [ordered.index(r) for r in chosen]
        assert [place * len(chosen) // COUNT for place in places] == pytest.approx(
            list(range(len(chosen))), abs=1
        )
    assert len(seen) == COUNT, "everybody has a chance"


@pytest.mark.parametrize(("sizes", "count"), [((1, 1, 4), 2), ((1, 1, 1), 1), ((3, 1, 2, 2), 3)])
def test_groups_are_drawn_so_that_their_mean_is_the_layers(
    sizes: tuple[int, ...], count: int
) -> None:
    values = np.arange(3.0 * len(sizes)).reshape(3, -1) ** 2
    # (the weights add up to one: what a group weighs by itself is taken before that)
    times = np.zeros(len(sizes))
    for index in range(4000):
        groups = draw_groups(sizes, count, OffloadOptions(), index)
        assert len(set(groups.numbers)) == len(groups.numbers) == count
        assert groups.weights.sum() == pytest.approx(1)
        times[list(groups.numbers)] += 1
    chance = np.minimum(1, np.array(sizes) * count / sum(sizes))
    certain = chance == 1
    rest = ~certain
    if certain.any():
        left = np.array(sizes)[rest]
        chance[rest] = left * (count - certain.sum()) / left.sum()
    assert times / 4000 == pytest.approx(chance, abs=0.03)
    every = draw_groups(sizes, 99, OffloadOptions(), 0)
    assert every.numbers == tuple(range(len(sizes)))
    assert every.mean(values) == pytest.approx(values @ np.array(sizes) / sum(sizes))


def test_the_table_of_misses_takes_ones_own_or_the_nearest_class() -> None:
    table = MissTable()
    places = classes_of(np.array([100, 50_000]), np.array([0, 9]))
    assert table.shares(places, [7, 8]).tolist() == [[0, 1, 0], [0, 1, 0]]
    table.learn(1, 100, 0, 10, np.array([0.0, 10.0, 0.0]))
    table.learn(2, 60_000, 8, 10, np.array([9.0, 1.0, 0.0]))
    table.learn(3, 60_000, 8, 30, np.array([15.0, 15.0, 0.0]))
    table.settle()
    assert table.samples == 3
    assert table.shares(places, [7, 8]).tolist() == [[0, 1, 0], [0.6, 0.4, 0]]
    # The age counts before the length.
    assert table.shares(classes_of(np.array([100]), np.array([12])), [7]).tolist() == [
        [0.6, 0.4, 0]
    ]
    own = classes_of(np.array([60_000, 60_000]), np.array([8, 8]))
    assert table.shares(own, [2, 3]).tolist() == [[0.9, 0.1, 0], [0.5, 0.5, 0]]


def test_classes_of_tokens_and_steps() -> None:
    ages = classes_of(np.full(9, 1), np.array([0, 1, 2, 3, 4, 5, 6, 8, 10**9]))
    assert ages.tolist() == [0, 1, 2, 3, 4, 4, 5, 6, AGES - 1]
    contexts = classes_of(np.array([0, 1, 2, 4, 2**30]), np.zeros(5, np.int64)) // AGES
    assert contexts.tolist() == [0, 0, 4, 8, 95]


def test_the_interval_is_the_jackknife_of_one_class() -> None:
    """One class of requests: the textbook's variance of a ratio, by delete-one."""
    table, usage = MissTable(), Usage()
    rates = np.array([0.5, 0.6, 0.65, 0.7, 0.72, 0.8, 0.85, 0.9, 0.95, 1.0])
    for request, rate in enumerate(rates):
        table.learn(request, 1000, 0, 100, np.array([100 * rate, 100 - 100 * rate, 0.0]))
    table.settle()
    places = classes_of(np.array([1000]), np.array([0]))
    usage.add(places, np.array([5000]), 0.25)
    usage.add(places, np.array([5000]), None)
    found = interval_of(table, usage, steps=2, step_us=7.0, requests=40, complete=True)
    n = len(rates)
    error = quantile(n - 1) * rates.std(ddof=1) / np.sqrt(n) * np.sqrt(1 - n / 40)
    assert found.hit_rate == pytest.approx(error)
    assert found.step_us == pytest.approx(error * 10_000 * 0.25 / 2 + 0.07)
    partial = interval_of(table, usage, steps=2, step_us=7.0, requests=40, complete=False)
    assert partial.hit_rate == pytest.approx(error / np.sqrt(1 - n / 40))
    nothing = interval_of(table, usage, steps=0, step_us=0.0, requests=40, complete=True)
    assert nothing.hit_rate is nothing.step_us is None


@pytest.mark.parametrize(("freedom", "value"), [(7, 2.3646), (15, 2.1314), (63, 1.9983)])
def test_quantiles_of_students_distribution(freedom: int, value: float) -> None:
    assert quantile(freedom) == pytest.approx(value, abs=0.005)


def test_an_interrupt_while_the_sample_is_served() -> None:
    calls = iter(range(1000))
    options = OffloadOptions(fidelity="sampled", host_blocks=600, pool=256)
    replay = OffloadReplay(trace(), MODEL, options)
    report = replay.run(stop=lambda: next(calls) == 3)
    assert report.interrupted
    assert report.hit_rate is report.step_us is None
    assert report.totals.real_rows > 0
    assert dict(report.table("made up"))["step"].startswith("-")


def test_prompts_of_another_device_do_not_wait_for_a_chunk() -> None:
    """Without prefill here, all that the batch has room for is there in the first step."""
    chunked, whole = (
        run(sample_requests=8, prefill_tokens_per_s=rate, chunk=256) for rate in (3344.0, None)
    )
    assert whole.totals.request_steps == chunked.totals.request_steps
    assert whole.totals.steps < chunked.totals.steps
    full = run(fidelity="full", prefill_tokens_per_s=None, chunk=256)
    assert full.totals.steps == whole.totals.steps
    # The whole of six prompts at once, however small a chunk is.
    assert whole.timeline.to_dict()["batch"][0] == 6


def test_reports_of_another_schema(tmp_path: Path) -> None:
    """What both have is compared; a sweep does not go on in another version's folder."""
    report = run(sample_requests=8).to_dict()
    assert report["schema"] == 2
    old = {key: value for key, value in report.items() if key not in ("schema", "interval")}
    assert compare(old, report) == []
    assert [d.path for d in compare(old, {**report, "steps": 1})] == ["steps"]
    assert [d.path for d in compare({**old, "schema": 2}, report)] == ["interval"]

    options = OffloadOptions(fidelity="sampled", host_blocks=600, pool=256)
    (point,) = grid(["batch=4"], options, MODEL, trace(), tmp_path)
    assert point.done() is None
    point.keep({**old, "sweep_key": point.key})
    with pytest.raises(
        ParamInvalidError, match=r"batch=4\.json: expected a sweep's report of schema"
    ):
        point.done()
    answer = {"decision": None, "answer": {"speed_up": None}}  # a sweep's reports have one
    point.keep({**report, **answer, "sweep_key": point.key})
    assert point.done() is not None
