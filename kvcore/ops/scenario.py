# SPDX-License-Identifier: Apache-2.0
"""Which scenario of ScatterPaKvCache a call is, and what each SoC says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.ops.questions import QUESTIONS

__all__ = ["Scenario", "scenario", "verdict_lines"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a call is and where it runs.

    number:   1 to 7, as CANN's document counts them.
    runs:     per SoC None (it runs), or the reason why it does not.
    warnings: per SoC what it would do differently, as a KVPortabilityWarning would say; only what
              shapes and dtypes decide, since there may be no contents.
    """

    number: int
    runs: Mapping[str, str | None]
    warnings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([f"scenario {self.number}", *verdict_lines(self.runs, self.warnings)])


def verdict_lines(
    runs: Mapping[str, str | None], warnings: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """One line a SoC, and one more a warning."""
    lines = []
    for soc, reason in runs.items():
        lines.append(f"{soc}: " + ("runs" if reason is None else f"refused: {reason}"))
        lines += [f"  warned of: {text}" for text in warnings.get(soc, ())]
    return lines


def scenario(arrays: tuple[Any, ...], params: tuple[Any, ...], *_: object) -> Scenario:
    """What scatter_pa_kv_cache would do with arrays and modes, read as it reads them."""
    answer = QUESTIONS["scatter_pa_kv_cache"].answer(arrays, params)
    assert answer.number is not None
    return Scenario(answer.number, answer.runs, answer.warnings)
