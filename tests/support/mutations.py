# SPDX-License-Identifier: Apache-2.0
"""Breaks one rule of a legal call: what every operator refuses alike.

A mutation takes a legal case and returns an :class:`cases.IllegalCase`, or None when it does not
apply.  It never writes into the legal case's arrays, except to give an array that is made to
overlap an output the values the call needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

import oracle
from cases import Case, IllegalCase
from oracle_numbers import ITEMSIZE, Array
from oracle_rules import INVALID, NULL

Draw = Any
Mutation = Callable[[Draw, Case], IllegalCase | None]


@dataclass(frozen=True)
class Signature:
    """What an operator's arguments are.

    lanes: keyword that names a type -> the data arrays of that type.
    """

    required: tuple[str, ...]
    outputs: tuple[str, ...]
    lanes: dict[str, tuple[str, ...]]
    indices: tuple[str, ...]


_SCATTER_INDICES = ("slot_mapping", "compress_lens", "compress_seq_offset", "seq_lens")
_SELECTION_INDICES = (
    *("selection_kv_block_table", "selection_kv_block_status", "selection_topk_indices"),
    *("full_kv_block_table", "full_kv_actual_seq", "full_q_actual_seq"),
)
_SELECTION_CACHES = ("selection_kv_cache", "full_kv_cache")

SIGNATURES = {
    "scatter_pa_kv_cache": Signature(
        ("key", "key_cache", "slot_mapping"),
        ("key_cache", "value_cache"),
        {"dtype": ("key", "key_cache"), "value_dtype": ("value", "value_cache")},
        _SCATTER_INDICES,
    ),
    "scatter_pa_cache": Signature(
        ("key", "key_cache", "slot_mapping"),
        ("key_cache",),
        {"dtype": ("key", "key_cache")},
        _SCATTER_INDICES,
    ),
    "kv_cache_update": Signature(
        ("new_kv", "layer_id", "past", "token_offset", "seq_len"),
        ("past",),
        {"dtype": ("new_kv", "past")},
        ("layer_id", "token_offset", "seq_len"),
    ),
    "gather_pa_kv_cache": Signature(
        ("key_cache", "block_tables", "seq_lens", "key"),
        ("key", "value"),
        {"dtype": ("key_cache", "key"), "value_dtype": ("value_cache", "value")},
        ("block_tables", "seq_lens", "seq_offset"),
    ),
    "gather_selection_kv_cache": Signature(
        (*_SELECTION_CACHES, *_SELECTION_INDICES),
        ("selection_kv_cache", "selection_k_rope", "selection_kv_block_status"),
        {"dtype": (*_SELECTION_CACHES, "selection_k_rope", "full_k_rope")},
        _SELECTION_INDICES,
    ),
}


def broken(
    case: Case,
    what: str,
    blamed: Sequence[str],
    errors: str | Sequence[str] = INVALID,
    /,
    **changes: Any,
) -> IllegalCase:
    """The case with those arguments changed."""
    arguments = case.arguments | changes
    classes = (errors,) if isinstance(errors, str) else tuple(errors)
    return IllegalCase(
        Case(case.operator, arguments, case.arena, f"{case.note}; broken: {what}"),
        tuple(blamed),
        classes,
        what,
    )


def given(case: Case, names: Sequence[str]) -> list[str]:
    """Those of the names that are arrays with axes and elements in this case."""
    arrays = case.arrays()
    return [n for n in names if n in arrays and arrays[n].ndim and arrays[n].size]


def pick(draw: Draw, names: Sequence[str]) -> str:
    """One of the names."""
    chosen: str = draw(st.sampled_from(list(names)))
    return chosen


def changed(array: Array, index: Any, value: Any) -> Array:
    """A copy with one entry replaced."""
    copy = np.array(array, order="C")
    copy[index] = value
    return copy


def lane_of(case: Case, name: str) -> tuple[str, ...]:
    """The arguments that share a data array's type, and the keyword that names it."""
    for keyword, names in SIGNATURES[case.operator].lanes.items():
        if name in names:
            return (*names, keyword)
    return (name,)


def too_big(case: Case) -> list[int]:
    """Numbers far outside of anything, as wide as the case's index type allows."""
    dtypes = {case.arguments[n].dtype for n in given(case, SIGNATURES[case.operator].indices)}
    wide = dtypes == {np.dtype(np.int64)}
    return [2**31 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1] if wide else [2**31 - 1]


# -- what every operator refuses ------------------------------------------------------------------


def missing(draw: Draw, case: Case) -> IllegalCase:
    """A required argument is None."""
    name = pick(draw, SIGNATURES[case.operator].required)
    return broken(case, f"{name} is None", [name], NULL, **{name: None})


def not_an_array(draw: Draw, case: Case) -> IllegalCase:
    """A required argument is no array at all."""
    name = pick(draw, SIGNATURES[case.operator].required)
    thing = draw(st.sampled_from(["text", object(), 1.5, {}]))
    return broken(case, f"{name} is {thing!r}", [name], **{name: thing})


def wrong_data_dtype(draw: Draw, case: Case) -> IllegalCase | None:
    """A data array is of a type no operator moves."""
    lanes = [n for names in SIGNATURES[case.operator].lanes.values() for n in names]
    names = given(case, lanes)
    if not names:
        return None
    name = pick(draw, names)
    array = case.arguments[name]
    dtypes = ["float64", "complex64", "bool", "int64", "uint64", "S3", "M8[s]"]
    if array.dtype.itemsize > 1:
        dtypes.append(f">u{array.dtype.itemsize}")
    dtype = pick(draw, dtypes)
    wrong = np.zeros(array.shape, dtype)
    return broken(case, f"{name} is {dtype}", lane_of(case, name), **{name: wrong})


def wrong_type_name(draw: Draw, case: Case) -> IllegalCase | None:
    """A keyword names no type, or one that does not fit the arrays."""
    lanes = {k: given(case, names) for k, names in SIGNATURES[case.operator].lanes.items()}
    usable = [k for k, names in lanes.items() if names]
    if not usable:
        return None
    keyword = pick(draw, usable)
    size = case.arguments[lanes[keyword][0]].dtype.itemsize
    wrong = ["float17", "FLOAT16", "", *(n for n, s in ITEMSIZE.items() if s != size)]
    name = pick(draw, wrong)
    return broken(
        case, f"{keyword}={name!r}", (*lane_of(case, lanes[keyword][0]), keyword), **{keyword: name}
    )


def wrong_index_dtype(draw: Draw, case: Case) -> IllegalCase | None:
    """An index array is neither int32 nor int64."""
    names = given(case, SIGNATURES[case.operator].indices)
    if not names:
        return None
    name = pick(draw, names)
    dtype = pick(draw, ["int16", "uint32", "uint64", "float32", "bool"])
    with np.errstate(invalid="ignore"):
        wrong = case.arguments[name].astype(dtype)
    return broken(case, f"{name} is {dtype}", [name], **{name: wrong})


def mixed_index_dtypes(draw: Draw, case: Case) -> IllegalCase | None:
    """One index array is int32 and another int64."""
    names = given(case, SIGNATURES[case.operator].indices)
    if len(names) < 2:
        return None
    name = pick(draw, names)
    other = "int64" if case.arguments[name].dtype == np.int32 else "int32"
    changes = {name: case.arguments[name].astype(other)}
    return broken(case, f"{name} is {other}, the others are not", names, **changes)


def read_only_output(draw: Draw, case: Case) -> IllegalCase | None:
    """An output cannot be written."""
    names = given(case, SIGNATURES[case.operator].outputs)
    if not names:
        return None
    name = pick(draw, names)
    view = case.arguments[name].view()
    view.flags.writeable = False
    return broken(case, f"{name} is read-only", [name], **{name: view})


def folded_output(draw: Draw, case: Case) -> IllegalCase | None:
    """Elements of an output lie on one another."""
    choices = [
        (name, axis)
        for name in given(case, SIGNATURES[case.operator].outputs)
        for axis, count in enumerate(case.arguments[name].shape)
        if count > 1
    ]
    if not choices:
        return None
    name, axis = draw(st.sampled_from(choices))
    array = case.arguments[name]
    strides = list(array.strides)
    strides[axis] = 0
    folded = np.lib.stride_tricks.as_strided(oracle.bits(array), array.shape, strides)
    folded = folded.view(array.dtype)  # numpy cannot do it to the types of ml_dtypes
    return broken(case, f"axis {axis} of {name} has stride 0", [name], **{name: folded})


def _aliased(case: Case, name: str, output: str) -> Array | None:
    """The argument again, now over the output's memory, holding the values it had."""
    array = case.arguments[name]
    place = case.arena.places[output]
    room = len(case.arena.buffers[place.buffer]) - place.offset
    if array.nbytes > room:
        return None
    values = np.array(array)
    alias = case.arena.alias(output, array.shape, array.dtype)
    alias[...] = values
    return alias


def input_overlaps_output(draw: Draw, case: Case) -> IllegalCase | None:
    """An input or an index array lies on an output."""
    signature = SIGNATURES[case.operator]
    lanes = [n for names in signature.lanes.values() for n in names]
    outputs = given(case, signature.outputs)
    inputs = [n for n in given(case, (*lanes, *signature.indices)) if n not in signature.outputs]
    pairs = [(i, o) for i in inputs for o in outputs if i in case.arena.places]
    if not pairs:
        return None
    name, output = draw(st.sampled_from(pairs))
    if name in ("key", "value") and any(case.arguments.get("offsets") or ()):
        return None  # Nct reads that far behind the view's first element: perhaps no shared byte
    alias = _aliased(case, name, output)
    if alias is None:
        return None
    return broken(case, f"{name} lies on {output}", [name, *outputs], **{name: alias})


def outputs_overlap(draw: Draw, case: Case) -> IllegalCase | None:
    """Two outputs lie on one another."""
    outputs = given(case, SIGNATURES[case.operator].outputs)
    if len(outputs) < 2:
        return None
    first = pick(draw, outputs)
    second = pick(draw, [n for n in outputs if n != first])
    alias = _aliased(case, second, first)
    if alias is None:
        return None
    return broken(case, f"{second} lies on {first}", outputs, **{second: alias})


SHARED: tuple[Mutation, ...] = (
    missing,
    not_an_array,
    wrong_data_dtype,
    wrong_type_name,
    wrong_index_dtype,
    mixed_index_dtypes,
    read_only_output,
    folded_output,
    input_overlaps_output,
    outputs_overlap,
)


def draw_illegal(draw: Draw, case: Case, own: Sequence[Mutation]) -> IllegalCase:
    """Break one rule of the case."""
    mutations = (*own, *SHARED)
    first = draw(st.integers(0, len(mutations) - 1))
    for i in range(len(mutations)):
        illegal = mutations[(first + i) % len(mutations)](draw, case)
        if illegal is not None:
            break
    else:
        assume(False)
    assert isinstance(illegal, IllegalCase)
    illegal.by_the_rules = oracle.violations(illegal.case.operator, illegal.case.arguments)
    return illegal
