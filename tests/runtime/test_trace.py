# SPDX-License-Identifier: Apache-2.0
"""Traces: what is kept, what is written, what is summed up."""

from __future__ import annotations

import gc
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
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
    assert counters == {"device memory", "host memory", "link h2d"}
    rates = [(e["ts"], e["args"]["MB/s"]) for e in events if e["name"] == "link h2d"]
    share = 400_000 / dev.profile.value("h2d_bandwidth") * 1e-3 + dev.profile.value("h2d_latency")
    share += dev.profile.value("h2d_descriptor")
    assert rates[0] == (spans["copy"]["ts"], pytest.approx(400_000 / share))
    assert rates[1] == (pytest.approx(spans["copy"]["ts"] + share), 0)
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


def random_work(dev: kvcore.Device, seed: int) -> dict[str, int]:
    """Copies of all kinds, kernels on swapped memory and host functions; bytes by link."""
    draw = random.Random(seed)
    streams = [dev.stream(f"s{i}") for i in range(4)]
    sizes = [64, 1000, 4096]
    spaces: dict[str, list[Any]] = {
        "device": [dev.empty(n, "uint8") for n in sizes],
        "host": [dev.empty_host(n, "uint8") for n in sizes],
        "swapped": [dev.empty_swapped(n, "uint8") for n in sizes],
        "pageable": [np.zeros(n, np.uint8) for n in sizes],
    }
    expected = {"link h2d": 0, "link d2h": 0}

    def ends() -> tuple[str, str]:
        to, source = draw.choice(list(spaces)), draw.choice(list(spaces))
        return to, source

    def count(to: str, source: str, nbytes: int) -> None:
        if (to == "device") != (source == "device"):
            expected["link h2d" if to == "device" else "link d2h"] += nbytes

    for _ in range(60):
        stream = draw.choice(streams)
        kind = draw.choice(["copy", "batch", "kernel", "compute", "call", "wait"])
        if kind == "copy":
            (to, source), i = ends(), draw.randrange(3)
            stream.copy(spaces[to][i], spaces[source][i])
            count(to, source, sizes[i])
        elif kind == "batch":
            pairs = [(*ends(), i) for i in draw.sample(range(3), 2)]
            stream.copy_batch(
                [spaces[to][i] for to, _, i in pairs], [spaces[s][i] for _, s, i in pairs]
            )
            for to, source, i in pairs:
                count(to, source, sizes[i])
        elif kind == "kernel":
            read, written = draw.randrange(3), draw.randrange(3)
            stream.launch(
                FakePlan(
                    reads=[spaces["swapped"][read], spaces["device"][read]],
                    writes=[spaces["swapped"][written]],
                )
            )
            expected["link h2d"] += sizes[read]
            expected["link d2h"] += sizes[written]
        elif kind == "compute":
            stream.compute(draw.randrange(20))
        elif kind == "call":
            stream.call(int)
        else:
            stream.wait_stream(draw.choice(streams))
    return expected


@pytest.mark.parametrize("seed", range(5))
async def test_links_by_their_bytes(tmp_path: Path, clock: str, seed: int) -> None:
    """The area under each link's counter is what went over that link."""
    async with device(clock, trace=True, profile="A3") as dev:
        expected = random_work(dev, seed)
        await dev.synchronize()
        dev.trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for name, nbytes in expected.items():
        points = [(e["ts"], e["args"]["MB/s"]) for e in events if e["name"] == name]
        assert points == sorted(points, key=lambda point: point[0])
        assert points[-1][1] == 0
        area = sum(
            rate * (after - before) for (before, rate), (after, _) in itertools.pairwise(points)
        )
        assert area == pytest.approx(nbytes, rel=1e-6)
        bandwidth = dev.profile.value(f"{name[5:]}_bandwidth") * 1e3
        assert clock == "wall" or max(rate for _, rate in points) <= bandwidth


@pytest.mark.parametrize("seed", range(5))
async def test_summary_instant_by_instant(clock: str, seed: int) -> None:
    """Busy time and overlap against a look at every instant between two edges."""
    async with device(clock, trace=True, profile="A3", workers=4) as dev:
        random_work(dev, seed)
        await dev.synchronize()
        spans, summary = dev.trace.spans, dev.trace.summary()
    edges = sorted({edge for span in spans for edge in (span.start, span.end)})
    names = {stream.index: stream.name for stream in dev.streams}
    busy = dict.fromkeys(names.values(), 0.0)
    overlap = dict.fromkeys(names.values(), 0.0)
    all_busy = all_overlap = 0.0
    for before, after in itertools.pairwise(edges):
        middle = (before + after) / 2
        active = {names[s.stream] for s in spans if s.start < middle < s.end}
        all_busy += (after - before) * bool(active)
        all_overlap += (after - before) * (len(active) > 1)
        for name in active:
            busy[name] += after - before
            overlap[name] += (after - before) * (len(active) > 1)
    assert summary.elapsed == pytest.approx(edges[-1] - edges[0])
    assert summary.busy == pytest.approx(all_busy)
    assert summary.overlap == pytest.approx(all_overlap)
    for use in summary.streams:
        own = [span for span in spans if names[span.stream] == use.name]
        assert use.operations == len(own)
        assert use.bytes_moved == sum(span.bytes_moved for span in own)
        assert use.busy == pytest.approx(busy[use.name])
        assert use.overlap == pytest.approx(overlap[use.name])


async def test_memory_that_goes_with_its_last_reference_is_seen(tmp_path: Path, clock: str) -> None:
    async with device(clock, trace=True) as dev:
        stream = dev.stream()
        buffer = dev.empty(1000, "uint8")
        del buffer
        gc.collect()
        stream.compute(1)
        await stream.synchronize()
        dev.trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    used = [e["args"]["bytes"] for e in events if e["name"] == "device memory"]
    assert used == [1000, 0]
