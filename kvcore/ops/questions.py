# SPDX-License-Identifier: Apache-2.0
"""What each SoC says of a call of any operator, from shapes and dtypes alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcore._core import reach
from kvcore._core.plan import Operator
from kvcore._core.reach import Reach
from kvcore.errors import ParamInvalidError, fail
from kvcore.ops import gather_pa, gather_selection, kv_cache_update, scatter_pa
from kvcore.ops.stand_in import StandIn, info_of
from kvcore.ops.twins import twin
from kvcore.soc import PROFILES

__all__ = ["QUESTIONS", "Answer", "Question"]

#: Keywords of every operator that no question asks of.
NOT_ASKED = ("soc", "backend", "num_threads", "stats")


@dataclass(frozen=True, slots=True)
class Answer:
    """number: the scenario of a scatter, else None.  runs: per SoC None, or the reason why not.
    warnings: per SoC what it would do differently."""

    number: int | None
    runs: dict[str, str | None]
    warnings: dict[str, tuple[str, ...]]


class Question:
    """What may be asked of one operator, from its own signature.

    arrays: its arrays in order.  words: its other arguments with their defaults.
    """

    def __init__(self, function: Callable[..., Any], operator: Operator) -> None:
        self.operator = operator
        parameters = inspect.signature(function).parameters
        self.arrays: tuple[str, ...] = tuple(
            name for name in operator.arguments if name in parameters
        )
        self.words: dict[str, Any] = {
            name: one.default
            for name, one in parameters.items()
            if name not in (*self.arrays, *NOT_ASKED)
        }
        doc = "What the operator makes of its arguments: arrays, and everything else."
        self._read = twin(
            function, operator, _given, name=f"read_{operator.name}", returns=tuple, doc=doc
        )

    def ask(self, given: Mapping[str, Any]) -> Answer:
        """Ask every SoC.  given: arrays or (shape, dtype) pairs, and words, by name.

        Raises what the operator raises, without a SoC, for a call that no machine accepts.
        """
        words = {name: given.get(name, default) for name, default in self.words.items()}
        return self.answer(*self._read(**{name: given.get(name) for name in self.arrays}, **words))

    def answer(self, arrays: tuple[Any, ...], params: tuple[Any, ...]) -> Answer:
        """The same of what the operator made of its arguments."""
        names = self.operator.arguments
        infos = tuple(info_of(value, name) for value, name in zip(arrays, names, strict=True))
        spec = self.operator.spec_for(infos, params, None)
        for one in spec.reaches or ():
            _check_reach(one, infos[one.argument], arrays[one.argument])
        case = spec.case
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
        return Answer(getattr(case, "number", None), runs, warnings)


class UpdateQuestion(Question):
    """A layer may be a number, which is no array."""

    def __init__(self, function: Callable[..., Any], operator: Operator) -> None:
        super().__init__(function, operator)
        self.words: dict[str, Any] = {"layer": None, **self.words}

    def ask(self, given: Mapping[str, Any]) -> Answer:
        """As of every operator; layer: a number for layer_id."""
        rest = {name: value for name, value in given.items() if name != "layer"}
        layer = given.get("layer")
        words = {"dtype": rest.get("dtype")}
        arrays = {name: rest.get(name) for name in self.arrays}
        if layer is not None:
            arrays["layer_id"] = layer
        return self.answer(*self._read(**arrays, **words))


def _given(
    arrays: tuple[Any, ...], params: tuple[Any, ...], *_: object
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return arrays, params


def _check_reach(one: Reach, info: Any, value: Any) -> None:
    """Raise where memory that is known ends before what is read; a pair that is no flat buffer
    may be the view of any."""
    if not isinstance(info, StandIn):
        reach.check(one, info, value)
    elif len(info.shape) != len(one.shape) and one.end > math.prod(info.shape) * info.itemsize:
        fail(info.name, one.expected, math.prod(info.shape))


#: By the operator's name.
QUESTIONS: dict[str, Question] = {
    question.operator.name: question
    for question in (
        Question(scatter_pa.scatter_pa_kv_cache, scatter_pa.SCATTER),
        Question(scatter_pa.scatter_pa_cache, scatter_pa.SCATTER_KEY),
        UpdateQuestion(kv_cache_update.kv_cache_update, kv_cache_update.UPDATE),
        Question(gather_pa.gather_pa_kv_cache, gather_pa.GATHER),
        Question(gather_selection.gather_selection_kv_cache, gather_selection.SELECT),
    )
}
