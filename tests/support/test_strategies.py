# SPDX-License-Identifier: Apache-2.0
"""What the strategies promise: legal cases are legal, illegal ones break the rule they say."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
import strategies
from cases import Case, blame, check_matches_oracle, check_rows_hold_their_tokens
from strategies_selection import SelectionSequence

LEGAL = {
    "scatter_pa_kv_cache": strategies.scatter_cases(),
    "scatter_pa_cache": strategies.scatter_pa_cache_cases(),
    "kv_cache_update": strategies.kv_cache_update_cases(),
    "gather_pa_kv_cache": strategies.gather_pa_cases(),
    "gather_selection_kv_cache": strategies.gather_selection_cases(),
}

ILLEGAL = {
    "scatter_pa_kv_cache": strategies.illegal_scatter_cases(),
    "scatter_pa_cache": strategies.illegal_scatter_pa_cache_cases(),
    "kv_cache_update": strategies.illegal_kv_cache_update_cases(),
    "gather_pa_kv_cache": strategies.illegal_gather_pa_cases(),
    "gather_selection_kv_cache": strategies.illegal_gather_selection_cases(),
}


def apply_oracle(operator: str, **arguments: object) -> object:
    """Stands in for the public function."""
    stats = arguments.pop("stats", None)
    if stats is not None:
        assert isinstance(stats, dict)
        stats |= oracle.run(operator, arguments).stats or {}
    return oracle.apply(operator, arguments)


@pytest.mark.parametrize("operator", LEGAL)
@given(data=st.data())
def test_legal_cases_are_legal(operator: str, data: st.DataObject) -> None:
    case = data.draw(LEGAL[operator])
    assert case.operator == operator
    assert oracle.violations(operator, case.arguments) == []
    check_matches_oracle(case, partial(apply_oracle, operator))


@given(strategies.layout_cases())
def test_layout_cases(case: Case) -> None:
    check_matches_oracle(case, partial(apply_oracle, case.operator))


@given(strategies.selection_sequences())
def test_selection_sequences_hold_what_they_say(sequence: SelectionSequence) -> None:
    for case in sequence.steps():
        assert oracle.violations(case.operator, case.arguments) == []
        check_matches_oracle(case, partial(apply_oracle, case.operator))
        check_rows_hold_their_tokens(case)


@pytest.mark.parametrize("operator", ILLEGAL)
@given(data=st.data())
def test_illegal_cases_break_the_rule_they_say(operator: str, data: st.DataObject) -> None:
    illegal = data.draw(ILLEGAL[operator])
    assert illegal.by_the_rules, illegal.broken
    at_fault = [v for v in illegal.by_the_rules if v.error in illegal.errors]
    assert at_fault, (illegal.broken, illegal.by_the_rules)
    assert blame(at_fault) & set(illegal.blamed), (illegal.broken, illegal.by_the_rules)
