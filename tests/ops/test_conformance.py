# SPDX-License-Identifier: Apache-2.0
"""The public operators against every conformance case, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import conformance_cases
import kvcore
import oracle

TYPED_NAMES = [name for name in conformance_cases.NAMES if conformance_cases.can_be_typed(name)]


def check(name: str, typed: bool) -> None:
    case = conformance_cases.load(name, typed)
    inputs = {k: np.array(v) for k, v in case.arguments.items() if isinstance(v, np.ndarray)}
    want = oracle.run(case.operator, case.arguments)
    returned = getattr(kvcore, case.operator)(**case.arguments)
    if case.operator == "kv_cache_update":
        assert returned is case.arguments["past"]
    elif case.operator == "gather_selection_kv_cache":
        expected = case.expected.pop("selection_kv_actual_seq")
        assert returned.dtype == expected.dtype == np.int32
        np.testing.assert_array_equal(returned, expected)
    else:
        assert returned is None
    for argument, expected in case.expected.items():
        seen = oracle.bits(case.arguments[argument])
        free = want.unspecified.get(argument, np.zeros(seen.shape, bool))
        np.testing.assert_array_equal(
            np.where(free, 0, seen),
            np.where(free, 0, oracle.bits(expected)),
            err_msg=argument,
        )
    for argument, before in inputs.items():
        if argument not in case.expected:
            after = case.arguments[argument]
            np.testing.assert_array_equal(
                oracle.bits(after),
                oracle.bits(before),
                err_msg=f"{argument} was written",
            )


@pytest.mark.parametrize("name", conformance_cases.NAMES)
def test_raw_arrays(name: str) -> None:
    check(name, typed=False)


@pytest.mark.parametrize("name", TYPED_NAMES)
def test_typed_arrays(name: str) -> None:
    check(name, typed=True)
