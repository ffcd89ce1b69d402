# SPDX-License-Identifier: Apache-2.0
"""Breaks one rule of a legal gather_selection_kv_cache or gather_pa_kv_cache call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cases import Case, IllegalCase
from mutations import Draw, Mutation, broken, changed, draw_illegal, given, pick, too_big
from oracle_gather import batch_lengths, block_size_of, empty
from oracle_numbers import Array
from oracle_rules import INVALID, NULL
from oracle_rules_gather import (
    BLOCK,
    CACHES,
    FULL_TABLE,
    KV,
    ROPES,
    STATUS,
    TABLE,
    TOPK,
    Q,
    used_entries,
)
from strategies_arrays import DTYPES
from strategies_paged import gather_pa_cases
from strategies_selection import gather_selection_cases

# -- gather_selection_kv_cache --------------------------------------------------------------------


def _steps(case: Case) -> int:
    return int(np.prod(case.arguments[TOPK].shape[:-1])) // max(len(case.arguments[KV]), 1)


def wrong_query_length(draw: Draw, case: Case) -> IllegalCase | None:
    q = case.arguments[Q]
    if not q.size:
        return None
    wrong = draw(st.sampled_from([-1, _steps(case) + 1, *too_big(case)]))
    return broken(case, f"{Q}[0] is {wrong}", [Q], **{Q: changed(q, 0, wrong)})


def decreasing_total(draw: Draw, case: Case) -> IllegalCase | None:
    q = case.arguments[Q]
    if len(q) < 2:
        return None
    totals = np.zeros(len(q), q.dtype)
    totals[0] = 1
    return broken(case, f"{Q}={totals.tolist()}", [Q], q_lens_cumulative=True, **{Q: totals})


def wrong_block(draw: Draw, case: Case) -> IllegalCase:
    wrong = draw(st.sampled_from([0, -1, 2.0, "64", -(2**63)]))
    return broken(case, f"{BLOCK}={wrong!r}", [BLOCK], **{BLOCK: wrong})


def block_that_does_not_divide(draw: Draw, case: Case) -> IllegalCase:
    wrong = max(case.arguments[c].shape[1] for c in CACHES) + draw(st.integers(1, 3))
    blamed = [BLOCK, *CACHES, *ROPES, TABLE, TOPK]
    return broken(case, f"{BLOCK}={wrong}", blamed, **{BLOCK: wrong})


def wrong_selection_entry(draw: Draw, case: Case) -> IllegalCase | None:
    used, _ = used_entries(case.arguments)
    if not used:
        return None
    at = draw(st.sampled_from(sorted(used)))
    bound = case.arguments[CACHES[0]].shape[0]
    wrong = draw(st.sampled_from([-1, bound, *too_big(case), -(2**31)]))
    return broken(
        case,
        f"{TABLE}{at} is {wrong}",
        [TABLE],
        **{TABLE: changed(case.arguments[TABLE], at, wrong)},
    )


def shared_selection_block(draw: Draw, case: Case) -> IllegalCase | None:
    used, _ = used_entries(case.arguments)
    if len(used) < 2:
        return None
    one, other = draw(st.permutations(sorted(used)))[:2]
    table = case.arguments[TABLE]
    changes = {TABLE: changed(table, one, table[other])}
    return broken(case, f"{TABLE}{one} and {other} name one block", [TABLE], **changes)


def wrong_full_entry(draw: Draw, case: Case) -> IllegalCase | None:
    _, needed = used_entries(case.arguments)
    if not needed:
        return None
    at = draw(st.sampled_from(sorted(needed)))
    bound = case.arguments[CACHES[1]].shape[0]
    wrong = draw(st.sampled_from([-1, bound, *too_big(case), -(2**31)]))
    changes = {FULL_TABLE: changed(case.arguments[FULL_TABLE], at, wrong)}
    return broken(case, f"{FULL_TABLE}{at} is {wrong}", [FULL_TABLE], **changes)


def id_beyond_the_table(draw: Draw, case: Case) -> IllegalCase | None:
    a = case.arguments
    if not len(a[KV]):
        return None
    capacity = a[FULL_TABLE].shape[1] * a[CACHES[1]].shape[1]
    beyond = capacity // a[BLOCK]
    ids = changed(a[TOPK], (0,) * a[TOPK].ndim, beyond)
    status = np.full_like(a[STATUS], -1)
    lengths = changed(a[KV], 0, (beyond + 4) * a[BLOCK] + _steps(case))
    status_out = np.array(status)
    return broken(
        case,
        f"id {beyond} beyond {capacity} tokens",
        [FULL_TABLE, TOPK, KV],
        **{TOPK: ids, STATUS: status_out, KV: lengths},
    )


def selection_shapes_disagree(draw: Draw, case: Case) -> IllegalCase | None:
    a = case.arguments
    if not a[TOPK].size:
        return None

    def more(name: str, axis: int) -> Array:
        shape = list(a[name].shape)
        shape[axis] += 1
        return np.zeros(shape, a[name].dtype)

    lengths = [TOPK, KV, Q, STATUS, FULL_TABLE, TABLE]
    choices: dict[str, tuple[str, int, list[str]]] = {
        "status": (STATUS, -1, [STATUS, TOPK]),
        "head": (TOPK, -2, [TOPK, STATUS]),
        "kv": (KV, 0, lengths),
        "q": (Q, 0, lengths),
        "full table": (FULL_TABLE, 0, lengths),
        "kv size": (CACHES[1], 2, [*CACHES]),
    }
    if not empty(a[ROPES[0]]):
        choices |= {
            "rope size": (ROPES[1], 2, [*ROPES]),
            "rope blocks": (ROPES[0], 0, [ROPES[0], CACHES[0]]),
            "full rope rows": (ROPES[1], 1, [ROPES[1], CACHES[1]]),
        }
    name, axis, blamed = choices[pick(draw, sorted(choices))]
    wrong = more(name, axis)
    return broken(case, f"{name} has shape {wrong.shape}", blamed, **{name: wrong})


def too_few_rows(draw: Draw, case: Case) -> IllegalCase | None:
    a = case.arguments
    rows = int(np.prod(a[TOPK].shape[:-1]))
    if not rows:
        return None
    table = np.array(a[TABLE][: rows - 1])
    return broken(case, f"{TABLE} has {rows - 1} rows", [TABLE, TOPK, STATUS], **{TABLE: table})


def too_few_columns(draw: Draw, case: Case) -> IllegalCase | None:
    a = case.arguments
    if not a[TOPK].size:
        return None
    needed = -(-a[TOPK].shape[-1] * a[BLOCK] // a[CACHES[0]].shape[1])
    table = np.array(a[TABLE][:, : needed - 1])
    blamed = [TABLE, TOPK, BLOCK, CACHES[0]]
    return broken(case, f"{TABLE} has {needed - 1} columns", blamed, **{TABLE: table})


def one_rope(draw: Draw, case: Case) -> IllegalCase | None:
    if empty(case.arguments[ROPES[0]]):
        return None
    name = pick(draw, ROPES)
    nothing = draw(st.sampled_from([None, np.zeros(0, np.float16)]))
    errors = (NULL, INVALID) if nothing is None else INVALID
    return broken(case, f"only {name} is empty", ROPES, errors, **{name: nothing})


SELECTION: tuple[Mutation, ...] = (
    wrong_query_length,
    decreasing_total,
    wrong_block,
    block_that_does_not_divide,
    wrong_selection_entry,
    shared_selection_block,
    wrong_full_entry,
    id_beyond_the_table,
    selection_shapes_disagree,
    too_few_rows,
    too_few_columns,
    one_rope,
)


@st.composite
def illegal_gather_selection_cases(draw: Draw, dtypes: Sequence[str] = DTYPES) -> IllegalCase:
    """gather_selection_kv_cache calls with one rule broken."""
    return draw_illegal(draw, draw(gather_selection_cases(dtypes)), SELECTION)


# -- gather_pa_kv_cache ---------------------------------------------------------------------------


def _needed(case: Case) -> list[tuple[int, int]]:
    """(request, column) entries of the table in use."""
    a = case.arguments
    size = block_size_of(a["key_cache"], a.get("cache_mode", "Norm"))
    found = []
    for b, n in enumerate(batch_lengths(a["seq_lens"], a.get("is_seq_lens_cumsum", False))):
        first = 0 if a.get("seq_offset") is None else int(a["seq_offset"][b]) // size
        found += [(b, first + c) for c in range(-(-n // size))]
    return found


def wrong_table_entry(draw: Draw, case: Case) -> IllegalCase | None:
    needed = _needed(case)
    if not needed:
        return None
    at = draw(st.sampled_from(needed))
    bound = case.arguments["key_cache"].shape[0]
    wrong = draw(st.sampled_from([-1, bound, *too_big(case), -(2**31)]))
    tables = changed(case.arguments["block_tables"], at, wrong)
    return broken(case, f"block_tables{at} is {wrong}", ["block_tables"], block_tables=tables)


def table_too_narrow(draw: Draw, case: Case) -> IllegalCase | None:
    needed = _needed(case)
    if not needed:
        return None
    width = max(column for _, column in needed)
    tables = np.array(case.arguments["block_tables"][:, :width])
    blamed = ["block_tables", "seq_lens", "seq_offset"]
    return broken(case, f"block_tables has {width} columns", blamed, block_tables=tables)


def wrong_offset(draw: Draw, case: Case) -> IllegalCase | None:
    needed, offsets = _needed(case), case.arguments.get("seq_offset")
    if not needed or offsets is None:
        return None
    b = draw(st.sampled_from(needed))[0]
    wrong = draw(st.sampled_from([-1, -(2**31), *too_big(case)]))
    blamed = ["seq_offset"] if wrong < 0 else ["seq_offset", "block_tables", "seq_lens"]
    return broken(
        case, f"seq_offset[{b}] is {wrong}", blamed, seq_offset=changed(offsets, b, wrong)
    )


def wrong_lengths(draw: Draw, case: Case) -> IllegalCase | None:
    lengths = case.arguments["seq_lens"]
    if len(case.arguments["block_tables"]) == 0:
        return None
    b = draw(st.integers(0, len(lengths) - 1))
    wrong = draw(st.sampled_from([-1, int(lengths[b]) + 1, *too_big(case)]))
    blamed = ["seq_lens", "key", "value", "block_tables"]
    return broken(case, f"seq_lens[{b}] is {wrong}", blamed, seq_lens=changed(lengths, b, wrong))


def wrong_number_of_lengths(draw: Draw, case: Case) -> IllegalCase:
    lengths = np.append(case.arguments["seq_lens"], case.arguments["seq_lens"][-1:])
    lengths = np.append(lengths, np.zeros(1, lengths.dtype))
    blamed = ["seq_lens", "block_tables"]
    return broken(case, f"seq_lens has {len(lengths)} entries", blamed, seq_lens=lengths)


def gather_shapes_disagree(draw: Draw, case: Case) -> IllegalCase | None:
    name = pick(draw, given(case, ["key", "value", "key_cache", "value_cache"]) or ["key"])
    array = case.arguments[name]
    if not array.size:
        return None
    shape = list(array.shape)
    shape[draw(st.sampled_from([0, -1]) if name in ("key", "value") else st.just(-1))] += 1
    blamed = ["key", "key_cache", "value", "value_cache", "seq_lens"]
    return broken(case, f"{name} has shape {shape}", blamed, **{name: np.zeros(shape, array.dtype)})


def gather_rank(draw: Draw, case: Case) -> IllegalCase:
    name = pick(draw, ["key", "key_cache", "block_tables", "seq_lens"])
    array = case.arguments[name]
    wrong = np.zeros((1,) * (array.ndim + 2), array.dtype)
    blamed = ["key", "key_cache"] if name.startswith("key") else [name]
    return broken(case, f"{name} is {wrong.ndim}-D", blamed, **{name: wrong})


def gather_mode(draw: Draw, case: Case) -> IllegalCase:
    wrong: Any = draw(st.sampled_from(["ND", "norm", "pa_nz", "NZ", 3]))
    return broken(case, f"cache_mode={wrong!r}", ["cache_mode"], cache_mode=wrong)


def half_a_gather(draw: Draw, case: Case) -> IllegalCase | None:
    if case.arguments["value"] is None:
        return None
    name = pick(draw, ["value", "value_cache"])
    return broken(case, f"only {name} is None", [name], NULL, **{name: None})


GATHER_PA: tuple[Mutation, ...] = (
    wrong_table_entry,
    table_too_narrow,
    wrong_offset,
    wrong_lengths,
    wrong_number_of_lengths,
    gather_shapes_disagree,
    gather_rank,
    gather_mode,
    half_a_gather,
)


@st.composite
def illegal_gather_pa_cases(draw: Draw, dtypes: Sequence[str] = DTYPES) -> IllegalCase:
    """gather_pa_kv_cache calls with one rule broken."""
    return draw_illegal(draw, draw(gather_pa_cases(dtypes)), GATHER_PA)
