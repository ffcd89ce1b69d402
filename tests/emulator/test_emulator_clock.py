# SPDX-License-Identifier: Apache-2.0
"""The model clock: events measure the device of a profile, by the bytes of each task."""

from __future__ import annotations

import array
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from wheel import needs_wheel

from kvcore import cli
from kvcore.emulator import environment
from kvcore.emulator.timing import Timing
from kvcore.errors import ParamInvalidError
from kvcore.runtime import DeviceProfile

Program = Callable[..., "subprocess.CompletedProcess[str]"]

# Some of these processes import torch.
pytestmark = pytest.mark.timeout(300)

FIGURES = {
    "launch_cost": 2, "event_cost": 1, "hbm_bandwidth": 1, "hbm_latency": 3, "hbm_descriptor": 0.5,
    "h2d_bandwidth": 0.1, "h2d_latency": 5, "h2d_descriptor": 0, "d2h_bandwidth": 0.2,
    "d2h_latency": 7, "d2h_descriptor": 0, "pageable_share": 0.5,
}  # fmt: skip
#: Of device memory; below and above it is the host's.
FIRST, END = 1000, 2000


def pairs(*numbers: int) -> array.array[int]:
    return array.array("q", numbers)


@pytest.fixture
def timing() -> Timing:
    """1 GB/s is a byte a nanosecond: 100 bytes of the device's are 0.1 us."""
    profile = DeviceProfile.named("A3").replace(**FIGURES)
    return Timing(profile, FIRST, END, lambda lane: f"stream {lane}")


def test_a_task_costs_its_bytes(timing: Timing) -> None:
    timing.task(1, "aten.add", pairs(1000, 1100, 1200, 1300), pairs(1400, 1500), 1, of_graph=False)
    (span,) = timing.trace.spans
    assert span.start == 2
    assert span.end == pytest.approx(2 + 3 + 3 * 0.5 + 0.3)
    assert (span.bytes_moved, span.name) == (300, "aten.add")


@pytest.mark.parametrize(
    ("name", "reads", "writes", "takes"),
    [
        ("aclrtMemcpyAsync", (0, 100), (1000, 1100), 5 + 1.0),
        ("aclrtMemcpyAsync", (), (1000, 1100), 5 + 2.0),
        ("aclrtMemcpyAsync", (1000, 1100), (3000, 3100), 7 + 0.5),
        ("aclrtMemcpyAsync", (1000, 1100), (), 7 + 1.0),
        ("aclrtMemcpyAsync", (1000, 1100), (1200, 1300), 3 + 2 * 0.5 + 0.2),
        ("aten.add", (0, 100), (1000, 1100), 3 + 0.5 + 0.1 + 5 + 1.0),
        ("aclrtLaunchHostFunc", (), (), 0),
    ],
)
def test_links_and_memory(
    timing: Timing, name: str, reads: tuple[int, ...], writes: tuple[int, ...], takes: float
) -> None:
    timing.task(1, name, pairs(*reads), pairs(*writes), 1, of_graph=False)
    (span,) = timing.trace.spans
    assert span.end - span.start == pytest.approx(takes)


def test_streams_events_and_the_host(timing: Timing) -> None:
    up = (pairs(0, 100), pairs(1000, 1100))
    timing.task(1, "aclrtMemcpyAsync", *up, 1, of_graph=False)  # 2 to 8, on the link
    timing.mark(1, 10, "aclrtRecordEvent")
    assert timing.at(10) == pytest.approx(8)
    assert timing.host == 3
    timing.task(2, "aclrtMemcpyAsync", *up, 2, of_graph=False)  # behind the first, on the link
    assert timing.trace.spans[1][2:4] == pytest.approx((8, 14))
    timing.wait(3, 10)
    timing.task(3, "aten.zero_", None, pairs(1000, 1100), 3, of_graph=False)
    assert timing.trace.spans[2].start == pytest.approx(8)
    timing.mark(2, 11, "aclrtSynchronizeStream")
    timing.join(11)
    assert timing.host == pytest.approx(14)
    timing.waits("aclrtMemcpy", None, pairs(1000, 1100))  # pageable memory: the host waits
    assert timing.host == pytest.approx(14 + 5 + 2)
    timing.drop(10)
    assert timing.at(10) is None


def test_what_the_settings_refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for given, words in (
        ({"clock": "fast"}, "clock: expected one of wall, model, got 'fast'"),
        ({"trace": "x.json"}, "trace: expected None with clock='wall', got 'x.json'"),
        ({"profile": 3, "clock": "model"}, "profile: expected the name of a file, or None, got 3"),
    ):
        with pytest.raises(ParamInvalidError, match=words):
            environment.Settings(**given)  # type: ignore[arg-type]
    assert cli.main(["emulate", "--trace", "x.json", "--", "ls"]) == 2
    assert "--trace: needs --clock model" in capsys.readouterr().err
    missing = str(tmp_path / "none.toml")
    assert cli.main(["emulate", "--clock", "model", "--profile", missing, "--", "ls"]) == 2
    assert "--profile: " in capsys.readouterr().err


def test_children_have_the_parent_s_clock(tmp_path: Path) -> None:
    own = environment.Settings(
        clock="model", profile=str(tmp_path / "p.toml"), trace=str(tmp_path / "t.json")
    )
    made: dict[str, str] = {}
    environment.apply(own, made)
    assert environment.from_environment(made) == own
    environment.apply(environment.Settings(), made)
    assert environment.from_environment(made) == environment.Settings()


TEXT = """
import sys
import kvcore.emulator
kvcore.emulator.start(memory=1 << 28, clock="model", check={check!r}, trace={trace!r})
import torch, torch_npu
cache = torch.zeros(64, 1 << 16, device="npu")
pinned = torch.ones(1 << 20).pin_memory()
there = torch.zeros(1 << 20, device="npu")
index = torch.tensor([3]).npu()
torch.npu.synchronize()
events = [torch.npu.Event(enable_timing=True) for _ in range(4)]
events[0].record()
there.copy_(pinned, non_blocking=True)
events[1].record()
there.add_(1)
events[2].record()
cache.index_fill_(0, index, 5.0)
events[3].record()
torch.npu.synchronize()
times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
print(*(f"{{t:.6f}}" for t in times))
"""


@needs_wheel
@pytest.mark.parametrize(("check", "runs"), [("off", 1), ("report", 2)])
def test_times_are_the_model_s(program: Program, tmp_path: Path, check: str, runs: int) -> None:
    """4 MiB over the link, 8 MiB of memory, and one row of a table of 16 MiB."""
    trace = tmp_path / "trace.json"
    text = TEXT.format(check=check, trace=str(trace))
    found = [program(text) for _ in range(runs)]
    assert found[0].returncode == 0, found[0].stderr
    assert found[0].stdout == found[-1].stdout
    over_link, added, row = (float(word) for word in found[0].stdout.split())
    profile = DeviceProfile.named("A3")
    size = 4 << 20
    link = profile.value("h2d_latency") + 1e-3 * size / profile.value("h2d_bandwidth")
    assert 1e3 * over_link == pytest.approx(link, rel=0.2)
    memory = profile.value("hbm_latency") + 2e-3 * size / profile.value("hbm_bandwidth")
    assert 1e3 * added == pytest.approx(memory, rel=0.5)
    assert row < added
    traces = sorted(tmp_path.glob("trace.*.json"))
    assert len(traces) == runs
    events = json.loads(traces[0].read_text())["traceEvents"]
    assert {"stream 0 of npu:0"} == {
        e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert any(e["ph"] == "X" and e["name"] == "aten.add_.Tensor" for e in events)
