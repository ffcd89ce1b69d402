# SPDX-License-Identifier: Apache-2.0
"""Where two reports differ."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvcore.errors import fail
from kvcore.json_files import read_json

__all__ = ["Difference", "compare", "read_report"]

#: Keys that are not compared: times on this machine, identities of a run, and sentences.
IGNORED = (
    "schema", "version", "seconds", "scatter_gb_per_s", "trace", "timeline", "hashes", "sentence",
    "because",
)  # fmt: skip
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
    data = read_json(path, MAX_BYTES, "a report")
    if not isinstance(data, dict):
        fail(os.fspath(path), "a report of kvcore replay", f"a {type(data).__name__}")
    if "steps" not in data:
        fail(os.fspath(path), "a report of kvcore replay", "an object without 'steps'")
    return data


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """Every value that differs, the largest difference first; wall-clock times are left out.

    Where the reports have different schemas, only values that both have are compared.
    """
    common = before.get("schema") != after.get("schema")
    found = list(_differences("", before, after, common))
    return sorted(found, key=lambda d: (-d.relative, d.path))


def _differences(path: str, a: Any, b: Any, common: bool) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in IGNORED and not (common and (key not in a or key not in b)):
                where = f"{path}.{key}" if path else key
                yield from _differences(where, a.get(key), b.get(key), common)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{path}[{i}]", x, y, common)
    elif _is_number(a) and _is_number(b):
        if a != b:
            yield Difference(path, a, b, abs(b - a) / max(abs(a), abs(b)))
    elif a != b or type(a) is not type(b):
        yield Difference(path, a, b, math.inf)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
