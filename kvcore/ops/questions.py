# SPDX-License-Identifier: Apache-2.0
"""What each SoC says of a call of any operator, from shapes and dtypes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcore._core import reach
from kvcore._core.plan import Operator
from kvcore._core.reach import Reach
from kvcore.errors import ParamInvalidError, fail
from kvcore.ops import (
    checks,
    gather_pa,
    gather_selection,
    kv_cache_update,
    scatter_case,
    scatter_pa,
)
from kvcore.ops.stand_in import StandIn, info_of
from kvcore.soc import PROFILES

__all__ = ["QUESTIONS", "Answer", "Question"]

Words = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """number: the scenario of a scatter, else None.  runs: per SoC None, or the reason why not.
    warnings: per SoC what it would do differently."""

    number: int | None
    runs: dict[str, str | None]
    warnings: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Question:
    """One operator: its arrays in order, its other arguments with their defaults, and what its
    resolver takes of these."""

    operator: Operator
    arrays: tuple[str, ...]
    words: dict[str, Any]
    params: Callable[[Words], tuple[Any, ...]]

    def ask(self, given: Mapping[str, Any]) -> Answer:
        """Ask every SoC.  given: arrays or (shape, dtype) pairs, and words, by name.

        Raises what the operator raises, without a SoC, for a call that no machine accepts.
        """
        words = {name: given.get(name, default) for name, default in self.words.items()}
        infos = tuple(
            info_of(given.get(name), name) if name in self.arrays else None
            for name in self.operator.arguments
        )
        params = self.params(words)
        spec = self.operator.spec_for(infos, params, None)
        for one in spec.reaches or ():
            name = self.operator.arguments[one.argument]
            _check_reach(one, infos[one.argument], given[name])
        case = spec.case
        number = getattr(case, "number", None)
        runs: dict[str, str | None] = {}
        warnings: dict[str, tuple[str, ...]] = {}
        for name, soc in PROFILES.items():
            try:
                spec = self.operator.spec_of(case, soc)
            except ParamInvalidError as error:
                runs[name] = str(error)
            else:
                runs[name] = None
                if spec.warnings:
                    warnings[name] = spec.warnings
        return Answer(number, runs, warnings)


def _check_reach(one: Reach, info: Any, value: Any) -> None:
    """Raise where memory that is known ends before what is read; a pair that is no flat buffer
    may be the view of any."""
    if not isinstance(info, StandIn):
        reach.check(one, info, value)
    elif len(info.shape) != len(one.shape) and one.end > math.prod(info.shape) * info.itemsize:
        fail(info.name, one.expected, math.prod(info.shape))


def _scatter_params(words: Words) -> tuple[Any, ...]:
    strides, offsets = words["strides"], words["offsets"]
    return (
        words["cache_mode"],
        words["scatter_mode"],
        None if strides is None else checks.listed(strides),
        None if offsets is None else checks.listed(offsets),
        words["dtype"],
        words["value_dtype"],
    )


def _scatter_key_params(words: Words) -> tuple[Any, ...]:
    return "Norm", "None", None, None, words["dtype"], None


def _update_params(words: Words) -> tuple[Any, ...]:
    return words["layer"], words["dtype"]


def _gather_pa_params(words: Words) -> tuple[Any, ...]:
    cumsum = checks.flag(words["is_seq_lens_cumsum"], "is_seq_lens_cumsum")
    return words["cache_mode"], cumsum, words["dtype"], words["value_dtype"]


def _selection_params(words: Words) -> tuple[Any, ...]:
    block, cumulative = words["selection_topk_block_size"], words["q_lens_cumulative"]
    return gather_selection.params_of(block, cumulative, words["dtype"], None)


#: By the operator's name.
QUESTIONS: dict[str, Question] = {
    "scatter_pa_kv_cache": Question(
        scatter_pa.SCATTER,
        scatter_case.ARGUMENTS,
        {
            "cache_mode": "Norm",
            "scatter_mode": "None",
            "strides": None,
            "offsets": None,
            "dtype": None,
            "value_dtype": None,
        },
        _scatter_params,
    ),
    "scatter_pa_cache": Question(
        scatter_pa.SCATTER_KEY,
        tuple(name for name in scatter_case.ARGUMENTS if not name.startswith("value")),
        {"dtype": None},
        _scatter_key_params,
    ),
    "kv_cache_update": Question(
        kv_cache_update.UPDATE,
        kv_cache_update.ARGUMENTS,
        # A layer that is a number; an array is layer_id.
        {"layer": None, "dtype": None},
        _update_params,
    ),
    "gather_pa_kv_cache": Question(
        gather_pa.GATHER,
        gather_pa.ARGUMENTS,
        {"cache_mode": "Norm", "is_seq_lens_cumsum": False, "dtype": None, "value_dtype": None},
        _gather_pa_params,
    ),
    "gather_selection_kv_cache": Question(
        gather_selection.SELECT,
        gather_selection.ARGUMENTS,
        {"selection_topk_block_size": 64, "q_lens_cumulative": False, "dtype": None},
        _selection_params,
    ),
}
