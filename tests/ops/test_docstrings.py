# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of public functions run, and print what they say."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore import layout, slots

#: Public functions that move or place rows of a cache.
OPERATORS = (
    "scatter_pa_kv_cache",
    "scatter_pa_cache",
    "reshape_and_cache",
    "kv_cache_update",
    "gather_pa_kv_cache",
    "gather_selection_kv_cache",
    "scenario_of",
    "permute_rows",
    "invalidate",
    "pack_float4",
    "unpack_float4",
)
FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(kvcore, name) for name in OPERATORS}
for module in (slots, layout):
    for name in module.__all__:
        if inspect.isfunction(getattr(module, name)):
            FUNCTIONS[f"{module.__name__}.{name}"] = getattr(module, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_example_prints_what_it_says(name: str) -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(FUNCTIONS[name], name, globs={})
    assert found.examples, "no example"
    assert sum(example.source.count("\n") for example in found.examples) <= 10
    said: list[str] = []
    with np.printoptions():
        done = doctest.DocTestRunner(verbose=False).run(found, out=said.append)
    assert done.failed == 0, "".join(said)
    assert done.attempted == len(found.examples)


def test_an_example_that_is_wrong_is_noticed() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda _: None).failed == 1
