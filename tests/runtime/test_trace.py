# SPDX-License-Identifier: Apache-2.0
"""Traces: what is kept, what is written, what is summed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import FakePlan, device

import kvcore


async def overlapped(dev: kvcore.Device) -> None:
    load, compute = dev.stream("load"), dev.stream("compute")
    host, there = dev.empty_host(400_000, "uint8"), dev.empty(400_000, "uint8")
    load.copy(there, host)
    compute.compute(100, "attention")
    compute.wait_stream(load)
    compute.launch(FakePlan(reads=[there], name="gather"))
    await compute.synchronize()


async def test_a_modelled_trace(tmp_path: Path) -> None:
    async with device("model", trace=True) as dev:
        await overlapped(dev)
        summary = dev.trace.summary()
        path = tmp_path / "trace.json"
        dev.trace.save(path)
        now = dev.now
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert set(spans) == {"copy", "attention", "gather"}
    assert spans["attention"]["dur"] == pytest.approx(100)
    assert spans["copy"]["args"]["bytes"] == 400_000
    assert spans["gather"]["ts"] >= spans["attention"]["ts"] + 100
    assert max(e["ts"] + e["dur"] for e in spans.values()) == pytest.approx(now)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[spans["copy"]["tid"]] == "load"
    assert names[spans["gather"]["tid"]] == "compute"
    (start,), (end,) = ([e for e in events if e["ph"] == ph] for ph in "sf")
    assert (start["tid"], end["tid"]) == (spans["copy"]["tid"], spans["gather"]["tid"])
    assert start["id"] == end["id"]
    assert start["ts"] == pytest.approx(spans["copy"]["ts"] + spans["copy"]["dur"])
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert {"device memory", "host memory", "bytes moved"} <= counters
    assert max(e["args"]["bytes"] for e in events if e["name"] == "device memory") == 400_000
    streams = {use.name: use for use in summary.streams}
    assert streams["load"].operations == 1
    assert streams["load"].bytes_moved == 400_000
    assert streams["load"].busy == pytest.approx(spans["copy"]["dur"])
    assert streams["load"].overlap == summary.overlap > 10
    assert summary.busy <= summary.elapsed
    assert summary.dropped_events == 0


async def test_a_measured_trace(tmp_path: Path) -> None:
    async with device(trace=True) as dev:
        await overlapped(dev)
        dev.trace.save(tmp_path / "trace.json")
        spans = {span.name: span for span in dev.trace.spans}
        assert dev.now >= spans["gather"].end
    assert spans["attention"].end - spans["attention"].start >= 100
    assert spans["gather"].start >= max(spans["copy"].end, spans["attention"].end)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all(e["ts"] >= 0 for e in events if "ts" in e)


async def test_old_entries_fall_out_and_are_counted(clock: str) -> None:
    async with device(clock, max_events=10) as dev:
        stream = dev.stream()
        for _ in range(25):
            stream.compute(0)
        await stream.synchronize()
        assert len(dev.trace.spans) == 10
        assert dev.trace.dropped_events == 15
        assert dev.trace.summary().dropped_events == 15


async def test_overlap_is_counted_exactly() -> None:
    """Two host functions of 20 us, 5 us apart on the host, and one alone."""
    profile = kvcore.DeviceProfile.named("A3").replace(launch_cost=5, call_time=20)
    async with kvcore.Device(profile, clock="model", trace=True) as dev:
        a, b = dev.stream("a"), dev.stream("b")
        a.call(int)
        b.call(int)
        b.call(int)
        await dev.synchronize()
        assert dev.trace.summary() == (
            45.0,
            45.0,
            15.0,
            (("a", 1, 20.0, 15.0, 0), ("b", 2, 40.0, 15.0, 0)),
            0,
        )


async def test_an_empty_trace(tmp_path: Path, clock: str) -> None:
    async with device(clock, trace=True) as dev:
        dev.trace.save(tmp_path / "t.json")
        assert dev.trace.summary() == (0, 0, 0, (), 0)


def test_no_trace_unless_asked_for() -> None:
    with device() as dev, pytest.raises(kvcore.ParamInvalidError, match=r"^trace: expected"):
        dev.trace.summary()


async def test_failed_work_is_not_in_a_measured_trace() -> None:
    async with device(trace=True) as dev:
        stream = dev.stream()
        stream.call(int, "x")
        stream.compute(1)
        with pytest.raises(kvcore.StreamError):
            await stream.synchronize()
        assert dev.trace.spans == ()
