# SPDX-License-Identifier: Apache-2.0
"""kvcore bench: what it prints, keeps and refuses.  No time is asserted anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcore.benchmarks import CASES, Measurement, history
from kvcore.cli import main

QUICK = ["bench", "norm-1", "--seconds", "0.01"]


def test_it_prints_a_row_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUICK) == 0
    printed = capsys.readouterr().out
    assert "norm-1" in printed
    assert "copyto" in printed


def test_json_has_medians_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)
    assert case["name"] == "norm-1"
    assert case["ratios"]["copyto"] == pytest.approx(
        case["nanoseconds"]["kvcore"] / case["nanoseconds"]["copyto"]
    )


def test_history_grows_and_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "history.jsonl"
    for runs in (1, 2):
        assert main([*QUICK, "--save", str(kept)]) == 0
        assert len(kept.read_text().splitlines()) == runs
    assert main([*QUICK, "--compare", str(kept)]) == 0
    assert "before" in capsys.readouterr().out


def test_the_newest_run_counts(tmp_path: Path) -> None:
    kept = tmp_path / "history.jsonl"
    for nanoseconds in (10.0, 20.0):
        one = Measurement("case", "", 1, {"kvcore": nanoseconds, "copyto": 10.0})
        history.append(kept, {}, [one])
    assert history.last(kept)["case"]["ratios"]["copyto"] == 2.0


@pytest.mark.parametrize("text", ["", "nonsense\n", "[]\n", '{"cases": 3}\n'])
def test_a_file_that_holds_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    kept = tmp_path / "history.jsonl"
    kept.write_text(text)
    assert main([*QUICK, "--compare", str(kept)]) == 2
    assert "--compare" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["no-such-case"], ["--seconds", "0"], ["--seconds", "soon"]])
def test_wrong_arguments_say_what_is_allowed(
    capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    assert main(["bench", *wrong]) == 2
    assert "expected" in capsys.readouterr().err


def test_the_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in CASES)


def test_every_case_moves_the_bytes_it_says() -> None:
    for name in ("norm-1", "norm-256"):
        functions = CASES[name].build()
        for function in functions.values():
            function()
        assert {"kvcore", "copyto"} <= functions.keys()
