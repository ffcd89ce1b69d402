# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes are not those that it reads, nor one file twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.benchmarks import history
from kvcore.benchmarks.runner import Measurement
from kvcore.cli import main
from kvcore.cli.outputs import refuse_unwritable
from kvcore.errors import ParamInvalidError


def test_a_file_is_not_read_and_written(tmp_path: Path) -> None:
    trace, link, hard = tmp_path / "trace", tmp_path / "link", tmp_path / "hard"
    trace.write_text("{}")
    link.symlink_to(trace)
    hard.hardlink_to(trace)
    for path in (trace, link, hard):
        with pytest.raises(ParamInvalidError, match="a file of its own"):
            refuse_unwritable(path, reads=(trace,))
    with pytest.raises(ParamInvalidError, match="a file of its own"):
        refuse_unwritable(tmp_path / "new", tmp_path / "new")
    refuse_unwritable(tmp_path / "new", tmp_path / "other", "-", None, reads=(trace, "-", None))
    refuse_unwritable("/dev/null", "/dev/null", reads=("/dev/null",))
    assert trace.read_text() == "{}"


TRACE = '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
SWEEP = ["replay", "trace.jsonl", "--sweep", "policy=lru", "--jobs", "1", "--results", "out"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "again.jsonl").hardlink_to("trace.jsonl")
    (tmp_path / "a.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["replay", "trace.jsonl", "--json", "again.jsonl"],
        ["replay", "trace.jsonl", "--policy", "lru", "--html", "again.jsonl"],
        ["replay", "trace.jsonl", "--policy", "lru", "--json", "a.json", "--trace", "./a.json"],
        ["replay", "trace.jsonl", "--model", "a.json", "--json", "a.json"],
        [*SWEEP, "--json", "again.jsonl"],
        [*SWEEP, "--json", "out/policy=lru.json"],
    ],
    ids=" ".join,
)
def test_a_replay_overwrites_nothing_that_it_reads(
    here: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (here / "out").mkdir()
    assert main(command) == 2
    assert "expected a file of its own" in capsys.readouterr().err
    assert (here / "trace.jsonl").read_text() == TRACE
    assert (here / "a.json").read_text() == "{}"
    assert not list((here / "out").iterdir())


def test_a_report_of_a_sweep_takes_no_place_of_its_trace(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "out").mkdir()
    (here / "trace.jsonl").rename("out/policy=lru.json")
    assert main(["replay", "out/policy=lru.json", *SWEEP[2:]]) == 2
    assert "expected a file of its own" in capsys.readouterr().err
    assert (here / "out/policy=lru.json").read_text() == TRACE


def test_a_sweep_that_writes_files_of_its_own(here: Path) -> None:
    for _ in range(2):  # and goes on from its reports
        assert main([*SWEEP, "--json", "all.json"]) == 0
    assert (here / "trace.jsonl").read_text() == TRACE
    names = {path.name for path in here.rglob("*") if path.is_file()}
    assert names == {"trace.jsonl", "again.jsonl", "a.json", "all.json", "policy=lru.json"}


@pytest.mark.parametrize("option", ["--json", "--trace", "--html"])
def test_a_comparison_writes_no_file(
    here: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(["replay", "--compare", "a.json", "a.json", option, "a.json"]) == 2
    expected = f"{option}: expected no file to write together with --compare, got one"
    assert expected in capsys.readouterr().err
    assert (here / "a.json").read_text() == "{}"


def test_runs_are_added_to_files_of_runs_only(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measurement("norm-1", "", 1, {"kvcore": 10.0, "copyto": 10.0})
    monkeypatch.setattr("kvcore.benchmarks.measure", lambda *_: measured)
    assert main(["bench", "norm-1", "--save", "trace.jsonl"]) == 2
    assert "--save: expected a file written with --save" in capsys.readouterr().err
    assert (here / "trace.jsonl").read_text() == TRACE
    (here / "empty").touch()
    for name in ("empty", "new"):
        assert main(["bench", "norm-1", "--save", name]) == 0
    # What was compared with is read before the line is added.
    assert main(["bench", "norm-1", "--save", "new", "--compare", "new"]) == 0
    assert len((here / "new").read_text().splitlines()) == 2
    assert history.last(here / "new")["norm-1"]["ratios"] == {"copyto": 1.0}
