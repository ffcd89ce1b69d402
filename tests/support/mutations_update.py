# SPDX-License-Identifier: Apache-2.0
"""Breaks one rule of a legal kv_cache_update call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cases import Case, IllegalCase
from mutations import Draw, Mutation, broken, changed, draw_illegal, pick, too_big
from strategies_arrays import DTYPES
from strategies_paged import kv_cache_update_cases


def wrong_layer(draw: Draw, case: Case) -> IllegalCase:
    layer, layers = case.arguments["layer_id"], case.arguments["past"].shape[0]
    wrong = draw(st.sampled_from([-1, layers, *too_big(case), -(2**31)]))
    given: Any = wrong
    if isinstance(layer, np.ndarray):
        given = np.array([wrong], layer.dtype)
    elif draw(st.booleans()):
        given = draw(st.sampled_from([wrong, 2**63, 2**100, -(2**100)]))
    return broken(case, f"layer_id is {given} of {layers}", ["layer_id"], layer_id=given)


def wrong_layer_shape(draw: Draw, case: Case) -> IllegalCase:
    shape = draw(st.sampled_from([(0,), (2,), (1, 1)]))
    wrong = np.zeros(shape, case.arguments["seq_len"].dtype)
    return broken(case, f"layer_id has shape {shape}", ["layer_id"], layer_id=wrong)


def wrong_update_length(draw: Draw, case: Case) -> IllegalCase | None:
    name = pick(draw, ["seq_len", "token_offset"])
    array = case.arguments[name]
    if not len(array):
        return None
    b = draw(st.integers(0, len(array) - 1))
    most = case.arguments["past"].shape[2]
    length = int(case.arguments["seq_len"][b])
    if name == "seq_len":
        wrong = draw(st.sampled_from([-1, length + 1, -(2**31), *too_big(case)]))
        blamed = ["seq_len", "token_offset", "new_kv"]
    else:
        wrong = draw(st.sampled_from([length - 1, most + 1, -(2**31), *too_big(case)]))
        blamed = ["token_offset", "seq_len"]
    return broken(case, f"{name}[{b}] is {wrong}", blamed, **{name: changed(array, b, wrong)})


def tokens_do_not_add_up(draw: Draw, case: Case) -> IllegalCase:
    tokens = case.arguments["new_kv"]
    shape = (tokens.shape[0] + 1, *tokens.shape[1:])
    if tokens.ndim == 4 and tokens.shape[1] == 0:
        shape = (1, 1, *tokens.shape[2:])
    wrong = np.zeros(shape, tokens.dtype)
    return broken(case, f"new_kv has shape {shape}", ["new_kv", "seq_len"], new_kv=wrong)


def update_shapes_disagree(draw: Draw, case: Case) -> IllegalCase:
    name, axis = draw(
        st.sampled_from(
            [("new_kv", -1), ("past", -1), ("past", 1), ("seq_len", 0), ("token_offset", 0)]
        )
    )
    shape = list(case.arguments[name].shape)
    shape[axis] += 1
    blamed = ["past", "new_kv"] if axis == -1 else ["past", "seq_len", "token_offset"]
    wrong = np.zeros(shape, case.arguments[name].dtype)
    return broken(case, f"{name} has shape {shape}", blamed, **{name: wrong})


def update_rank(draw: Draw, case: Case) -> IllegalCase:
    name, rank = draw(st.sampled_from([("new_kv", 3), ("new_kv", 1), ("past", 3), ("seq_len", 2)]))
    wrong = np.zeros((1,) * rank, case.arguments[name].dtype)
    return broken(case, f"{name} is {rank}-D", [name], **{name: wrong})


OWN: tuple[Mutation, ...] = (
    wrong_layer,
    wrong_layer_shape,
    wrong_update_length,
    tokens_do_not_add_up,
    update_shapes_disagree,
    update_rank,
)


@st.composite
def illegal_kv_cache_update_cases(draw: Draw, dtypes: Sequence[str] = DTYPES) -> IllegalCase:
    """kv_cache_update calls with one rule broken."""
    return draw_illegal(draw, draw(kv_cache_update_cases(dtypes)), OWN)
