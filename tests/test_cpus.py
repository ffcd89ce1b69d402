# SPDX-License-Identifier: Apache-2.0
"""The table of CPUs: which row a CPU gets, what it says, and the same bytes under every row."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
import strategies
from cases import Case, check_matches_oracle, check_rows_hold_their_tokens
from kvcore import cpus
from kvcore import isa as settings
from kvcore._kernels import isa, parallel
from kvcore.errors import ParamInvalidError
from strategies_selection import SelectionSequence

WAYS = [(name, path) for name in isa.available() for path in isa.paths(name)]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    name, path, count = isa.current(), isa.path(), isa.stream_bytes()
    several, row = parallel.parallel_bytes(), cpus.chosen()
    yield
    isa.select(name, path)
    isa.set_stream_bytes(count)
    parallel.set_parallel_bytes(several)
    cpus._chosen = row


def streamed(way: tuple[str, str]) -> None:
    isa.select(*way)
    isa.set_stream_bytes(0)


# ---------------------------------------------------------------- the same bytes
@given(st.sampled_from(WAYS), strategies.scatter_cases())
def test_scatter(way: tuple[str, str], case: Case) -> None:
    streamed(way)
    check_matches_oracle(case)


@given(st.sampled_from(WAYS), strategies.kv_cache_update_cases())
def test_kv_cache_update(way: tuple[str, str], case: Case) -> None:
    streamed(way)
    check_matches_oracle(case)


@given(st.sampled_from(WAYS), strategies.gather_pa_cases())
def test_gather_pa(way: tuple[str, str], case: Case) -> None:
    streamed(way)
    check_matches_oracle(case)


@given(st.sampled_from(WAYS), strategies.selection_sequences())
def test_gather_selection(way: tuple[str, str], sequence: SelectionSequence) -> None:
    streamed(way)
    for case in sequence.steps():
        check_matches_oracle(case)
        check_rows_hold_their_tokens(case)


# ---------------------------------------------------------------- which row
@pytest.mark.parametrize(
    ("vendor", "family", "model", "name"),
    [
        ("GenuineIntel", 6, 0x8F, "intel"),
        ("AuthenticAMD", 25, 0x01, "zen3"),  # EPYC 7003
        ("AuthenticAMD", 25, 0x11, "amd"),  # EPYC 9004 is a Zen 4 of the same family
        ("AuthenticAMD", 26, 0x02, "zen5"),
        ("AuthenticAMD", 23, 0x31, "amd"),
        ("HygonGenuine", 24, 0x01, "amd"),
        ("CentaurHauls", 7, 0x3B, "generic"),
        ("", 0, 0, "generic"),
    ],
)
def test_the_row_of_a_cpu(
    vendor: str, family: int, model: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert cpus.row_of(vendor, family, model).name == name


def test_the_row_of_an_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpus.row_of("", 0, 0).name == "arm"


def test_every_row_says_what_it_rests_on() -> None:
    for row in cpus.ROWS:
        assert row.basis
        assert row.path in ("lines", "near", "all")
    assert len({row.name for row in cpus.ROWS}) == len(cpus.ROWS)


# ---------------------------------------------------------------- caches
def sysfs(folder: Path, **levels: str) -> Path:
    for number, (level, size) in enumerate(levels.items()):
        index = folder / f"index{number}"
        index.mkdir(parents=True)
        (index / "level").write_text(level.removeprefix("level") + "\n")
        (index / "size").write_text(size + "\n")
    return folder


@pytest.mark.parametrize(
    ("size", "third"),
    [("32768K", 32 << 20), ("32M", 32 << 20), ("1G", 1 << 30), ("33554432", 32 << 20)],
)
def test_the_third_level_as_the_kernel_writes_it(
    size: str, third: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "CACHES", sysfs(tmp_path, level1="32K", level2="1M", level3=size))
    assert cpus.third_level() == third
    assert cpus.use("zen5").words() == []
    settings.apply_row("zen3")
    own = isa.stream_bytes()
    settings.apply_row("zen5")
    assert isa.stream_bytes() == max(own, third // 5)


@pytest.mark.parametrize("size", ["", "much", "0K", "-1K", "99999999M", "1K", "K", "12X"])
def test_absurd_sizes_are_passed_over(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "CACHES", sysfs(tmp_path, level3=size))
    assert cpus.third_level() is None
    settings.apply_row("zen3")
    own = isa.stream_bytes()
    settings.apply_row("zen5")
    assert isa.stream_bytes() == own
    assert any("second-level cache alone" in word for word in cpus.chosen().words())


def test_no_sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "CACHES", tmp_path / "none")
    monkeypatch.setattr(isa, "second_level", lambda: (-1, 1 << 20))
    assert cpus.third_level() is None
    assert cpus.use("zen3").words() == []
    assert cpus.use("zen5").words() == [
        "the border of streaming rests on the second-level cache alone"
    ]


def test_an_absurd_second_level_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "second_level", lambda: (1 << 40, 1 << 20))
    assert "1099511627776 bytes of second-level cache" in cpus.use("zen3").words()[0]


def test_the_caches_are_asked_for_only_where_a_row_rests_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked() -> int:
        raise AssertionError("the system was asked")

    monkeypatch.setattr(cpus, "_said_of_third_level", asked)
    settings.apply_row("zen3")
    with pytest.raises(AssertionError, match="was asked"):
        settings.apply_row("zen5")


@pytest.mark.parametrize(("count", "border"), [(1, 32 << 20), (2, 32 << 20), (3, None)])
def test_the_border_of_a_second_thread(
    count: int, border: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert cpus.use("zen5").parallel_bytes == border
    assert cpus.use("zen3").parallel_bytes is None


# ---------------------------------------------------------------- the variable
def started(name: str) -> dict[str, Any]:
    code = "import kvcore, json; i = kvcore.info()"
    code += "; print(json.dumps([i['cpu'], i['unusable_settings']]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"KVCORE_CPU": name},
        capture_output=True,
        text=True,
        check=True,
    )
    cpu, unusable = json.loads(done.stdout)
    return {**cpu, "unusable": unusable}


@pytest.mark.parametrize("row", cpus.ROWS, ids=lambda row: row.name)
def test_the_variable_takes_a_row(row: cpus.CpuRow) -> None:
    cpu = started(row.name)
    assert (cpu["row"], cpu["row_comes_from"]) == (row.name, "KVCORE_CPU")
    has = row.path in isa.paths(cpu["instruction_set"])
    assert cpu["path"] == (row.path if has else "lines")
    assert cpu["unusable"] == []


@pytest.mark.parametrize("name", ["zen", "ZEN5", "zen5 zen3", "\u2603", "9" * 5000])
def test_another_name_is_refused_and_the_found_row_holds(name: str) -> None:
    cpu = started(name)
    assert cpu["row_comes_from"] == "found"
    (fault,) = cpu["unusable"]
    assert fault.startswith("KVCORE_CPU: expected one of intel, zen3, zen5, amd, arm, generic, got")


def test_a_row_is_put_in_force_and_taken_back() -> None:
    settings.apply_row("generic")
    assert isa.path() == "lines"
    settings.apply_row("zen3")
    assert isa.path() == ("near" if "near" in isa.paths(isa.current()) else "lines")
    with pytest.raises(ParamInvalidError, match="KVCORE_CPU"):
        settings.apply_row("zen9")
    assert cpus.chosen().row.name == "zen3"
    assert kvcore.info()["cpu"]["row"] == "zen3"
