# SPDX-License-Identifier: Apache-2.0
"""What the documents show runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcore.cli import main

ROOT = Path(__file__).parents[2]


def test_the_python_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs/replay.md").read_text(), re.S)
    for program in programs:
        exec(compile(program, "replay.md", "exec"), {})
    caches, offload, answer = capsys.readouterr().out.splitlines()
    assert re.match(r"0\.0 [\d.]+ 0$", caches)
    hit_rate, step_us, real_share = map(float, offload.split())
    assert 0 < hit_rate < 1
    assert step_us > 500
    assert 0 < real_share <= 1
    assert re.match(r"(no No|undecided Undecided|yes Yes): [\d.]+ times \(", answer)


def test_the_page_names_no_option_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    main(["replay", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "docs/replay.md").read_text()))
    assert named <= options
    assert {"--cache-mib", "--blocks", "--verify-samples", "--json", "--policy", "--sweep"} <= named
