# SPDX-License-Identifier: Apache-2.0
"""Generated legal calls with each SoC: refused as the documents say, else the same bytes."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle_rules_soc
import strategies
from cases import Case, check_matches_oracle
from kvcore.errors import KVPortabilityWarning, ParamInvalidError
from soc_calls import ALL as DTYPES
from soc_calls import NAMES, SHORT


def check(case: Case, soc: str) -> None:
    reason = oracle_rules_soc.refuses(case.operator, case.arguments, soc)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always", KVPortabilityWarning)
        if reason is None:
            check_matches_oracle(case, partial(case.public(), soc=soc))
            check_warned(case, [str(one.message) for one in caught_warnings])
            return
        before = case.arena.snapshot()
        with pytest.raises(ParamInvalidError) as caught:
            case.public()(**case.arguments, soc=soc)
    assert soc in str(caught.value), reason
    assert caught.value.argument is not None
    assert str(caught.value).startswith(caught.value.argument)
    case.arena.assert_untouched(before)


def check_warned(case: Case, texts: list[str]) -> None:
    """Of what contents decide: repeated slots, and the documents' sum in Alibi."""
    a = case.arguments
    if case.operator == "kv_cache_update":
        strided = any(not array.flags.c_contiguous for array in case.arrays().values())
        assert [("a shape and no strides" in one) for one in texts].count(True) == int(strided)
        return
    for text, expected in (
        ("forbids repeated slots", oracle_rules_soc.repeats(a)),
        ("bounds the sum of", oracle_rules_soc.breaks_only_the_documents_sum(a)),
    ):
        assert [text in one for one in texts].count(True) == int(expected), (text, texts)


@pytest.mark.parametrize("scenario", range(1, 8))
@given(st.data(), st.sampled_from(NAMES))
def test_scatter(scenario: int, data: st.DataObject, soc: str) -> None:
    # Types that the older machines have, drawn more often than by chance.
    dtypes = data.draw(st.sampled_from([DTYPES, SHORT]))
    check(data.draw(strategies.scatter_cases(scenarios=(scenario,), dtypes=dtypes)), soc)


@given(strategies.scatter_pa_cache_cases(), st.sampled_from(NAMES))
def test_scatter_pa_cache(case: Case, soc: str) -> None:
    check(case, soc)


@given(strategies.kv_cache_update_cases(), st.sampled_from(NAMES))
def test_kv_cache_update(case: Case, soc: str) -> None:
    check(case, soc)
