# SPDX-License-Identifier: Apache-2.0
"""Which scenario of ScatterPaKvCache a call is, and what each SoC says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore._core.plan import Operator
from kvcore.errors import ParamInvalidError
from kvcore.ops import scatter_pa
from kvcore.ops.stand_in import info_of
from kvcore.soc import PROFILES

__all__ = ["Scenario", "ask", "scenario_of"]


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


def ask(
    operator: Operator, infos: tuple[Any, ...], params: tuple[Any, ...]
) -> tuple[dict[str, str | None], dict[str, tuple[str, ...]]]:
    """What each SoC says of a call: (runs, warnings). Raises what no machine accepts."""
    operator.spec_for(infos, params, None)
    runs: dict[str, str | None] = {}
    warnings: dict[str, tuple[str, ...]] = {}
    for name, soc in PROFILES.items():
        try:
            spec = operator.spec_for(infos, params, soc)
        except ParamInvalidError as error:
            runs[name] = str(error)
        else:
            runs[name] = None
            if spec.warnings:
                warnings[name] = spec.warnings
    return runs, warnings


def scenario_of(
    key: Any,
    key_cache: Any,
    slot_mapping: Any,
    value: Any = None,
    value_cache: Any = None,
    *,
    compress_lens: Any = None,
    compress_seq_offset: Any = None,
    seq_lens: Any = None,
    cache_mode: str | None = "Norm",
    scatter_mode: str | None = "None",
    strides: Any = None,
    offsets: Any = None,
    dtype: Any = None,
    value_dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Scenario:
    """Say which scenario these arguments are, and which SoC would run them.

    Takes the arguments of scatter_pa_kv_cache; each array may be a pair (shape, dtype) in its
    place, which stands for a contiguous array of that shape (of stored items: float4 packed).
    soc, backend and num_threads change nothing here.  Nothing is read but shapes, strides and
    dtypes, and nothing is written.

    Raises what scatter_pa_kv_cache raises, without a SoC, for arguments that are wrong anywhere.
    """
    given = (
        key,
        key_cache,
        slot_mapping,
        value,
        value_cache,
        compress_lens,
        compress_seq_offset,
        seq_lens,
    )
    infos = tuple(map(info_of, given, scatter_pa.ARGUMENTS))
    params = (
        cache_mode,
        scatter_mode,
        None if strides is None else scatter_pa._listed(strides),
        None if offsets is None else scatter_pa._listed(offsets),
        dtype,
        value_dtype,
    )
    number = scatter_pa.classify(infos, params).number
    return Scenario(number, *ask(scatter_pa._SCATTER, infos, params))
