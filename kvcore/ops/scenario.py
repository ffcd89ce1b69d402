# SPDX-License-Identifier: Apache-2.0
"""Which scenario of ScatterPaKvCache a call is, and what each SoC says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.ops.questions import QUESTIONS
from kvcore.ops.scatter_pa import SCATTER, scatter_pa_kv_cache
from kvcore.ops.twins import twin

__all__ = ["Scenario", "scenario_of", "verdict_lines"]


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


def _scenario(arrays: tuple[Any, ...], params: tuple[Any, ...], *_: object) -> Scenario:
    answer = QUESTIONS["scatter_pa_kv_cache"].answer(arrays, params)
    assert answer.number is not None
    return Scenario(answer.number, answer.runs, answer.warnings)


scenario_of = twin(
    scatter_pa_kv_cache,
    SCATTER,
    _scenario,
    name="scenario_of",
    returns=Scenario,
    module=__name__,
    doc="""Say which scenario these arguments are, and which SoC would run them.

    Takes the arguments of scatter_pa_kv_cache; each array may be a pair (shape, dtype) in its
    place, which stands for a contiguous array of that shape (in elements, also of float4).
    soc, backend and num_threads change nothing here.  Nothing is read but shapes, strides and
    dtypes, and nothing is written.

    Raises what scatter_pa_kv_cache raises, without a SoC, for arguments that are wrong anywhere.

    >>> import kvcore
    >>> found = kvcore.scenario_of(
    ...     ((4, 8, 128), "float16"), ((64, 8, 16, 128), "float16"), ((4,), "int32"),
    ...     ((4, 8, 128), "float16"), ((64, 8, 16, 128), "float16"), scatter_mode="NHSD",
    ... )
    >>> found.number, found.runs["A3"], found.runs["950"] is None
    (7, None, False)
    """,
)
