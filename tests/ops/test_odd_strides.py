# SPDX-License-Identifier: Apache-2.0
"""Strides that mean nothing: those of axes of one item, and all of an array without items.

numpy and torch let them be any number.  A call with other ones in their place must be taken,
refused under a SoC, and come out as the same call without.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
import strategies
from cases import Case, check_matches_oracle

ODD = (0, 1, 7, -3, 2**40, -(2**40), 2**62)

OPERATORS: dict[str, Any] = {
    "scatter_pa_kv_cache": strategies.scatter_cases(),
    "scatter_pa_cache": strategies.scatter_pa_cache_cases(),
    "kv_cache_update": strategies.kv_cache_update_cases(),
    "gather_pa_kv_cache": strategies.gather_pa_cases(),
    "gather_selection_kv_cache": strategies.gather_selection_cases(),
}


def oddly(array: Any, draw: Any) -> Any:
    """The same items with other strides where these mean nothing."""
    if not isinstance(array, np.ndarray) or (array.size and 1 not in array.shape):
        return array
    steps = tuple(
        draw(st.sampled_from(ODD)) if n == 1 or not array.size else step
        for n, step in zip(array.shape, array.strides, strict=True)
    )
    raw = array.view(f"u{array.itemsize}")  # numpy has no word for other packages' types
    made = np.lib.stride_tricks.as_strided(raw, strides=steps).view(array.dtype)
    if not array.flags.writeable:
        made.flags.writeable = False
    assert made.strides == steps
    return made


def oddly_all(arguments: dict[str, Any], draw: Any) -> dict[str, Any]:
    """Every array of a call; Nct's key and value stay, since numpy gives the new view no base and
    so hides the memory behind it."""
    kept = ("key", "value") if arguments.get("scatter_mode") == "Nct" else ()
    return {n: value if n in kept else oddly(value, draw) for n, value in arguments.items()}


def said(call: Any, arguments: dict[str, Any]) -> list[str]:
    """What a SoC's limits say to a call: warnings, and the error without what it saw."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = []
        try:
            call(**arguments)
        except kvcore.KVCoreError as error:
            found = [f"{type(error).__name__} {error.argument}: {error.expected}"]
    return found + sorted(str(w.message) for w in caught)


@pytest.mark.parametrize("operator", OPERATORS)
@given(data=st.data())
def test_the_bytes(operator: str, data: st.DataObject) -> None:
    case: Case = data.draw(OPERATORS[operator])

    def call(**arguments: Any) -> Any:
        given_ = oddly_all(arguments, data.draw)
        result = case.public()(**{**given_, **{k: arguments[k] for k in ("stats",) if k in given_}})
        return arguments["past"] if operator == "kv_cache_update" else result

    check_matches_oracle(case, call)


@pytest.mark.parametrize("operator", OPERATORS)
@given(data=st.data(), soc=st.sampled_from(["A2", "A3", "950"]))
def test_a_socs_limits(operator: str, soc: str, data: st.DataObject) -> None:
    case: Case = data.draw(OPERATORS[operator])
    before = case.arena.snapshot()
    arguments = {**case.arguments, "soc": soc}
    plain = said(case.public(), arguments)
    for buffer, content in zip(case.arena.buffers, before, strict=True):
        buffer[...] = content
    given_ = oddly_all(arguments, data.draw)
    assert said(case.public(), given_) == plain
