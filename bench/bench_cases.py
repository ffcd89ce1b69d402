# SPDX-License-Identifier: Apache-2.0
"""Every case of kvcore bench: the operators against a copy of the same bytes, numpy and torch."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.benchmarks import CASES

FUNCTIONS = [
    "kvcore",
    "copyto",
    "numpy",
    "torch index_copy_",
    "torch index_put_",
    "torch index_select",
    "torch copy_",
    "copyto threads",
    "kvcore one thread",
]


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, CASES[request.param].build()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_case(benchmark: Any, case: tuple[str, dict[str, Any]], function: str) -> None:
    name, functions = case
    if function not in functions:
        pytest.skip(f"{name} has no {function}")
    benchmark.group = name
    benchmark.extra_info["bytes"] = CASES[name].nbytes
    benchmark.pedantic(functions[function], rounds=15, iterations=5, warmup_rounds=1)
