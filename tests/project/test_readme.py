# SPDX-License-Identifier: Apache-2.0
"""README.md: its Python runs, one block after the other, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) >= 5
    scope: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(BLOCKS):
        if block.startswith("# conftest.py"):
            continue  # the tests of the pytest plugin run it, in a process of its own
        if "import torch" in block and importlib.util.find_spec("torch") is None:
            continue
        exec(compile(block, f"README.md, Python block {number}", "exec"), scope)
    printed = capsys.readouterr().out
    assert "A3" in printed
    assert "us on the modelled A3" in printed


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_links_lead_to_files(link: str) -> None:
    assert link.startswith("http") or (ROOT / link).is_file()


def test_the_commands_are_the_two_that_are_promised() -> None:
    assert re.search(r"^pip install \. && kvcore replay\b", TEXT, flags=re.MULTILINE)
    assert re.search(
        r"^pip install -e '\.\[test\]' && python -m pytest\b", TEXT, flags=re.MULTILINE
    )
