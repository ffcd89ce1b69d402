# SPDX-License-Identifier: Apache-2.0
"""What takes an operator's arguments takes all of them, in the same way."""

from __future__ import annotations

import inspect
import pickle
import sys
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore._core.plan import Plan
from kvcore.ops.questions import NOT_ASKED, QUESTIONS

PLANS = [name for name in kvcore.__all__ if name.startswith("plan_")]


def shape_of(function: Callable[..., Any]) -> list[tuple[str, Any, Any, Any]]:
    """Names, kinds, defaults and annotations of a function's parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default, one.annotation) for one in parameters]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_takes_what_its_operator_takes(name: str) -> None:
    plan, call = getattr(kvcore, name), getattr(kvcore, name.removeprefix("plan_"))
    assert shape_of(plan) == shape_of(call)
    assert plan.__name__ == plan.__qualname__ == name
    assert plan.__module__ == "kvcore.ops.derived"
    assert plan.__doc__.startswith(f"A Plan of {call.__name__} with the same arguments")
    assert typing.get_type_hints(plan)["return"] is Plan
    assert pickle.loads(pickle.dumps(plan)) is plan


def test_every_operator_has_a_plan_and_a_question() -> None:
    assert {name.removeprefix("plan_") for name in PLANS} == set(QUESTIONS)


def test_scenario_of_takes_what_the_scatter_takes() -> None:
    assert shape_of(kvcore.scenario_of) == shape_of(kvcore.scatter_pa_kv_cache)
    assert typing.get_type_hints(kvcore.scenario_of)["return"] is kvcore.Scenario
    assert pickle.loads(pickle.dumps(kvcore.scenario_of)) is kvcore.scenario_of


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_has_every_argument_with_its_default(name: str) -> None:
    question = QUESTIONS[name]
    parameters = inspect.signature(getattr(kvcore, name)).parameters
    asked = {*question.arrays, *question.words} - {"layer"}
    assert asked == set(parameters) - set(NOT_ASKED)
    for word, default in question.words.items():
        assert word == "layer" or default == parameters[word].default


def test_a_plan_and_a_call_make_one_frame_each() -> None:
    key = np.ones((2, 1, 8), np.float16)
    key_cache, value_cache = np.zeros((2, 4, 4, 1, 8), np.float16)
    slots = np.array([3, 9])
    for function, own in (
        (kvcore.scatter_pa_kv_cache, "scatter_pa_kv_cache"),
        (kvcore.plan_scatter_pa_kv_cache, "plan_scatter_pa_kv_cache"),
    ):
        function(key, key_cache, slots, key, value_cache)
        seen: list[str] = []

        def note(frame: Any, event: str, _: Any, seen: list[str] = seen) -> None:
            if event == "call" and frame.f_code.co_filename.endswith("scatter_pa.py"):
                seen.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            function(key, key_cache, slots, key, value_cache)
        finally:
            sys.setprofile(None)
        assert seen == [own]


def test_a_plan_writes_nothing_before_it_runs() -> None:
    key = np.ones((2, 1, 8), np.float16)
    key_cache, value_cache = np.zeros((2, 4, 4, 1, 8), np.float16)
    plan = kvcore.plan_scatter_pa_kv_cache(key, key_cache, np.array([3, 9]), key, value_cache)
    assert not key_cache.any()
    assert plan.run() is None
    assert np.flatnonzero(key_cache.reshape(16, 8).any(1)).tolist() == [3, 9]
