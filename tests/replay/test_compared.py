# SPDX-License-Identifier: Apache-2.0
"""How the differences of two reports are shown: units, digits, and which side is better."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvcore.cli.program import main
from kvcore.replay.report.compared import Row, rows_of
from kvcore.replay.report.comparison import compare


def shown(path: str, before: Any, after: Any) -> Row:
    sides: list[dict[str, Any]] = []
    for value in (before, after):
        for key in reversed(path.split(".")):
            value = {key: value}
        sides.append(value)
    (row,) = rows_of(compare(*sides))
    assert row.path == path
    return row


@pytest.mark.parametrize(
    ("path", "before", "after", "texts", "reading"),
    [
        ("model_time_us.step", 667.41360132, 681.7, ("667.4 us", "681.7 us"), "worse"),
        ("model_time_us.all", 57.5e6, 900e3, ("57.50 s", "900.0 ms"), "better"),
        ("model_time_us.link", 186024.512, 180e3, ("186.0 ms", "180.0 ms"), ""),
        ("baseline.latency_ms.ttft.p99", 56166.02, 12.5, ("56.17 s", "12.50 ms"), "better"),
        ("latency_ms.tpot.count", 20, 19, ("20", "19"), ""),
        ("hit_rate", 0.914651971978, 0.8686, ("91.47%", "86.86%"), "worse"),
        ("overlap", 0.5, 0.75, ("50.00%", "75.00%"), "better"),
        ("tokens_per_s.decode", 5426.687, 6000.0, ("5,427 token/s", "6,000 token/s"), "better"),
        ("bytes.h2d", 165508480.0, 1e9, ("165.5 MB", "1.000 GB"), "worse"),
        ("memory.peak_host_bytes", 53698560, 512, ("53.70 MB", "512.0 bytes"), "better"),
        ("tokens.generated", 7892, 5874, ("7,892 tokens", "5,874 tokens"), ""),
        ("requests.preempted", 0, 3, ("0", "3"), "worse"),
        ("answer.speed_up", 1.25, None, ("1.250 times", "-"), ""),
        ("decision", "yes", "undecided", ("yes", "undecided"), ""),
        ("interrupted", False, True, ("False", "True"), ""),
        # What a run was given: neither side is better.
        ("options.weights_gib", 1.0, 2.0, ("1.000 GiB", "2.000 GiB"), ""),
        ("options.attain", 0.9, 0.95, ("90.00%", "95.00%"), ""),
        # As many digits as tell the sides apart.
        ("hit_rate", 0.9140001, 0.9140002, ("91.40001%", "91.40002%"), "better"),
        ("batch", 3.6218448829, 3.6218448821, ("3.621844883", "3.621844882"), ""),
        ("x", 10**300, 1, ("1e+300", "1"), ""),
    ],
)
def test_a_difference_has_its_unit_and_its_reading(
    path: str, before: Any, after: Any, texts: tuple[str, str], reading: str
) -> None:
    row = shown(path, before, after)
    assert (row.before, row.after) == texts
    assert row.reading == reading


def test_values_of_one_band_or_curve_are_one_row() -> None:
    first = {"answer": {"band": {"low": 1.0, "high": 2.0}, "curves": {"none": [[1, 2.0]]}}, "a": 1}
    second = {"answer": {"band": {"low": 1.5, "high": 2.0}, "curves": {"none": [[1, 8.0]]}}, "a": 1}
    rows = rows_of(compare(first, second))
    assert [(row.path, row.before) for row in rows] == [
        ("answer.curves", "1 values"),
        ("answer.band", "1 values"),
    ]
    assert [row.relative for row in rows] == [0.75, pytest.approx(1 / 3)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("compared")
    files = [str(folder / name) for name in ("a.json", "b.json")]
    for file, policy in zip(files, ("lru", "fifo"), strict=True):
        assert main(["replay", "--requests", "2", "--policy", policy, "--json", file]) == 0
    return files


def test_the_table_cuts_no_number(
    reports: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["replay", "--compare", *reports]) == 1
    out = capsys.readouterr().out
    assert "…" not in out
    assert re.search(r"differs +options\.policy +lru +fifo", out)
    assert re.search(r"better|worse", out)
    assert re.search(r"\d+ values differ, \d+ by more than 5\.00%$", out.strip())


def test_no_color_is_obeyed(
    reports: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FORCE_COLOR makes rich treat a pipe as a terminal; NO_COLOR leaves out every color."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["info"]) == 0
    assert main(["replay", "--compare", *reports]) == 1
    codes = re.findall(r"\x1b\[([\d;]*)m", capsys.readouterr().out)
    colors = [code for code in codes for n in code.split(";") if n and 30 <= int(n) <= 107]
    assert colors == []
