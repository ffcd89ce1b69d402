# SPDX-License-Identifier: Apache-2.0
"""The examples about streams do what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import anyio
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_streams(capsys: pytest.CaptureFixture[str], anyio_backend: str) -> None:
    main = runpy.run_path(str(EXAMPLES / "streams.py"))["main"]
    anyio.run(main, backend=anyio_backend)
    said = capsys.readouterr().out
    assert "last row starts with 1.0, after 167.0 us" in said
    assert "RAW: copy on h2d, copy on compute: 1024 bytes" in said


def test_layerwise_load(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "layerwise_load.py"))["main"]()
    steps = re.findall(r"step \d: ([\d.]+) us", capsys.readouterr().out)
    assert len(steps) == 3
    assert len(set(steps)) == 1
