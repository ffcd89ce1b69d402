# SPDX-License-Identifier: Apache-2.0
"""Where reports go: stderr, a file, the status, an exception, the test that was running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from wheel import needs_wheel

from kvcore import cli
from kvcore.emulator import environment, reports
from kvcore.emulator.reports import Collector, Report
from kvcore.errors import ParamInvalidError, RaceError, StreamError

Program = Callable[..., "subprocess.CompletedProcess[str]"]

RACE = Report("racecheck", "add", "two", (("a.py", 1), ("a.py", 2)), ("stream 0", "stream 1"), 8, 9)
RULE = Report("rule", "aclrtFree", "gone", (("a.py", 3),))


def test_equal_reports_are_counted_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    collector = Collector()
    for _ in range(3):
        collector.add("race", RACE)
    collector.add("rule", RULE)
    assert [report.count for report in collector.all()] == [3, 1]
    said = capsys.readouterr().err.splitlines()
    assert said == ["kvcore.emulator: racecheck: two", "kvcore.emulator: rule: gone"]
    assert collector.summary() == "kvcore.emulator: 4 reports; 0 tasks looked at"


def test_expected_reports_are_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    collector = Collector()
    with collector.expected() as found:
        collector.add("race", RACE)
        collector.add("race", RACE)
        with collector.expected() as inner:
            collector.add("rule", RULE)
    assert [report.count for report in found] == [2]
    assert inner == [RULE]
    assert collector.all() == []
    assert capsys.readouterr().err == ""


def test_what_is_raised_and_where() -> None:
    collector = Collector()
    collector.add("before", RULE)
    assert not collector.raises
    collector.check = "raise"
    collector.add("race", RACE)
    collector.add("failed already", RULE, raising=False)
    collector.raise_found(("a.py", 7))  # another call: nothing of its own
    with pytest.raises(RaceError, match="racecheck: two") as caught:
        collector.raise_found(("a.py", 2))
    assert caught.value.seen == (RACE,)
    collector.raise_found(None)  # once
    collector.add("rule", RULE)
    with pytest.raises(StreamError, match="rule: gone"):
        collector.raise_found(None)


def test_the_file_holds_what_was_found(tmp_path: Path) -> None:
    collector = Collector()
    collector.file = tmp_path / "found.json"
    collector.add("race", RACE)
    data = json.loads(collector.file.read_text())
    assert data["process"] == os.getpid()
    assert data["reports"][0]["lines"] == [["a.py", 1], ["a.py", 2]]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.parametrize("tools", [("racecheck", "nosuch"), ("racecheck,memcheck",)])
def test_unknown_tools(tools: tuple[str, ...]) -> None:
    with pytest.raises(ParamInvalidError, match="tools: expected names among memcheck, racecheck"):
        environment.Settings(tools=tools)
    assert environment.Settings(tools=()).tools == ()


def test_settings_reach_children() -> None:
    made: dict[str, str] = {}
    settings = environment.Settings(check="raise", tools=("initcheck",), report="/tmp/x.json")
    environment.apply(settings, made)
    assert environment.from_environment(made) == settings


@pytest.mark.parametrize("names", ["nosuch", "", "racecheck,,x"])
def test_wrong_tools_of_the_command(capsys: pytest.CaptureFixture[str], names: str) -> None:
    assert cli.main(["emulate", "--tool", names]) == 2
    assert "expected names among memcheck, racecheck" in capsys.readouterr().err


RACY = """
import sys, torch
x = torch.ones(256, device="npu")
side = torch.npu.Stream()
torch.npu.synchronize()
x.add_(1)
with torch.npu.stream(side):
    x * 2
torch.npu.synchronize()
torch.empty(64, device="npu") + 1
"""


@needs_wheel
@pytest.mark.timeout(400)
def test_the_command_says_it_by_its_status(tmp_path: Path) -> None:
    clean = {name: v for name, v in os.environ.items() if not name.startswith("KVCORE_EMULATE")}
    command = [sys.executable, "-m", "kvcore", "emulate", "--report", str(tmp_path / "found.json")]
    tools = ["--tool", "racecheck,initcheck,leakcheck", "--", sys.executable, "-c", RACY]
    done = subprocess.run(
        [*command, *tools], env=clean, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 3, done.stderr
    (file,) = tmp_path.iterdir()
    data = json.loads(file.read_text())
    assert file.name == f"found.{data['process']}.json"
    found = {one["kind"]: one for one in data["reports"]}
    assert set(found) == {"racecheck", "initcheck", "leakcheck"}
    assert [line for _, line in found["racecheck"]["lines"]] == [6, 8]
    assert found["initcheck"]["lines"] == [["<string>", 10]]
    assert ["<string>", 3] in [one["lines"][0] for one in data["reports"]]
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"kvcore emulate: {len(data['reports'])} reports; ")
    assert last.endswith(" tasks of 1 process looked at")


@needs_wheel
@pytest.mark.timeout(400)
def test_raised_at_the_later_call(program: Program) -> None:
    start = "import kvcore.emulator\nkvcore.emulator.start(memory=1 << 28, check='raise')\n"
    done = program(start + RACY)
    assert done.returncode == 1
    assert "kvcore.errors.RaceError: racecheck: RAW: aten.add_.Tensor on stream" in done.stderr
    assert 'File "<string>", line 10, in <module>' in done.stderr  # two lines were put before
    assert "1 report; " in done.stderr


@needs_wheel
@pytest.mark.timeout(400)
def test_the_host_follows_a_device_pointer(program: Program) -> None:
    text = (
        "import kvcore.emulator\nkvcore.emulator.start(memory=1 << 28, check='off')\n"
        "import ctypes, faulthandler, torch\nfaulthandler.enable()\n"
        "x = torch.ones(4).npu()\ntorch.npu.synchronize()\n"
        "ctypes.string_at(x.data_ptr(), 4)\n"
    )
    done = program(text)
    assert done.returncode == -11
    assert "memcheck: the host follows a device pointer, 0x" in done.stderr
    assert 'File "<string>", line 7 in <module>' in done.stderr


@needs_wheel
@pytest.mark.timeout(400)
def test_the_test_that_was_running_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import torch\nx = torch.ones(3, device='npu')\n")
    (tmp_path / "test_it.py").write_text(
        "import torch\n"
        "def test_racy():\n"
        "    x = torch.ones(256, device='npu')\n"
        "    side = torch.npu.Stream()\n"
        "    torch.npu.synchronize()\n"
        "    x.add_(1)\n"
        "    with torch.npu.stream(side):\n"
        "        x * 2\n"
        "def test_clean():\n"
        "    import conftest\n"
        "    assert torch.npu.get_device_name() == 'Ascend910B3'\n"
        "    assert (conftest.x + 1).sum().item() == 6\n"
    )
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ASCEND_", "KVCORE_EMULATE", "LD_LIBRARY_PATH", "PYTEST"))
    }
    options = ["-q", "-p", "no:cacheprovider", "--kvcore-emulate=A2", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env=clean,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "the emulated machine reports:" in done.stdout
    assert "test_it.py:6), and aten.mul.Tensor on stream" in done.stdout


def test_nothing_is_reported_where_no_machine_runs() -> None:
    assert isinstance(reports(), list)
