# SPDX-License-Identifier: Apache-2.0
"""JSON of files that may come from anywhere, read strictly.

What Python's reader lets pass is refused here: keys that come twice, NaN and Infinity, numbers that
no float holds, and nesting too deep for code that walks over the value.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from kvcore.errors import fail
from kvcore.files import read_bounded

__all__ = ["parse_json", "read_json", "unique_keys"]

MAX_DEPTH = 64
#: Of the largest integer that a float holds.
MAX_DIGITS = 308


def read_json(path: str | os.PathLike[str], most: int, what: str) -> Any:
    """The value that a file holds.

    most: bytes it may have; what: "a report", for messages.
    Raises ParamInvalidError naming the file, OSError when it cannot be read.
    """
    data = read_bounded(path, most, what)
    try:
        return parse_json(data)
    except (ValueError, RecursionError) as error:
        fail(os.fspath(path), f"{what} in JSON", str(error))


def parse_json(data: str | bytes) -> Any:
    """The value.  Raises ValueError that says what is wrong."""
    try:
        value = json.loads(
            data,
            object_pairs_hook=unique_keys,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_number,
        )
    except RecursionError:
        raise ValueError(f"more than {MAX_DEPTH} values within each other") from None
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise ValueError(f"more than {MAX_DEPTH} values within each other")


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's pairs as a dict.  Raises ValueError for a key that comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} comes twice")
            seen.add(key)
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits, more than {MAX_DIGITS}")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is more than a float holds")
    return value
