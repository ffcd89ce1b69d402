# SPDX-License-Identifier: Apache-2.0
"""A run in two processes: the figures of one, and the second process ends whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest

from kvcore.errors import KVCoreError
from kvcore.replay import ModelProfile, OffloadOptions, TraceRequest, generate_trace
from kvcore.replay.answer import beside
from kvcore.replay.answer.run import Served, serve

MODEL = ModelProfile.named("tiny-sparse").replace(layers=4, index_layers=(0, 1), topk=64)


def options(**changed: Any) -> OffloadOptions:
    values: dict[str, Any] = {
        "fidelity": "sampled", "batch": 6, "host_blocks": 600, "pool": 256, "verify_samples": 41,
        "sample_requests": 7, "weights_gib": 1.0,
    }  # fmt: skip
    return OffloadOptions(**values | changed)


def trace(count: int = 16) -> list[TraceRequest]:
    return [
        TraceRequest(r.index, r.timestamp_ms, 200 + 75 * i, 12 + 7 * (i % 5), tuple(
            100 * i + n for n in range(-(-(200 + 75 * i) // 512))
        ))
        for i, r in enumerate(generate_trace(count))
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "LEAST_TOKENS", 1)


def figures(served: Served) -> dict[str, Any]:
    found = served.figures()
    del found["seconds"]
    return found


def children() -> int:
    return len(multiprocessing.active_children())


@pytest.mark.parametrize("changed", [{}, {"drafts": 1, "accept": 0.7}, {"baseline": "off"}])
def test_the_figures_of_one_process(changed: dict[str, Any]) -> None:
    served = [serve(trace(), MODEL, options(**changed), jobs=jobs) for jobs in (1, 2)]
    one, two = map(figures, served)
    assert one == two
    assert one["verified"]["samples"] == 41 - 41 % 2
    assert (served[1].answer.baseline is None) == ("baseline" in changed)
    assert not children()


def test_when_a_second_process_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = trace()
    assert beside.pays(requests, options())
    for other in (
        options(policy="none", pool=None),
        options(fidelity="full"),
        options(sample_requests=1),
    ):
        assert not beside.pays(requests, other)
    monkeypatch.setattr(beside, "LEAST_TOKENS", 10_000)
    assert not beside.pays(requests, options())


@pytest.mark.parametrize("at", [1, 5])
def test_a_run_that_is_stopped(at: int) -> None:
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps >= at

    served = serve(trace(), MODEL, options(), stop=stop, jobs=2)
    assert served.report.interrupted
    assert not children()


def test_a_baseline_that_is_not_waited_for() -> None:
    with beside.Beside(trace(), MODEL, options()) as other:
        other.start()
        found = other.baseline(lambda: True)
    assert (found.report, found.why) == (None, "it was interrupted")
    assert not children()


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL of POSIX")
def test_a_second_process_that_is_killed() -> None:
    def kill() -> bool:
        for child in multiprocessing.active_children():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
        return False

    with pytest.raises(
        KVCoreError, match=r"^replay: expected the process of the \w+ to report, .*\(SIGKILL\)$"
    ):
        serve(trace(), MODEL, options(), stop=kill, jobs=2)
    assert not children()
