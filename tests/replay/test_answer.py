# SPDX-License-Identifier: Apache-2.0
"""The answer of a run: offload beside its baseline, and what is decided between them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli.program import main
from kvcore.errors import ParamInvalidError
from kvcore.replay import ModelProfile, OffloadOptions, OffloadReplay, OffloadReport, TraceRequest
from kvcore.replay.answer.answer import Answer, Ratio, answer_of
from kvcore.replay.answer.baseline import baseline_options, run_baseline
from kvcore.replay.answer.batches import BatchCurve, break_even, mean_context
from kvcore.replay.answer.run import answered, finish
from kvcore.replay.answer.spread import spread_over_seeds
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.models.profile import STEP
from kvcore.replay.report.identity import settled, trace_hash
from kvcore.runtime import DeviceProfile

MODEL = ModelProfile.named("tiny-sparse").replace(layers=3, index_layers=(0, 1), topk=64)
#: The same with a step that was measured.
SURE = MODEL.replace(basis="measured", **{key: MODEL[key].value for key in STEP})
GIB = 2**30
REQUESTS = [TraceRequest(i, 40.0 * i, 500 - 12 * i, 30, (i,)) for i in range(9)]
TOKEN = 3 * 160 + 2 * 32
A3 = DeviceProfile.named("A3")


def room_for(blocks: float) -> float:
    """The GiB of weights that leave room for so many blocks of 128 tokens."""
    return (A3.capacity_bytes - blocks * 128 * TOKEN) / GIB


def options(**more: Any) -> OffloadOptions:
    chosen: dict[str, Any] = {"batch": 4, "pool": 256, "host_blocks": 200, **more}
    return OffloadOptions(**chosen)


def run(model: ModelProfile = MODEL, **more: Any) -> tuple[OffloadReport, Answer]:
    report = OffloadReplay(REQUESTS, model, options(**more)).run()
    return report, finish(report, REQUESTS)


#: Requests of one shape, of which eleven blocks hold two: without offload half of the batch.
CRAMPED = {"weights_gib": room_for(11.5), "prefill_tokens_per_s": None}


@pytest.mark.parametrize(
    ("ratio", "decision"),
    [
        (Ratio(1.5, 1.4, 1.6), "yes"),
        (Ratio(0.8, 0.7, 0.9), "no"),
        (Ratio(1.01, 0.99, 1.03), "undecided"),
        (Ratio(1.0, 1.0, 1.2), "undecided"),
        (Ratio(9.0, None, None), "undecided"),
        (Ratio(1.5, 1.4, 1.6, (1.1, 2.0)), "yes"),
        (Ratio(1.5, 1.4, 1.6, (0.9, 2.0)), "undecided"),
        (Ratio(0.8, 0.7, 0.9, (0.75, 1.05)), "undecided"),
        (Ratio(0.8, 0.7, 1.2, (0.75, 0.85)), "undecided"),
        (Ratio(0.8, 0.7, 0.9, (0.75, 0.85)), "no"),
    ],
)
def test_interval_and_band_on_one_side_decide(ratio: Ratio, decision: str) -> None:
    assert ratio.decision == decision


def test_one_assumed_figure_that_turns_the_answer_is_named() -> None:
    """Many misses at a cost of the host's link that is not known: said, and undecided."""
    sides: dict[float, Answer] = {}
    for cost in (1e-4, 0.6, 3.0):
        device = A3.replace(h2d_descriptor=cost)
        deployment = Deployment.of(SURE, device)
        chosen = options(pool=64, turnover="overlap=0,reuse=0", fidelity="sampled", **CRAMPED)
        report = OffloadReplay(REQUESTS, deployment, chosen).run()
        sides[cost] = finish(report, REQUESTS, deployment)
    assert [answer.decision for answer in sides.values()] == ["yes", "undecided", "no"]
    turned = sides[0.6]
    assert turned.speed_up is not None
    assert turned.speed_up.band is not None
    assert turned.speed_up.band[0] < 1 < turned.speed_up.band[1]
    assert turned.because[0].startswith("It hangs on h2d_descriptor, an assumed figure")
    found = turned.to_dict()["answer"]
    assert found["band"]["decides"] == "h2d_descriptor"
    assert found["speed_up_band"] == list(turned.speed_up.band)


def test_a_small_device_makes_offload_worth_it() -> None:
    report, answer = run(**CRAMPED)
    alone = OffloadReplay(REQUESTS, MODEL, options(policy="none", **CRAMPED | {"pool": None})).run()
    assert answer.decision == "yes"
    assert answer.speed_up is not None
    assert report.tokens_per_s is not None
    assert alone.tokens_per_s is not None
    assert answer.speed_up.value == pytest.approx(report.tokens_per_s / alone.tokens_per_s)
    assert answer.speed_up.low is not None
    assert 1 < answer.speed_up.low < answer.speed_up.value
    assert answer.sentence.startswith("Yes: ")
    assert "times (" in answer.sentence
    assert answer.baseline is not None
    assert answer.baseline["tokens_per_s"]["all"] == alone.tokens_per_s
    assert 1 < (answer.break_even_batch or 0) <= 4


def test_a_roomy_device_does_not() -> None:
    _, answer = run(prefill_tokens_per_s=None)
    assert answer.decision == "no"
    assert answer.speed_up is not None
    assert answer.speed_up.value < 1
    assert answer.sentence.startswith("No: ")
    assert answer.because[0].startswith("It hangs on step_fixed, an assumed figure")
    assert "Both run at most 4 requests" in answer.because[1]


def test_the_curve_passes_through_the_run() -> None:
    """Requests of one length that decode together: the curve's batch is the run's."""
    requests = [TraceRequest(i, 0.0, 500, 60, (i,)) for i in range(4)]
    report = OffloadReplay(requests, MODEL, options(prefill_tokens_per_s=None)).run()
    curve = BatchCurve(report, mean_context(requests))
    assert mean_context(requests) == 530
    assert curve.tokens_per_s(4) == pytest.approx(report.decode_tokens_per_s, rel=0.02)
    rates = [rate for _, rate in curve.points(100)]
    assert rates == sorted(rates)
    assert [batch for batch, _ in curve.points(100)] == [1, 2, 4, 8, 16, 32, 64, 100]


def test_the_least_batch_that_reaches_a_rate() -> None:
    asked: list[int] = []

    def rate(batch: int) -> float:
        asked.append(batch)
        return 10.0 * batch

    assert break_even(rate, 55.0, 100) == 6
    assert break_even(rate, 60.0, 100) == 6
    assert break_even(rate, 1.0, 100) == 1
    assert break_even(rate, 1000.0, 100) == 100
    assert break_even(rate, 1001.0, 100) is None
    assert min(asked) >= 1


def test_what_does_not_fit_without_offload_needs_it() -> None:
    _, answer = run(weights_gib=room_for(4.5), pool=64)
    assert answer.decision == "yes"
    assert answer.sentence == (
        "Yes: without offload this trace cannot be served: the longest request (530 tokens) needs"
        " 5 blocks, and the device has room for 4 beside the weights."
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"baseline": "off"}, "it was switched off"),
        ({"policy": "none", "pool": None}, "this run is the baseline itself"),
    ],
)
def test_nothing_is_decided_without_a_baseline(changes: dict[str, Any], why: str) -> None:
    _, answer = run(**changes)
    assert answer.decision is answer.baseline is None
    assert why in answer.sentence


def test_weights_that_nobody_knows_leave_no_baseline() -> None:
    figures = {key: figure for key, figure in MODEL.figures.items() if key != "weights"}
    model = ModelProfile("own", figures)
    report, answer = run(model)
    assert answer.decision is None
    assert "--weights-gib says it" in answer.sentence
    assert report.ok
    _, known = run(model, weights_gib=40.0)
    assert known.decision in ("yes", "no", "undecided")


def test_too_few_sampled_requests_decide_nothing() -> None:
    report, answer = run(fidelity="sampled", sample_requests=2, sample_layers=1, **CRAMPED)
    assert report.interval is not None
    assert report.interval.step_us is None
    assert answer.decision == "undecided"
    assert "too few requests were sampled" in answer.sentence
    assert answer.speed_up is not None
    assert answer.speed_up.low is None


def test_a_run_that_was_stopped_decides_nothing() -> None:
    replay = OffloadReplay(REQUESTS, MODEL, options())
    report = replay.run(stop=lambda: replay.scheduler.counters.steps > 2)
    assert report.interrupted
    answer = finish(report, REQUESTS)
    assert (answer.decision, answer.baseline) == (None, None)
    whole = OffloadReplay(REQUESTS, MODEL, options()).run()
    stopped = finish(whole, REQUESTS, stop=lambda: True)
    assert stopped.decision is None
    assert "interrupted" in stopped.sentence


def test_limits_decide_where_requests_arrive_by_time() -> None:
    """Half a batch at a time keeps later requests waiting for room on the device."""
    fast = {"arrivals": "time", **CRAMPED}
    quick = [replace(r, timestamp_ms=0.01 * r.index) for r in REQUESTS]
    reports = [
        OffloadReplay(quick, MODEL, options(policy=policy, pool=pool, **fast)).run()
        for policy, pool in (("lru", 256), ("none", None))
    ]
    ends = [report.latencies.summaries()["ttft"] for report in reports]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].p90 < ends[1].p90
    limit = (ends[0].p90 + ends[1].p90) / 2
    for ttft, decision, said in (
        (limit, "yes", "and not without it"),
        (ends[1].p99 * 3, "no", "without offload too"),
        (ends[0].p50 / 99, "no", "neither with offload nor without"),
    ):
        chosen = options(slo=f"ttft={ttft:.3f}us", attain=0.85, **fast)
        report = OffloadReplay(quick, SURE, chosen).run()
        answer = finish(report, quick)
        assert answer.decision == decision, answer.sentence
        assert said in answer.sentence
    # With a step that nobody measured, the limit in between may hold on both sides or on neither.
    chosen = options(slo=f"ttft={limit:.3f}us", attain=0.85, **fast)
    guess = finish(OffloadReplay(quick, MODEL, chosen).run(), quick)
    assert guess.decision == "undecided"
    assert "by less than is known" in guess.sentence


def test_good_requests_decide_where_all_are_there_at_once() -> None:
    report, answer = run(slo="e2e=100s", **CRAMPED)
    assert report.latencies.attained == 1
    assert answer.measure == "good requests a second"
    assert answer.decision == "yes"
    _, none = run(slo="e2e=1us", **CRAMPED)
    assert none.decision == "no"


def test_a_model_that_attends_to_all_tokens_is_served_without_offload() -> None:
    model = ModelProfile.named("llama-3-8b")
    requests = [TraceRequest(i, 0.0, 400, 20, (i,)) for i in range(3)]
    own = OffloadOptions(policy="none", batch=3, prefill_tokens_per_s=None)
    report = OffloadReplay(requests, model, own).run()
    fixed, each, attended = (model[key].value for key in (
        "step_fixed", "step_request", "step_attended",
    ))  # fmt: skip
    mean = sum(fixed + 3 * (each + attended * (400 + step)) for step in range(20)) / 20  # type: ignore[operator]
    assert report.totals.compute_us / report.totals.steps == pytest.approx(mean)
    assert report.step_us == pytest.approx(mean, rel=0.02)
    capacity = (A3.capacity_bytes - int(17.0 * GIB)) // (128 * 131_072)
    assert report.to_dict()["memory"]["device_blocks"] == capacity
    assert "all tokens attended to" in dict(report.table("made up"))["model"]
    with pytest.raises(ParamInvalidError, match="model: expected one with a top-k to offload"):
        OffloadReplay(requests, model, OffloadOptions(policy="lru"))


def test_the_same_run_writes_the_same_figures() -> None:
    first, second = (answered(REQUESTS, MODEL, options(fidelity="sampled")) for _ in range(2))
    for figures in (first, second):
        figures.pop("seconds")
    assert json.dumps(first) == json.dumps(second)
    assert first["seeds"] == {"seed": 0, "sample_seed": 0}
    assert first["hashes"] == {
        "trace": trace_hash(REQUESTS), "deployment": Deployment.of(MODEL, A3).digest,
    }  # fmt: skip
    assert trace_hash(REQUESTS) != trace_hash(REQUESTS[:-1])
    assert set(first) >= {"schema", "version", "decision", "answer", "baseline"}


def test_figures_are_written_with_twelve_digits() -> None:
    third = 1 / 3
    assert settled({"a": [third, 7, "x", None, True], "b": (2.5,)}) == {
        "a": [0.333333333333, 7, "x", None, True], "b": [2.5],
    }  # fmt: skip
    assert settled(0.1 + 0.2) == settled(0.3)


def test_the_baseline_has_the_options_of_the_run() -> None:
    chosen = options(drafts=1, slo="ttft=2s", seed=7, max_trace_events=9)
    own = baseline_options(chosen)
    same = replace(own, policy=chosen.policy, pool=chosen.pool, max_trace_events=9)
    assert same == chosen
    assert run_baseline(REQUESTS, MODEL, replace(chosen, baseline="off")).report is None
    assert answer_of(*_stepless()).decision is None


def _stepless() -> tuple[Any, ...]:
    requests = [TraceRequest(0, 0.0, 10, 0, (0,))]
    report = OffloadReplay(requests, MODEL, options()).run()
    return report, requests, run_baseline(requests, MODEL, options())


def test_the_command_answers_first_and_expects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, path = tmp_path / "own.toml", tmp_path / "a.json"
    source = Path(__file__).parents[2] / "kvcore" / "replay" / "models" / "tiny_sparse.toml"
    own.write_text(source.read_text())
    trace = tmp_path / "t.jsonl"
    lines = [{"timestamp": 0, "input_length": 500, "output_length": 9, "hash_ids": [i]}
             for i in range(6)]  # fmt: skip
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["replay", str(trace), "--model", str(own), "--prefill", "none", "--batch", "3"]
    assert main([*command, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["decision"] == "no"
    assert out.startswith(report["answer"]["sentence"][:40])
    assert main([*command, "--expect", "no"]) == 0
    capsys.readouterr()
    assert main([*command, "--expect", "yes"]) == 1
    assert "expected yes, the answer is no" in capsys.readouterr().err
    for end, said in (
        (["--baseline", "off"], "switched off"),
        (["--policy", "none"], "the baseline itself"),
        (["--model", "glm-5.2"], "--weights-gib says it"),
    ):
        assert main([*command, *end, "--expect", "yes"]) == 2
        assert said in capsys.readouterr().err


def test_a_request_that_generates_nothing_is_sampled_too() -> None:
    mixed = [replace(r, output_length=0 if r.index % 2 else 5) for r in REQUESTS]
    for requests in (mixed, mixed[1:2]):
        for fidelity in ("full", "sampled"):
            report = OffloadReplay(requests, MODEL, options(fidelity=fidelity)).run()
            assert report.finished_requests == len(requests)


def test_the_spread_over_seeds_stands_apart() -> None:
    def report(rate: float | None, step: float, decision: str) -> dict[str, Any]:
        return {
            "hit_rate": rate, "model_time_us": {"step": step}, "decision": decision,
            "answer": {"speed_up": None}, "tokens_per_s": {"all": 5},
        }  # fmt: skip

    found = spread_over_seeds({
        "policy=lru,seed=0": report(0.9, 100.0, "yes"),
        "policy=lru,seed=1": report(0.8, 120.0, "no"),
        "policy=none,seed=0": report(None, 50.0, "no"),
        "policy=none,seed=1": report(None, 40.0, "no"),
        "policy=arc,sample_seed=1": report(0.5, 1.0, "no"),
        "policy=arc,seed=1": report(0.5, 1.0, "no"),
    })  # fmt: skip
    assert found == {
        "policy=lru": {
            "seeds": 2, "hit_rate": [0.8, 0.9], "step_us": [100.0, 120.0],
            "tokens_per_s": [5.0, 5.0], "decisions": ["no", "yes"],
        },
        "policy=none": {
            "seeds": 2, "step_us": [40.0, 50.0], "tokens_per_s": [5.0, 5.0], "decisions": ["no"],
        },
    }  # fmt: skip
    assert list(spread_over_seeds({"seed=3": report(1.0, 1.0, "no"),
                                   "seed=4": report(1.0, 1.0, "no")})) == ["all"]  # fmt: skip
