# SPDX-License-Identifier: Apache-2.0
"""The highest rate of arrivals that holds the limits: on a queue worked out by hand, and served."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.cli.program import main
from kvcore.errors import ParamInvalidError
from kvcore.replay import ModelProfile, OffloadOptions, TraceRequest
from kvcore.replay.answer.rate import RateSearch, Search, at_rate, judged, own_rate
from kvcore.replay.answer.run import serve
from kvcore.replay.metrics.latency import Latencies, Progress, Slo
from kvcore.runtime import DeviceProfile

MODEL = ModelProfile.named("tiny-sparse").replace(layers=3, index_layers=(0, 1), topk=64)
TOKEN = 3 * 160 + 2 * 32
GIB = 2**30
A3 = DeviceProfile.named("A3")
TRACE = [TraceRequest(i, 1000.0 + 7.0 * i, 300, 6, (i,)) for i in range(12)]


class Queue:
    """A server that computes one request at a time, for as long as it always does."""

    def __init__(self, each_ms: float, slo: str, batch: float = 1.0) -> None:
        self.each_us, self.slo, self.batch = each_ms * 1e3, Slo.parse(slo), batch
        self.asked: list[float] = []

    def serve(self, requests: list[TraceRequest], window: tuple[float, float]) -> Any:
        self.asked.append(own_rate(requests))
        felt = Latencies(self.slo)
        felt.window_us = window
        free = 0.0
        for request in requests:
            arrived = request.timestamp_ms * 1e3
            begin = max(free, arrived)
            free = begin + self.each_us
            felt.leave(Progress(1, arrived, begin, free, free, free), finished=True)
        return SimpleNamespace(
            latencies=felt,
            totals=SimpleNamespace(request_steps=100 * self.batch, steps=100, accepted=100),
            deployment=MODEL,
            options=OffloadOptions(),
        )

    def search(self, attain: float = 0.9, error: float | None = 0.0) -> RateSearch:
        found = Search(
            [TraceRequest(i, 50.0 + 100.0 * i, 9, 1, (i,)) for i in range(200)],
            self.serve, attain=attain, error=lambda _: error,
        ).run()  # fmt: skip
        assert found is not None
        return found


def test_a_rate_is_of_the_gaps() -> None:
    assert own_rate(TRACE) == pytest.approx(1000 / 7)
    faster = at_rate(TRACE, 2000 / 7)
    assert [r.timestamp_ms for r in faster] == pytest.approx([3.5 * i for i in range(12)])
    assert own_rate(at_rate(TRACE, 3.25)) == pytest.approx(3.25)
    assert [replace(r, timestamp_ms=0) for r in faster] == [
        replace(r, timestamp_ms=0) for r in TRACE
    ]


def test_a_tenth_at_either_end_is_not_judged() -> None:
    assert judged(TRACE) == (1007e3, 1070e3)
    assert judged(TRACE[:5]) == (1000e3, 1028e3)
    felt = Latencies(Slo.parse("e2e=1s"))
    felt.window_us = (1007e3, 1070e3)
    for request in TRACE:
        arrived = request.timestamp_ms * 1e3
        felt.leave(Progress(1, arrived, arrived, 2e9, 2e9, 2e9), finished=True)
    assert (felt.finished, felt.good) == (10, 0)


def test_the_highest_rate_of_a_queue() -> None:
    """20 ms each: 50 a second at most; of the last judged request the wait is the excess."""
    queue = Queue(20.0, "ttft=60ms")
    found = queue.search()
    # At rate r request n waits n * (20 - 1000 / r) ms; nine tenths of 160 are request 164.
    most = 1000 / (20 - 40 / (20 + 0.9 * 160))
    assert found.rate is not None
    assert most / 1.02 <= found.rate <= most * 1.001
    beyond = min(p.rate for p in found.points if not p.holds)
    assert beyond / found.rate <= 1.02
    assert found.low == found.rate
    assert found.high == beyond
    assert found.limited
    assert f"at {beyond:,.4g} requests/s TTFT is" in found.sentence
    assert len(queue.asked) == len(set(queue.asked)) == len(found.points) <= 12


@pytest.mark.parametrize(("own", "slo"), [(10.0, "ttft=60ms"), (900.0, "ttft=60ms")])
def test_the_report_that_is_kept_is_of_the_rate_found(own: float, slo: str) -> None:
    """Whether the first rates that are tried hold the limits or not."""
    queue = Queue(20.0, slo, batch=2.0)
    trace = at_rate([TraceRequest(i, float(i), 9, 1, (i,)) for i in range(200)], own)
    rates: dict[int, float] = {}

    def served(requests: list[TraceRequest], window: tuple[float, float]) -> Any:
        report = queue.serve(requests, window)
        rates[id(report)] = own_rate(requests)
        kept.append(report)
        return report

    kept: list[Any] = []
    looked = Search(trace, served, attain=0.9, error=lambda _: 0.0)
    found = looked.run()
    assert found is not None
    assert found.rate is not None
    assert rates[id(looked.best)] == pytest.approx(found.rate)
    slow = at_rate(trace, 10.0)
    hopeless = Search(slow, Queue(61.0, slo).serve, attain=0.9, error=lambda _: 0.0)
    none = hopeless.run()
    assert none is not None
    assert none.rate is None
    assert hopeless.best is not None
    assert hopeless.best.latencies.within(0.9)["ttft"] == pytest.approx(61e3)


def test_times_that_are_not_sure_widen_what_the_rate_may_be() -> None:
    sure, unsure, nobody = (Queue(20.0, "ttft=60ms").search(error=e) for e in (0.0, 0.2, None))
    assert sure.rate == unsure.rate == nobody.rate
    assert sure.rate is not None
    assert sure.rate / 1.3 < unsure.low <= sure.rate / 1.2
    assert sure.high * 1.1 < unsure.high <= sure.high * 1.25
    assert nobody.low == 0
    assert math.isinf(nobody.high)


def test_overload_is_said_in_words() -> None:
    found = Queue(20.0, "ttft=900ms").search()
    assert "requests arrive faster than they are served: the last fifth waits" in found.sentence
    quiet = Queue(20.0, "ttft=900ms")
    assert quiet.serve(at_rate(TRACE, 40.0), (0, 1e9)).latencies.overload() == ""


def test_that_no_rate_meets_the_limits_is_an_answer() -> None:
    found = Queue(61.0, "ttft=60ms").search()
    assert found.rate is None
    assert found.low == 0
    assert found.sentence == "no rate meets it: TTFT is 61 ms at batch 1"
    # A request alone computes too long: no lower rate is tried.
    crowd = Queue(1.0, "tpot=1us", batch=20.0)
    alone = crowd.search()
    assert alone.rate == pytest.approx(1e7)  # (its requests have one token each, and so no TPOT)
    slow = SimpleNamespace(**vars(crowd.serve(TRACE, (0, 1e9))))
    felt = Latencies(Slo.parse("tpot=1us"))
    felt.leave(Progress(6, 0.0, 0.0, 10.0, 10.0, 9e3), finished=True)
    slow.latencies = felt
    lone = Search(TRACE, lambda *_: slow, attain=0.9, error=lambda _: 0.0).run()
    assert lone is not None
    assert lone.rate is None
    assert len(lone.points) == 1
    assert lone.sentence.startswith("no rate meets it: TPOT is ")
    assert lone.sentence.endswith(" at batch 1, for computing alone")


def test_limits_that_hold_at_every_rate() -> None:
    found = Queue(0.001, "ttft=60ms").search()
    assert found.rate == pytest.approx(1e7)
    assert not found.limited
    assert "at every rate" in found.sentence


def test_a_search_that_is_stopped_finds_nothing() -> None:
    assert Search(TRACE, lambda *_: None, attain=0.9, error=lambda _: 0.0).run() is None


def options(**more: Any) -> OffloadOptions:
    weights = (A3.capacity_bytes - 7.5 * 128 * TOKEN) / GIB
    chosen: dict[str, Any] = {
        "batch": 4, "pool": 64, "host_blocks": 100, "search": "rate", "arrivals": "time",
        "weights_gib": weights, "prefill_tokens_per_s": None, "slo": "ttft=6ms", **more,
    }  # fmt: skip
    return OffloadOptions(**chosen)


def test_both_sides_are_searched_and_held_against_each_other() -> None:
    """Three blocks a request: two fit without offload, four with it."""
    labels: list[str] = []
    served = serve(
        TRACE, MODEL, options(sample_requests=12, sample_layers=2),
        progress=lambda _, label="": labels.append(label),
    )  # fmt: skip
    answer = served.answer
    assert answer.decision == "yes"
    assert answer.speed_up is not None
    assert answer.searches is not None
    rates = [answer.searches[side]["rate"] for side in ("offload", "none")]
    assert answer.speed_up.value == pytest.approx(rates[0] / rates[1])
    assert answer.measure == "the highest rate that holds the limits"
    assert served.report.latencies.attained is not None
    assert served.report.latencies.attained >= 0.9
    # The report is of the run at the rate found, and only its sample was served for real.
    points = answer.searches["offload"]["points"]
    assert [p["holds"] for p in points] == sorted((p["holds"] for p in points), reverse=True)
    assert served.report.interval is not None
    assert served.report.interval.requests == 12
    assert labels[0] == "search, rate 1 of at most 12"
    assert any(label.startswith("baseline, rate ") for label in labels)
    again = serve(TRACE, MODEL, options(sample_requests=12, sample_layers=2))
    first, second = served.figures(), again.figures()
    first.pop("seconds"), second.pop("seconds")
    assert first == second


def test_without_a_baseline_the_rate_is_still_said() -> None:
    served = serve(TRACE, MODEL, options(baseline="off", slo="tpot=1us"))
    assert served.answer.decision is None
    assert "no rate" in served.answer.sentence
    assert "switched off" in served.answer.sentence
    tight = serve(TRACE, MODEL, options(batch=1, weights_gib=(
        A3.capacity_bytes - 2.5 * 128 * TOKEN) / GIB))  # fmt: skip
    assert tight.answer.decision == "yes"
    assert "without it the trace cannot be served" in tight.answer.sentence


@pytest.mark.parametrize(
    ("trace", "changes", "match"),
    [
        (
            [TRACE[0]],
            {},
            "search: expected a trace whose requests arrive at different .*, got 1 of",
        ),
        (
            [replace(r, timestamp_ms=5.0) for r in TRACE],
            {},
            "search: .*got 12 of them, all at 5 ms",
        ),
        (TRACE, {"slo": None}, r"search: expected limits that are to hold \(slo\), got none"),
        (TRACE, {"arrivals": "order"}, "search: expected requests that arrive by time"),
        (TRACE, {"search": "batch"}, "search: expected one of rate, got 'batch'"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    trace: list[TraceRequest], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ParamInvalidError, match=match):
        serve(trace, MODEL, options(**changes))


def test_the_command_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, path = tmp_path / "t.jsonl", tmp_path / "a.json"
    lines = [
        {
            "timestamp": r.timestamp_ms,
            "input_length": 300,
            "output_length": 3,
            "hash_ids": [r.index],
        }
        for r in TRACE[:6]
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["replay", str(trace), "--search", "rate", "--prefill", "none", "--batch", "2"]
    assert main([*command, "--slo", "tpot=1us", "--json", str(path), "--progress", "lines"]) == 0
    captured = capsys.readouterr()
    assert "no rate meets it: TPOT is" in captured.out
    assert "search, rate 1 of at most 12: " in captured.err
    report = json.loads(path.read_text())
    assert report["decision"] == "no"
    assert report["answer"]["search"]["offload"]["rate"] is None
    assert report["options"]["arrivals"] == "time"
    assert main(command) == 2
    assert "limits that are to hold" in capsys.readouterr().err
    trace.write_text("".join(json.dumps({**line, "timestamp": 0}) + "\n" for line in lines))
    assert main([*command, "--slo", "tpot=1us"]) == 2
    assert "arrive at different times" in capsys.readouterr().err
