# SPDX-License-Identifier: Apache-2.0
"""Latencies of requests: by hand, and recounted from outside a replay."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcore.errors import ParamInvalidError
from kvcore.replay import (
    ModelProfile,
    OffloadOptions,
    OffloadReplay,
    TraceRequest,
)
from kvcore.replay.metrics.latency import Latencies, Progress, Slo

MODEL = ModelProfile.named("tiny-sparse").replace(layers=3, index_layers=(0, 1), topk=64)
REQUESTS = [
    TraceRequest(i, 400.0 * i, 300 + 90 * i, (1, 2, 9, 14)[i % 4], tuple(range(10 * i, 10 * i + n)))
    for i, n in enumerate(-(-(300 + 90 * i) // 512) for i in range(8))
]
#: More than 40 blocks of 4 tokens hold at a time.
CROWD = [TraceRequest(i, 0.0, 64, 40, (i,)) for i in range(4)]


def options(**more: Any) -> OffloadOptions:
    return OffloadOptions(
        **{"fidelity": "sampled", "batch": 3, "host_blocks": 200, "pool": 256, **more}
    )


def test_one_request_by_hand() -> None:
    felt = Latencies(Slo.parse("ttft=5ms,tpot=2ms"))
    progress = Progress(tokens=4, arrived_us=1000.0, admitted_us=2000.0)
    felt.first(progress, 6000.0)
    for now, written in ((8000.0, 1), (9000.0, 2), (13_000.0, 3), (99_000.0, 4)):
        felt.more(progress, now, written)
    # The step that writes the last of four tokens computes none: its time is not the user's.
    assert progress.values() == {
        "queue": 1000.0, "ttft": 5000.0, "tpot": 7000 / 3, "e2e": 12_000.0,
    }  # fmt: skip
    felt.leave(progress, finished=True)
    assert (felt.finished, felt.good, felt.attained) == (1, 0, 0.0)
    itl = felt.summaries()["itl"]
    assert itl is not None
    assert (itl.count, itl.mean) == (3, 7000 / 3)
    assert (itl.p50, itl.p99) == pytest.approx((2000, 4000), rel=0.005)


def test_drafts_come_out_together_and_a_single_token_has_no_rate() -> None:
    felt = Latencies()
    three, one = Progress(7, 0.0, 0.0), Progress(1, 0.0, 0.0)
    felt.first(one, 10.0)
    felt.more(one, 20.0, 1)
    assert one.values()["e2e"] == 10.0
    assert math.isnan(one.values()["tpot"])
    felt.first(three, 100.0)
    felt.more(three, 200.0, 3)
    felt.more(three, 300.0, 6)
    felt.more(three, 400.0, 7)
    assert three.values()["tpot"] == 200 / 6
    felt.leave(one, finished=True)
    felt.leave(three, finished=False)
    found = felt.summaries()
    assert found["tpot"] is None, "one has no rate, the other was aborted"
    assert found["ttft"] is not None
    assert found["ttft"].count == 2
    assert (felt.finished, felt.attained) == (1, None)


def test_a_limit_of_what_a_request_does_not_have_is_met() -> None:
    slo = Slo.parse("tpot=1us, e2e=11us")
    one = Progress(1, 0.0, 0.0)
    Latencies().first(one, 11.0)
    assert slo.is_met(one.values())
    assert not slo.is_met({**one.values(), "e2e": 12.0})


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ttft=2s,tpot=50ms", {"ttft": 2e6, "tpot": 5e4}),
        ("ttft=2", {"ttft": 2e6}),
        ("e2e=0.5 , tpot=700us", {"e2e": 5e5, "tpot": 700.0}),
    ],
)
def test_limits(text: str, limits: dict[str, float]) -> None:
    assert Slo.parse(text).limits == limits
    assert options(slo=text).check(MODEL)


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=", "ttft=0", "ttft=-1s", "ttft=nan", "ttft=inf", "ttft=1h", "itl=1s",
     "ttft=1,ttft=2", "ttft=1s,", "tpot=1e30s", "ttft=s", "TTFT=1", "ttft=1s tpot=1s", "\x1b=1"],
)  # fmt: skip
def test_limits_that_are_none_are_refused_before_any_work(text: str) -> None:
    with pytest.raises(ParamInvalidError, match=r"^slo: expected "):
        OffloadReplay(REQUESTS, MODEL, options(slo=text))


def test_values_of_other_types_are_refused() -> None:
    for slo in (3, b"ttft=1", ("ttft", 1)):
        with pytest.raises(ParamInvalidError, match=r"^slo: expected a text"):
            options(slo=slo).check(MODEL)
    for attain in (-0.1, 1.1, math.nan, None, "1"):
        with pytest.raises(ParamInvalidError, match=r"^attain: expected a number from 0 to 1"):
            options(attain=attain).check(MODEL)


@pytest.mark.parametrize("fidelity", ["full", "sampled"])
@pytest.mark.parametrize("more", [
    {"arrivals": "time"},
    {"arrivals": "time", "drafts": 2, "accept": 0.5},
    {"arrivals": "order", "host_blocks": 40, "block_size": 4},
    {"arrivals": "order", "prefill_tokens_per_s": None},
])  # fmt: skip
def test_latencies_are_those_seen_from_outside(fidelity: str, more: dict[str, Any]) -> None:
    """After each step the scheduler says how far everybody is; the times follow from that."""
    crowded = "host_blocks" in more
    requests = CROWD if crowded else REQUESTS
    replay = OffloadReplay(requests, MODEL, options(fidelity=fidelity, **more))
    replay.serving.sums_steps = False  # to be looked at after each; the sums are the same
    by_time = more["arrivals"] == "time"
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    running: dict[int, Any] = {}
    while True:
        if not replay.step():
            break
        now = replay.serving.now_us
        running.update({r.request.index: r for r in replay.scheduler.running})
        for index, state in running.items():
            request = state.request
            out = state.reached - request.input_length
            if out >= 0 and index not in first:
                first[index] = now
            # (one came out when the prompt was there)
            if out >= 0 and 1 + out >= request.output_length and index not in last:
                last[index] = now
    report = replay.report()
    replay.close()
    assert set(first) == set(last) == {r.index for r in requests}
    arrived = {r.index: r.timestamp_ms * 1e3 if by_time else 0.0 for r in requests}
    ttft = np.array([first[i] - arrived[i] for i in first])
    e2e = np.array([last[i] - arrived[i] for i in first])
    many = [r for r in requests if r.output_length > 1]
    tpot = [(last[r.index] - first[r.index]) / (r.output_length - 1) for r in many]
    found = report.latencies.summaries()
    for name, values in (("ttft", ttft), ("e2e", e2e), ("tpot", np.array(tpot))):
        one = found[name]
        assert one is not None
        assert one.count == len(values)
        assert one.mean == pytest.approx(values.mean())
        assert one.p90 == pytest.approx(np.percentile(values, 90))
    queue = found["queue"]
    assert queue is not None
    assert 0 <= queue.mean <= found["ttft"].mean  # type: ignore[union-attr]
    assert (report.counters.preemptions > 0) is crowded


def test_prompts_computed_in_between_are_felt() -> None:
    """A step alone leaves out what the users of the same die wait for."""
    alone, beside = (
        OffloadReplay(
            [TraceRequest(0, 0.0, 600, 40, (1, 2)), TraceRequest(1, 20.0, n, 5, (9,) * (n // 512))],
            MODEL, options(arrivals="time", chunk=512, sample_requests=2),
        ).run()
        for n in (512, 4096)
    )  # fmt: skip
    assert beside.step_us == pytest.approx(alone.step_us, rel=0.02)
    one, two = (report.latencies.summaries()["itl"] for report in (alone, beside))
    assert one is not None
    assert two is not None
    assert two.p99 > 1.5 * one.p50
    assert two.mean > 1.5 * one.mean


def test_the_report_says_whether_the_limits_hold() -> None:
    late = [replace(r, timestamp_ms=0.0) for r in REQUESTS]
    for slo, holds in (("ttft=100s", True), ("ttft=1us,tpot=1us", False)):
        report = OffloadReplay(late, MODEL, options(slo=slo, attain=0.5)).run()
        said = report.to_dict()["slo"]
        assert said["holds"] is holds
        assert said["attained"] == (1.0 if holds else 0.0)
        assert (said["good_requests_per_s"] > 0) is holds
        row = dict(report.table("made up"))["SLO"]
        assert ("the limits hold" in row) is holds
    report = OffloadReplay(late, MODEL, options()).run()
    rows = dict(report.table("made up"))
    assert report.to_dict()["slo"] is None
    assert "SLO" not in rows
    assert "wait for the whole trace's turn" in rows["first token"]
    assert {"queueing", "between tokens", "a token", "last token"} <= set(rows)
    assert report.to_dict()["latency_ms"]["ttft"]["count"] == 8


def test_a_rate_of_short_prompts_is_said_to_be_stretched() -> None:
    for tokens, stretched in ((4096, False), (8192, True)):
        request = TraceRequest(0, 0.0, tokens, 2, tuple(range(tokens // 512)))
        row = dict(OffloadReplay([request], MODEL, options()).run().table("made up"))["prefill"]
        assert ("extrapolated: these prompts have 8,192 tokens, 2.0 times" in row) is stretched
    given = OffloadReplay([request], MODEL, options(prefill_tokens_per_s=500.0)).run()
    assert "extrapolated" not in dict(given.table("made up"))["prefill"]
