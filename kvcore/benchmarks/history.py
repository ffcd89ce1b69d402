# SPDX-License-Identifier: Apache-2.0
"""Measurements kept in a file: one JSON object a line, one line a run."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvcore.benchmarks.runner import Measurement
from kvcore.errors import fail
from kvcore.json_files import parse_json

__all__ = ["append", "last", "refuse_others"]

#: A run of all cases is some ten thousand bytes.
MAX_LINE_BYTES = 1 << 20
#: Of one time over another: some thousands at the most.
LARGEST_RATIO = 1e9


def refuse_others(path: Path) -> None:
    """Raise ParamInvalidError for a file that holds something else than runs: no line is added."""
    if path.is_file() and path.stat().st_size:
        last(path, "--save")


def append(path: Path, machine: Mapping[str, Any], measurements: Iterable[Measurement]) -> None:
    """Add a run to the file, which is made where it is missing."""
    run = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine),
        "cases": {one.name: one.to_json() for one in measurements},
    }
    line = json.dumps(run, separators=(",", ":")) + "\n"
    try:
        _append(path, line.encode())
    except OSError as error:
        fail("--save", "a file that can be written", f"{path}: {error.strerror}")


def _append(path: Path, line: bytes) -> None:
    """The whole line or nothing: half a line would hide every run before it."""
    with path.open("ab", buffering=0) as stream:
        regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        before = stream.seek(0, os.SEEK_END) if regular else 0
        try:
            left = memoryview(line)
            while left:
                left = left[stream.write(left) or 0 :]
        except BaseException:
            if regular:
                stream.truncate(before)
            raise


def last(path: Path, argument: str = "--compare") -> dict[str, Any]:
    """The cases of the file's newest run; ParamInvalidError for a file that holds none."""
    newest: dict[str, Any] | None = None
    with path.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), 1):
            if line.strip():
                newest = _cases(line)
                if newest is None:
                    fail(argument, "a file written with --save", f"{path}, line {number}")
    if newest is None:
        fail(argument, "a file with at least one run", str(path))
    return newest


def _cases(line: bytes) -> dict[str, Any] | None:
    """The cases of a run, each with ratios that are positive numbers; None if it is no run."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        cases = parse_json(line)["cases"]
        ratios = [ratio for case in cases.values() for ratio in case["ratios"].values()]
        if all(1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO for ratio in ratios):
            return dict(cases)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return None
