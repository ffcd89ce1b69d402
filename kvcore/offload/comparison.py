# SPDX-License-Identifier: Apache-2.0
"""Where two reports differ."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.errors import fail

__all__ = ["Difference", "compare", "read_report"]

#: What a run took on the machine it ran on, and which of two runs it was: nobody's result.
IGNORED = ("seconds", "scatter_gb_per_s", "trace", "timeline")
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Difference:
    """One value: its path, both sides, and their relative difference (infinite for no numbers)."""

    path: str
    before: Any
    after: Any
    relative: float


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A report written with ``--json``.  Raises ParamInvalidError for anything else."""
    name = os.fspath(path)
    if Path(name).stat().st_size > MAX_BYTES:
        fail(name, f"a report of at most {MAX_BYTES} bytes", "more")
    try:
        data = json.loads(Path(name).read_bytes())
    except (ValueError, RecursionError) as error:
        fail(name, "a report in JSON", str(error))
    if not isinstance(data, dict) or "steps" not in data:
        fail(name, "a report of kvcore replay", type(data).__name__)
    return data


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """Every value that is not the same, the largest difference first; wall-clock times aside."""
    found = list(_differences("", before, after))
    return sorted(found, key=lambda d: (-d.relative, d.path))


def _differences(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in IGNORED:
                yield from _differences(f"{path}.{key}" if path else key, a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{path}[{i}]", x, y)
    elif _is_number(a) and _is_number(b):
        if a != b:
            yield Difference(path, a, b, abs(b - a) / max(abs(a), abs(b)))
    elif a != b or type(a) is not type(b):
        yield Difference(path, a, b, math.inf)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
