# SPDX-License-Identifier: Apache-2.0
"""Every operator against the oracle on generated calls: right bytes, or the right refusal.

Legal calls run at one, two and three threads, as one-shot calls and as plans that run again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
import strategies
from cases import (
    Case,
    IllegalCase,
    check_matches_oracle,
    check_refused,
    check_rows_hold_their_tokens,
)
from strategies_selection import SelectionSequence

threads = st.sampled_from([None, 1, 2, 3])


def by_plan(operator: str, **arguments: Any) -> Any:
    """Plan, then run."""
    plan = getattr(kvcore, f"plan_{operator}")(**arguments)
    assert plan.workspace_size >= 0
    return plan.run()


def check(case: Case, num_threads: int | None, planned: bool) -> None:
    if planned:
        check_matches_oracle(case, partial(by_plan, case.operator, num_threads=num_threads))
    else:
        check_matches_oracle(case, partial(case.public(), num_threads=num_threads))


@pytest.mark.parametrize("scenario", range(1, 8))
@given(st.data(), threads, st.booleans())
def test_scatter(
    scenario: int, data: st.DataObject, num_threads: int | None, planned: bool
) -> None:
    check(data.draw(strategies.scatter_cases(scenarios=(scenario,))), num_threads, planned)


@pytest.mark.parametrize("scenario", range(1, 8))
@given(st.data())
def test_scatter_refuses(scenario: int, data: st.DataObject) -> None:
    check_refused(data.draw(strategies.illegal_scatter_cases(scenarios=(scenario,))))


@given(strategies.scatter_pa_cache_cases(), threads)
def test_scatter_pa_cache(case: Case, num_threads: int | None) -> None:
    check(case, num_threads, planned=False)


@given(strategies.illegal_scatter_pa_cache_cases())
def test_scatter_pa_cache_refuses(illegal: IllegalCase) -> None:
    check_refused(illegal)


@given(strategies.kv_cache_update_cases(), threads, st.booleans())
def test_kv_cache_update(case: Case, num_threads: int | None, planned: bool) -> None:
    check(case, num_threads, planned)


@given(strategies.illegal_kv_cache_update_cases())
def test_kv_cache_update_refuses(illegal: IllegalCase) -> None:
    check_refused(illegal)


@given(strategies.gather_pa_cases(beyond=True), threads, st.booleans())
def test_gather_pa(case: Case, num_threads: int | None, planned: bool) -> None:
    check(case, num_threads, planned)


@given(strategies.illegal_gather_pa_cases())
def test_gather_pa_refuses(illegal: IllegalCase) -> None:
    check_refused(illegal)


@given(strategies.gather_selection_cases(), threads, st.booleans())
def test_gather_selection(case: Case, num_threads: int | None, planned: bool) -> None:
    check(case, num_threads, planned)


@given(strategies.illegal_gather_selection_cases())
def test_gather_selection_refuses(illegal: IllegalCase) -> None:
    check_refused(illegal)


@given(strategies.selection_sequences(), threads)
def test_gather_selection_step_by_step(
    sequence: SelectionSequence, num_threads: int | None
) -> None:
    for case in sequence.steps():
        check(case, num_threads, planned=False)
        check_rows_hold_their_tokens(case)


@given(strategies.selection_sequences(), threads)
def test_gather_selection_plan_again(sequence: SelectionSequence, num_threads: int | None) -> None:
    """One plan serves every step: it reads the arrays' contents when it runs."""
    plan = kvcore.plan_gather_selection_kv_cache(**sequence.arguments, num_threads=num_threads)
    for case in sequence.steps():
        check_matches_oracle(case, lambda **_: plan.run(), stats=False)
        check_rows_hold_their_tokens(case)


@given(strategies.layout_cases())
def test_layout(case: Case) -> None:
    check_matches_oracle(case)
