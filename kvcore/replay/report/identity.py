# SPDX-License-Identifier: Apache-2.0
"""Hashes that identify the inputs of a report, and rounding that makes its figures repeatable.

Sums of floating point numbers may differ in their last bits from one CPU to another, by the order
in which its instructions add.  Figures are therefore written with 12 significant digits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["DIGITS", "file_hash", "settled", "trace_hash"]

DIGITS = 12


def trace_hash(requests: Iterable[TraceRequest]) -> str:
    """A hash of the requests in their order: 16 hexadecimal digits."""
    said = [(r.timestamp_ms, r.input_length, r.output_length, r.hash_ids) for r in requests]
    return _hash(repr(said))


def file_hash(path: str) -> str:
    """A hash of a file's bytes: 16 hexadecimal digits.  Raises OSError."""
    found = hashlib.blake2b(digest_size=8)
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


def settled(value: Any) -> Any:
    """The same value with every float in it rounded to `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: settled(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [settled(inner) for inner in value]
    return value


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
