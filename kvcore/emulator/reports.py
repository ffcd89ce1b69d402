# SPDX-License-Identifier: Apache-2.0
"""What the machine found wrong with the program that runs on it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from kvcore.emulator import machine

__all__ = ["Report", "reports"]

_LINE = re.compile(r"\[(?P<section>[^]]*)\] (?P<symbol>\w*): (?P<text>.*)")


@dataclass(frozen=True, slots=True)
class Report:
    """One thing that was found; equal ones are counted.

    kind:   "rule": a call that breaks a rule of the runtime's interface.
    symbol: the function that was called.
    text:   what was wrong.
    count:  how often.
    """

    kind: str
    symbol: str
    text: str
    count: int = 1


def reports() -> list[Report]:
    """What was found in this process since the machine started, in order of first appearance."""
    loaded = machine._loaded
    if loaded is None:
        return []
    found = Counter(loaded.violations())
    made = []
    for line, count in found.items():
        parts = _LINE.fullmatch(line)
        symbol, text = (parts["symbol"], parts["text"]) if parts else ("", line)
        made.append(Report("rule", symbol, text, count))
    return made
