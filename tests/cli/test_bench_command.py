# SPDX-License-Identifier: Apache-2.0
"""kvcore bench: what it prints, keeps and refuses.  No time is asserted anywhere."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore import cpus
from kvcore._kernels import isa, parallel
from kvcore.benchmarks import CASES, Measurement, history
from kvcore.cli import main

QUICK = ["bench", "norm-1", "--seconds", "0.01"]


@pytest.fixture(autouse=True)
def _kernels_as_they_were() -> Iterator[None]:
    way, row = (isa.current(), isa.path()), cpus.chosen()
    borders = isa.stream_bytes(), parallel.parallel_bytes()
    yield
    isa.select(*way)
    isa.set_stream_bytes(borders[0])
    parallel.set_parallel_bytes(borders[1])
    cpus._chosen = row


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


def test_two_rows_of_the_table_of_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--rows", "zen3,generic", "--json"]) == 0
    assert cpus.chosen().row.name == "generic"
    (case,) = json.loads(capsys.readouterr().out)
    assert list(case["nanoseconds"])[:2] == ["row zen3", "kvcore"]
    assert case["ratios"]["row zen3"] == pytest.approx(
        case["nanoseconds"]["kvcore"] / case["nanoseconds"]["row zen3"]
    )


@pytest.mark.parametrize("rows", ["zen3", "", "zen3,zen9", "zen3,zen3", "zen3,", ",zen3,intel"])
def test_rows_that_are_none(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--rows", rows]) == 2
    assert "--rows: expected two or more of intel, zen3" in capsys.readouterr().err


def test_it_explains_the_path(capsys: pytest.CaptureFixture[str]) -> None:
    parallel.set_parallel_bytes(1 << 20)
    assert main([*QUICK, "--explain"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "ordinary stores (4,096 bytes, the border is" in printed
    assert "stays below a second thread (1,048,576)" in printed


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


def of_ratio(ratio: str) -> bytes:
    return b'{"cases": {"norm-1": {"ratios": {"copyto": %s}}}}\n' % ratio.encode()


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"nonsense\n", b"[]\n", b'{"cases": 3}\n', b'{"cases": {"norm-1": 3}}\n'),
        *map(of_ratio, ("0", "-1", "NaN", "Infinity", "1e-320", "9" * 400, "null", '"1"')),
        b'{"cases": {}, "cases": {"norm-1": {"ratios": {"copyto": 1.5}}}}\n',
        *(b"\xff\xfe\x00", b"[" * 100_000, b'{"cases": ' + b"1" * 6000 + b"}"),
        b'{"cases": {}}' + b" " * history.MAX_LINE_BYTES,
    ],
    ids=repr,
)
def test_a_file_that_holds_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes
) -> None:
    kept = tmp_path / "history.jsonl"
    kept.write_bytes(text)
    assert main([*QUICK, "--compare", str(kept)]) == 2
    assert "--compare" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing/history.jsonl", "."])
def test_what_cannot_be_saved_is_refused_before_anything_is_measured(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr("kvcore.benchmarks.measure", None)
    assert main([*QUICK, "--save", str(tmp_path / name)]) == 2
    assert "expected a file" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, which is always full")
def test_a_full_disk_hides_no_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--save", "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert "norm-1" in printed.out
    assert "--save: expected a file that can be written, got /dev/full" in printed.err


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


def test_pytest_finds_the_benchmarks_in_their_folder(request: pytest.FixtureRequest) -> None:
    patterns = request.config.getini("python_files")
    assert any(Path("bench/bench_cases.py").match(pattern) for pattern in patterns)


def test_what_was_measured_before_an_interrupt_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(case: Any, seconds: float, rows: list[str]) -> Measurement:
        assert not rows
        signal.raise_signal(signal.SIGINT)
        return Measurement(case.name, "", 1, {"kvcore": 1.0, "copyto": 2.0})

    monkeypatch.setattr("kvcore.benchmarks.measure", measure)
    kept = tmp_path / "history.jsonl"
    assert main(["bench", "norm-1", "norm-256", "--save", str(kept)]) == 130
    told = capsys.readouterr()
    assert "norm-1" in told.out
    assert "norm-256" not in told.out
    assert "nothing is saved" in told.err
    assert not kept.exists()
