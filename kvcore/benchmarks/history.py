# SPDX-License-Identifier: Apache-2.0
"""Measurements kept in a file: one JSON object a line, one line a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvcore.benchmarks.runner import Measurement
from kvcore.errors import fail

__all__ = ["append", "last"]


def append(path: Path, machine: Mapping[str, Any], measurements: Iterable[Measurement]) -> None:
    """Add a run to the file, which is made where it is missing."""
    run = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine),
        "cases": {one.name: one.to_json() for one in measurements},
    }
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(run, separators=(",", ":")) + "\n")


def last(path: Path) -> dict[str, Any]:
    """The cases of the file's newest run; ParamInvalidError for a file that holds none."""
    newest: Any = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            newest = json.loads(line)
        except ValueError:
            newest = None
        if not isinstance(newest, dict) or not isinstance(newest.get("cases"), dict):
            fail("--compare", "a file written with --save", f"{path}, line {number}")
    if newest is None:
        fail("--compare", "a file with at least one run", str(path))
    cases: dict[str, Any] = newest["cases"]
    return cases
