# SPDX-License-Identifier: Apache-2.0
"""The differences of two reports as a person reads them: with units, and which side is better."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.replay.report.comparison import Difference

__all__ = ["Row", "rows_of"]

#: Characters of a value.
MAX_SHOWN = 200
#: Many values that say one thing: they are counted, and the largest of their differences is shown.
TOGETHER = re.compile(r"^((?:baseline\.)?(?:answer\.(?:band|curves)|latency_quantiles_ms))\b")
#: What a run was given, and not what it found: neither side is better.
GIVEN = re.compile(
    r"^(options|model|device|deployment|seeds?|kind|fidelity|ids|prefill_basis|cache)\b"
)
LOWER = re.compile(
    r"model_time_us\.(all|decode|prefill|step|exposed|plan)$|latency_ms\.\w+\.(mean|p\d+)$"
    r"|preempt|aborted|recomputed|bytes\.h2d$|peak_(host|device)_bytes$|interval\.step_us"
)
HIGHER = re.compile(
    r"hit_rate|tokens_per_s\.|speed_up|attained$|prefix_hit$|prefix\.hit|overlap$|finished$"
)


def _scaled(*scales: tuple[float, str]) -> Callable[[float, int], str]:
    """Units of one quantity, the largest first: the first that gives 1 or more is taken."""

    def said(value: float, digits: int) -> str:
        size, unit = next((s for s in scales if abs(value) >= s[0]), scales[-1])
        return f"{_number(value / size, digits)} {unit}"

    return said


def _percent(value: float, digits: int) -> str:
    return f"{_number(100 * value, digits)}%"


def _plain(unit: str) -> Callable[[float, int], str]:
    return lambda value, digits: f"{_number(value, digits)} {unit}".rstrip()


#: Where a value is in a report -> how it is said.  The first that fits is taken.
UNITS: tuple[tuple[re.Pattern[str], Callable[[float, int], str]], ...] = tuple(
    (re.compile(pattern), said)
    for pattern, said in (
        (r"model_time_us\.|_us(\[|$)", _scaled((1e6, "s"), (1e3, "ms"), (1.0, "us"))),
        (r"_ms\.(?!\w+\.count)", _scaled((1e3, "s"), (1.0, "ms"))),
        (r"(^|\.)bytes\.|bytes$", _scaled((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))),
        (r"_gib$", _plain("GiB")),
        (r"hit_rate|_share$|overlap$|attain(ed)?$|accept$", _percent),
        (r"tokens_per_s", _plain("token/s")),
        (r"speed_up|factor$", _plain("times")),
        (r"tokens\.|prefix\.\w+_tokens|block_size$|chunk$", _plain("tokens")),
        (r"blocks$", _plain("blocks")),
        (r"^rows\.", _plain("rows")),
    )
)


def _number(value: float, digits: int) -> str:
    if isinstance(value, int) and abs(value) < 10**15:
        return f"{value:,}"
    if value == 0 or not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits}g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the comparison.

    relative: of the difference; infinite where one side is no number.
    reading:  "better", "worse", or "" where neither side is.
    """

    path: str
    before: str
    after: str
    relative: float
    reading: str


def rows_of(differences: Sequence[Difference]) -> list[Row]:
    """The differences, the largest first; values of one band, curve or distribution as one row."""
    return list(_rows(differences))


def _rows(differences: Sequence[Difference]) -> Iterator[Row]:
    together: dict[str, list[Difference]] = {}
    for one in differences:
        found = TOGETHER.match(one.path)
        if found:
            together.setdefault(found[1], []).append(one)
    for one in differences:
        found = TOGETHER.match(one.path)
        if found is None:
            yield Row(one.path, *_values(one), one.relative, _reading(one))
        elif found[1] in together:
            count = len(together.pop(found[1]))
            yield Row(found[1], f"{count} values", "", one.relative, "")


def _values(one: Difference) -> tuple[str, str]:
    """Both values, with as many digits as tell them apart."""
    said = next((said for pattern, said in UNITS if pattern.search(one.path)), _plain(""))
    texts = ("", "")
    for digits in range(4, 18):
        texts = (_text(one.before, said, digits), _text(one.after, said, digits))
        if texts[0] != texts[1]:
            break
    return texts


def _text(value: Any, said: Callable[[float, int], str], digits: int) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return said(value, digits)
    if value is None:
        return "-"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _reading(one: Difference) -> str:
    if GIVEN.match(one.path) or not math.isfinite(one.relative):
        return ""
    better = _sign(one.path)
    if not better:
        return ""
    return "better" if (one.after - one.before) * better > 0 else "worse"


def _sign(path: str) -> int:
    return -1 if LOWER.search(path) else 1 if HIGHER.search(path) else 0
