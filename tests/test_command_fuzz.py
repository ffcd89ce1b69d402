# SPDX-License-Identifier: Apache-2.0
"""A short run of tests/tools/fuzz_command.py: every sub-command with hostile words and files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent / "tools" / "fuzz_command.py"
CASES = 150


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
