# SPDX-License-Identifier: Apache-2.0
"""What the strategies promise: legal cases are legal, illegal ones break the rule they say."""

from __future__ import annotations

from functools import partial

from hypothesis import given

import oracle
import strategies
from cases import Case, check_matches_oracle

LEGAL = {
    "scatter_pa_kv_cache": strategies.scatter_cases(),
    "scatter_pa_cache": strategies.scatter_pa_cache_cases(),
}


def check_legal(case: Case) -> None:
    assert oracle.violations(case.operator, case.arguments) == [], case
    check_matches_oracle(case, partial(apply_oracle, case.operator))


def apply_oracle(operator: str, **arguments: object) -> object:
    stats = arguments.pop("stats", None)
    if stats is not None:
        assert isinstance(stats, dict)
        stats |= oracle.run(operator, arguments).stats or {}
    return oracle.apply(operator, arguments)


@given(LEGAL["scatter_pa_kv_cache"])
def test_scatter_cases_are_legal(case: Case) -> None:
    check_legal(case)


@given(LEGAL["scatter_pa_cache"])
def test_scatter_pa_cache_cases_are_legal(case: Case) -> None:
    check_legal(case)
