# SPDX-License-Identifier: Apache-2.0
"""What the page on offloading shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "offload.md"


def test_the_python_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Each program prints what the comment behind its print says."""
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert programs
    for program in programs:
        exec(compile(program, "offload.md", "exec"), {})
        expected = re.findall(r"^ *print\(.*\) +# (.*)$", program, re.M)
        assert capsys.readouterr().out.splitlines() == expected
