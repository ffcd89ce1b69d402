# SPDX-License-Identifier: Apache-2.0
"""A short run of tests/tools/fuzz_command.py: every sub-command with hostile words and files."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.cli import commands

TOOL = Path(__file__).parents[1] / "tools" / "fuzz_command.py"
CASES = 150


def test_the_tool_knows_every_command() -> None:
    names = {module.name for module in pkgutil.iter_modules(commands.__path__)}
    program = f"import sys; sys.path.insert(0, {str(TOOL.parent)!r}); import fuzz_command as f; "
    done = subprocess.run(
        [sys.executable, "-c", program + "print(*f.OPTIONS)"], capture_output=True, text=True
    )
    assert set(done.stdout.split()) == names


@pytest.mark.timeout(300)
def test_hostile_words_and_files_end_with_a_status_of_the_table(tmp_path: Path) -> None:
    # In a process of its own, which bounds its memory.
    done = subprocess.run(
        [sys.executable, str(TOOL), str(CASES), "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.fullmatch(rf"{CASES} cases from seed 1: (.*); 0 wrong\n", done.stdout)
    assert told is not None
    counts = dict(map(int, reversed(part.split(" with "))) for part in told[1].split(", "))
    # It is hostile, and not everything is refused.
    assert counts[0] > CASES // 10
    assert counts[2] > CASES // 3
    assert os.listdir(tmp_path) == []
