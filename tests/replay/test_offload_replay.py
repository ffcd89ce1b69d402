# SPDX-License-Identifier: Apache-2.0
"""Offloaded replays: the two fidelities agree, what is read back is right, outcomes are counted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvcore.errors import DeviceOutOfMemoryError, ParamInvalidError
from kvcore.replay import (
    ModelProfile,
    OffloadOptions,
    OffloadReplay,
    OffloadReport,
    TraceRequest,
    generate_trace,
)
from kvcore.replay.report.totals import POINTS, Timeline
from kvcore.replay.serving import real_decode
from kvcore.runtime import Device

TINY = ModelProfile.named("tiny-sparse")
#: Two groups of two layers and a small top-k: full runs take a second.
SMALL = TINY.replace(layers=3, index_layers=(0, 1), topk=64)


def cut(requests: Any, tokens: int, output: int) -> list[TraceRequest]:
    """The same requests, no longer than that."""
    return [
        TraceRequest(
            r.index,
            r.timestamp_ms,
            min(r.input_length, tokens),
            min(r.output_length, output),
            r.hash_ids[: -(-min(r.input_length, tokens) // 512)],
        )
        for r in requests
    ]


def run(requests: list[TraceRequest], model: ModelProfile = SMALL, **options: Any) -> OffloadReport:
    options = {"fidelity": "full", "batch": 4, "host_blocks": 400, **options}
    return OffloadReplay(requests, model, OffloadOptions(**options)).run()


@pytest.mark.parametrize("options", [{}, {"drafts": 2, "policy": "fifo"}])
def test_sampled_agrees_with_full(options: dict[str, Any]) -> None:
    """20 requests: hit rate within 1 point, step time within 2%."""
    requests = cut(generate_trace(20, seed=3), 3000, 36)
    full, sampled = (
        run(requests, replace_topk(TINY), fidelity=f, batch=8, host_blocks=1200, **options)
        for f in ("full", "sampled")
    )
    assert full.ok
    assert sampled.ok
    assert full.real_share == 1.0
    assert 0 < sampled.real_share <= 0.5
    assert full.hit_rate is not None
    assert sampled.hit_rate == pytest.approx(full.hit_rate, abs=0.01)
    assert sampled.step_us == pytest.approx(full.step_us, rel=0.02)
    # What does not depend on the sample is the same.
    assert sampled.counters == full.counters
    assert sampled.totals.accepted == full.totals.accepted
    assert sampled.totals.d2h_bytes == full.totals.d2h_bytes


def replace_topk(model: ModelProfile) -> ModelProfile:
    return model.replace(layers=4, index_layers=(0, 1), topk=128)


@pytest.mark.parametrize("fidelity", ["full", "sampled"])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_every_row_read_back_is_right(
    fidelity: str, write_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes, preemptions, rejected drafts and aborts on the way, and every access ordered."""
    if fidelity == "full":
        monkeypatch.setattr(real_decode, "Device", partial(Device, race_check="raise", seed=3))
    requests = cut(generate_trace(10, seed=5), 1500, 50)
    same = requests[0]
    requests.append(TraceRequest(10, 1e6, same.input_length, 40, same.hash_ids))
    report = run(
        requests, fidelity=fidelity, write_policy=write_policy, drafts=2, accept=0.5,
        abort_share=0.6, host_blocks=80, block_size=32, batch=4, chunk=512, verify_samples=400,
    )  # fmt: skip
    assert report.ok, report.mismatches[:3]
    assert report.verified_samples > 100
    assert report.counters.preemptions > 0
    assert report.aborted_requests > 0
    assert report.finished_requests + report.aborted_requests == len(requests)
    assert report.totals.written > report.totals.accepted
    assert report.counters.prefix_hit_tokens > 0


def test_a_row_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore.replay.traces.request_rows import RequestRows

    real = RequestRows.make

    def broken(self: RequestRows, index: Any, layer: int, first: int, count: int) -> Any:
        lanes = real(self, index, layer, first, count)
        if layer == 1:
            lanes[0][:, 3] ^= 1
        return lanes

    monkeypatch.setattr(RequestRows, "make", broken)
    report = run(cut(generate_trace(3, seed=5), 700, 20))
    assert not report.ok
    assert {m.layer for m in report.mismatches} == {1}


def test_the_same_twice_and_another_seed() -> None:
    requests = cut(generate_trace(8, seed=1), 2000, 30)
    options = {"fidelity": "sampled", "sample_requests": 3, "drafts": 1}
    one, two, other = (run(requests, **options, seed=seed).to_dict() for seed in (1, 1, 2))
    for report in (one, two, other):
        del report["seconds"]
    assert one == two
    assert one["rows"] != other["rows"]


def test_arrivals_by_time_and_prompts_from_elsewhere() -> None:
    requests = [replace(r, timestamp_ms=5000.0 * i) for i, r in enumerate(
        cut(generate_trace(3, seed=2), 600, 5)
    )]  # fmt: skip
    for fidelity in ("full", "sampled"):
        report = run(requests, fidelity=fidelity, arrivals="time", prefill_tokens_per_s=None)
        assert report.totals.idle_us > 9e6
        assert report.totals.end_us >= 10e6
        assert report.totals.prefill_us == report.totals.prefill_bytes == 0
        assert report.totals.received_bytes > 0
        assert report.prefill_basis.startswith("none")
    at_once = run(requests)
    assert at_once.totals.idle_us == 0
    assert at_once.totals.prefill_us > 0
    assert "CloudMatrix384" in at_once.prefill_basis


def test_a_larger_pool_hits_more_and_a_slower_link_takes_longer() -> None:
    requests = cut(generate_trace(6, seed=4), 3000, 40)
    small, large = (run(requests, fidelity="sampled", pool=pool) for pool in (64, 1024))
    assert small.hit_rate is not None
    assert large.hit_rate is not None
    assert small.hit_rate < large.hit_rate
    assert small.totals.h2d_bytes > large.totals.h2d_bytes
    assert small.step_us > large.step_us  # type: ignore[operator]
    assert 0 <= small.overlap <= 1  # type: ignore[operator]
    assert small.assumed_share == pytest.approx(1.0)


def test_an_interrupt_keeps_what_is_done() -> None:
    requests = cut(generate_trace(6, seed=4), 600, 10)
    replay = OffloadReplay(requests, SMALL, OffloadOptions(fidelity="full", host_blocks=400))
    calls = iter(range(100))
    report = replay.run(stop=lambda: next(calls) == 3)
    assert report.interrupted
    assert report.finished_requests < 6
    assert report.to_dict()["interrupted"] is True


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"policy": "mru"}, "policy: expected one of previous, lru, fifo, arc, none, got 'mru'"),
        ({"fidelity": "half"}, "fidelity: expected one of full, sampled"),
        ({"write_policy": "none"}, "write_policy: expected one of write_through"),
        ({"device": "H100"}, "device: expected one of A2, A3, 950, or a .toml file"),
        ({"pool": 63}, "pool: expected at least 64 entries: top-k 64, a token a step, got 63"),
        (
            {"pool": 64, "drafts": 1},
            "pool: expected at least 128 entries: top-k 64, 2 tokens a step",
        ),
        ({"policy": "previous", "pool": 65}, "pool: expected 64 entries for the previous"),
        ({"drafts": 64}, "drafts: expected an integer from 0 to 63"),
        ({"batch": 0}, "batch: expected an integer from 1 to 4096"),
        ({"batch": 4096, "pool": 2**20}, "batch: expected at most .* requests: 64 GiB of A3"),
        ({"accept": 1.5}, "accept: expected a number from 0 to 1"),
        ({"accept": float("nan")}, "accept: expected a number"),
        ({"abort_share": True}, "abort_share: expected a number"),
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s: expected a number above 0"),
        ({"prefill_tokens_per_s": float("inf")}, "prefill_tokens_per_s: expected"),
        ({"host_blocks": 3}, "request 0: expected at most 3 blocks of 128 tokens"),
        ({"seed": -1}, "seed: expected an integer"),
    ],
)
def test_bad_options_are_refused_before_any_work(change: dict[str, Any], match: str) -> None:
    requests = cut(generate_trace(1), 600, 3)
    with pytest.raises(ParamInvalidError, match=match):
        OffloadReplay(requests, SMALL, OffloadOptions(**change))


def test_bad_models_are_refused() -> None:
    requests = cut(generate_trace(1), 600, 3)
    with pytest.raises(ParamInvalidError, match="model: expected one with a top-k"):
        OffloadReplay(requests, ModelProfile.named("llama-3-8b"), OffloadOptions())
    figures = {key: f for key, f in SMALL.figures.items() if key != "step_indexed"}
    with pytest.raises(ParamInvalidError, match=r"step_indexed: expected a figure of mine"):
        OffloadReplay(requests, ModelProfile("mine", figures), OffloadOptions())
    with pytest.raises(ParamInvalidError, match="requests: expected at least one"):
        OffloadReplay([], SMALL, OffloadOptions())
    big = OffloadOptions(fidelity="full", host_blocks=2**24)
    with pytest.raises(DeviceOutOfMemoryError, match="sampled fidelity needs less"):
        OffloadReplay(requests, SMALL, big)


def test_a_timeline_stays_short_and_keeps_its_sums() -> None:
    line = Timeline()
    for step in range(10_000):
        line.add(step + 1.0, 2.0, 0.5, 4, step)
    columns = line.to_dict()
    assert len(columns["steps"]) <= 2 * POINTS
    assert sum(columns["steps"]) == 10_000
    assert set(columns["step_us"]) == {2.0}
    mean = np.average(columns["host_blocks"], weights=columns["steps"])
    assert mean == pytest.approx(4999.5)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_shared_block_is_copied_before_it_is_written(write_policy: str) -> None:
    """Equal prompts share their last, partial block until one of them decodes."""
    requests = [TraceRequest(i, 0.0, 600, 30, (7, 8)) for i in range(3)]
    report = run(requests, batch=3, chunk=600, write_policy=write_policy, verify_samples=600)
    assert report.counters.copies > 0
    assert report.copied_bytes == report.counters.copies * 128 * 160 * 3
    assert report.ok, report.mismatches[:3]
