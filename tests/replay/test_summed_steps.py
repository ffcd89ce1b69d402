# SPDX-License-Identifier: Apache-2.0
"""Steps that are summed come to what the same steps come to when they are walked one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvcore.replay import ModelProfile, OffloadOptions, OffloadReplay, generate_trace
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.traces.reader import TraceRequest

SMALL = {"batch": 4, "sample_requests": 3, "pool": 512, "verify_samples": 20}


def requests(count: int = 16, *, shared: bool = True) -> list[TraceRequest]:
    """Short ones of which some begin alike, some end at once, and some arrive together."""
    found = []
    for place, one in enumerate(generate_trace(count, seed=3)):
        length = 90 + (one.input_length * 7 + place * 131) % 1900
        output = 1 + (one.output_length * 5 + place * 37) % 170
        ids = tuple((n if shared and place % 3 else 1000 * place + n) for n in range(4))
        found.append(
            TraceRequest(
                index=place,
                timestamp_ms=float(place // 3 * 900),
                input_length=length,
                output_length=1 if place == 4 else output,
                hash_ids=ids[: -(-length // 512)],
            )
        )
    return found


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from flat(inner, f"{name}[{place}]")
    else:
        yield name, value


Model = ModelProfile | Deployment


def figures(
    trace: list[TraceRequest], model: Model, *, walked: bool, **options: Any
) -> dict[str, Any]:
    """Everything a replay says, by name, and what its schedule left in the pool of blocks."""
    replay = OffloadReplay(trace, model, OffloadOptions(fidelity="sampled", **options))
    calls = [0]
    if walked:
        replay.serving.sums_steps = False

    def count(_: object) -> None:
        calls[0] += 1

    found = replay.run(progress=count).to_dict()
    del found["seconds"]
    found["counters"] = asdict(replay.scheduler.counters)
    found["evictions"] = replay.scheduler.pool.evictions
    found["blocks"] = replay.scheduler.pool.used
    assert calls[0] < replay.scheduler.counters.steps or walked or options.get("drafts")
    return dict(flat(found))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"arrivals": "time"},
        {"arrivals": "time", "slo": "ttft=900ms,tpot=2ms"},
        {"abort_share": 0.5},
        {"prefill_tokens_per_s": None},
        {"chunk": 100},
        {"block_size": 16},
        {"host_blocks": 30},
        {"host_blocks": 40, "batch": 8, "arrivals": "time", "abort_share": 0.3},
        {"host_blocks": 200, "block_size": 16, "batch": 12},
        {"write_policy": "write_back", "policy": "fifo"},
        {"drafts": 1, "pool": 1024},
        {"policy": "none", "pool": None, "weights_gib": 10.0},
        {"policy": "none", "pool": None, "weights_gib": 63.996, "arrivals": "time"},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()) or "plain",
)
def test_summed_as_walked(options: dict[str, Any]) -> None:
    given = {**SMALL, **options}
    one_by_one = both(requests(), ModelProfile.named("tiny-sparse"), given)
    if given.get("host_blocks") == 200:
        assert one_by_one[".counters.preemptions"] > 0
    if given.get("abort_share"):
        assert one_by_one[".requests.aborted"] > 0


def both(trace: list[TraceRequest], model: Model, given: dict[str, Any]) -> dict[str, Any]:
    """The figures of the walked run, to which those of the summed one are equal."""
    one_by_one = figures(trace, model, walked=True, **given)
    together = figures(trace, model, walked=False, **given)
    assert together.keys() == one_by_one.keys()
    for name, value in one_by_one.items():
        if isinstance(value, float):
            assert together[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        else:
            assert together[name] == value, name
    return one_by_one


def test_a_dense_model_without_offload() -> None:
    given = {"batch": 4, "policy": "none", "weights_gib": 20.0, "arrivals": "time"}
    assert both(requests(), ModelProfile.named("llama-3-8b"), given)[".steps"] > 0


@pytest.mark.parametrize("table", [False, True])
def test_layers_that_are_served_in_order(tmp_path: Path, table: bool) -> None:
    """Rows are not read ahead, choosing them takes time, and a table may time the steps."""
    text = (
        'name = "mine"\nmodel = "tiny-sparse"\ndevice = "A3"\n'
        'figures.serve = {value = "in order", basis = "assumed", source = "a test"}\n'
        'figures.serve_overlap = {value = 0.75, basis = "assumed", source = "a test"}\n'
        'figures.plan_group = {value = 10.0, basis = "assumed", source = "a test"}\n'
    )
    if table:
        text += (
            "[step_table]\nbatch = [1, 2]\ncontext = [1000]\nus = [[500.0], [600.0]]\n"
            'basis = "measured"\nsource = "a profiler"\n'
        )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    for options in ({}, {"arrivals": "time"}):
        found = both(requests(), Deployment.load(path), {**SMALL, **options})
        assert found[".model_time_us.serve"] > 0


@pytest.mark.parametrize("after", [1, 5])
def test_what_is_done_when_it_is_interrupted(after: int) -> None:
    """Between two runs: a whole number of steps, all of them counted."""
    options = OffloadOptions(fidelity="sampled", **SMALL)
    replay = OffloadReplay(requests(), ModelProfile.named("tiny-sparse"), options)
    left = [after]

    def stop() -> bool:
        left[0] -= replay.scheduler.counters.steps > 0
        return left[0] <= 0

    report = replay.run(stop=stop).to_dict()
    assert report["interrupted"]
    assert report["steps"] <= replay.scheduler.counters.steps
    assert sum(report["timeline"]["steps"]) == report["steps"]
    assert report["tokens"]["generated"] == replay.scheduler.counters.decode_tokens
