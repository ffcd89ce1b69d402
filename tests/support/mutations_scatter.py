# SPDX-License-Identifier: Apache-2.0
"""Breaks one rule of a legal scatter call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from cases import Case, IllegalCase
from mutations import Draw, Mutation, broken, changed, draw_illegal, given, pick, too_big
from oracle_numbers import FLOAT4, raw_dtype
from oracle_rules import INVALID, NULL, SLOT
from oracle_rules_scatter import num_slots
from oracle_scatter import absent, memory_behind, run_tokens, scenario
from strategies_arrays import DTYPES
from strategies_scatter import SCENARIOS, scatter_cases, scatter_pa_cache_cases


def number_of(case: Case) -> int:
    """The scenario of the case."""
    a = case.arguments
    return scenario(
        a["key"], a.get("cache_mode"), a.get("scatter_mode"), absent(a.get("value_cache"))
    )


def has_windows(case: Case) -> bool:
    """Scenarios 3, 4 and 5."""
    return number_of(case) in (3, 4, 5)


def is_nct(case: Case) -> bool:
    """Sources that are counted with strides and offsets."""
    return number_of(case) in (2, 6) and case.arguments.get("scatter_mode") == "Nct"


def rule_of(case: Case) -> str:
    """Alibi, Rope or Omni of a case with windows."""
    mode = case.arguments.get("scatter_mode")
    if mode in ("Alibi", "Rope", "Omni"):
        return str(mode)
    return "Rope" if "compress_seq_offset" in case.arguments else "Alibi"


def writes(case: Case) -> bool:
    """There are tokens, and they have bytes."""
    return (
        bool(given(case, ["slot_mapping"]))
        and all(case.arguments[n].shape[-1] for n in ("key", "key_cache"))
        and bool(case.arguments["key"].size)
    )


def lanes(case: Case) -> list[tuple[str, str]]:
    """(source, cache) names."""
    pairs = [("key", "key_cache"), ("value", "value_cache")]
    return pairs[: 1 if absent(case.arguments.get("value_cache")) else 2]


def runs(case: Case) -> list[tuple[int, int, int, int, int]]:
    """(position, slot, n, w, o) of every run."""
    a = case.arguments
    heads = a["key"].shape[-2]
    slots, windows = a["slot_mapping"].reshape(-1), a["compress_lens"].reshape(-1)
    starts = a.get("compress_seq_offset")
    return [
        (
            i,
            int(s),
            int(a["seq_lens"][i // heads]),
            int(w),
            -1 if starts is None else int(starts[i]),
        )
        for i, (s, w) in enumerate(zip(slots, windows, strict=True))
    ]


def slot_past_the_end(draw: Draw, case: Case) -> IllegalCase | None:
    if has_windows(case) or not writes(case):
        return None
    slots, bound = case.arguments["slot_mapping"], num_slots(case.arguments)
    i = draw(st.integers(0, len(slots) - 1))
    slot = draw(st.sampled_from([bound, bound + 1, *too_big(case)]))
    changes = {"slot_mapping": changed(slots, i, slot)}
    return broken(case, f"slot {i} is {slot} of {bound}", ["slot_mapping"], SLOT, **changes)


def run_past_the_end(draw: Draw, case: Case) -> IllegalCase | None:
    if not has_windows(case) or not writes(case):
        return None
    i, _, n, w, o = draw(st.sampled_from(runs(case)))
    bound = num_slots(case.arguments)
    rows = len(run_tokens(rule_of(case), n, w, o))
    slot = draw(st.sampled_from([max(bound - max(rows, 1) + 1, 0), bound, *too_big(case)]))
    slots = case.arguments["slot_mapping"]
    changes = {"slot_mapping": changed(slots, np.unravel_index(i, slots.shape), slot)}
    return broken(
        case, f"run {i} of {rows} rows is at {slot} of {bound}", ["slot_mapping"], SLOT, **changes
    )


def wrong_slot_count(draw: Draw, case: Case) -> IllegalCase | None:
    if is_nct(case) or not writes(case):
        return None
    slots = case.arguments["slot_mapping"]
    longer = np.concatenate([slots, slots[:1]]) if draw(st.booleans()) else np.array(slots[1:])
    blamed = ["slot_mapping", "key", "value", "seq_lens"]
    return broken(case, f"slot_mapping has shape {longer.shape}", blamed, slot_mapping=longer)


def wrong_cache_shape(draw: Draw, case: Case) -> IllegalCase | None:
    _, cache = draw(st.sampled_from(lanes(case)))
    array = case.arguments[cache]
    if is_nct(case) or not array.size:
        return None
    number = number_of(case)
    axes = {1: (1, array.ndim - 1), 7: (1, 3)}.get(number, (2, 3))
    axis = draw(st.sampled_from(axes))
    shape = list(array.shape)
    shape[axis] += draw(st.sampled_from([1, -1]) if shape[axis] > 1 else st.just(1))
    what = f"{cache} has shape {shape}"
    blamed = [n for lane in lanes(case) for n in lane]
    return broken(case, what, blamed, **{cache: np.zeros(shape, array.dtype)})


def wrong_rank(draw: Draw, case: Case) -> IllegalCase | None:
    if is_nct(case):
        return None
    name = pick(draw, [n for lane in lanes(case) for n in lane])
    rank = draw(st.sampled_from([1, 2, 6]))
    wrong = np.zeros((2,) * rank, case.arguments[name].dtype)
    # another rank is another scenario's, so whatever that one misses may be blamed
    blamed = [n for lane in lanes(case) for n in lane] + ["slot_mapping", "scatter_mode"]
    blamed += ["compress_lens", "compress_seq_offset", "seq_lens"]
    return broken(case, f"{name} is {rank}-D", blamed, (INVALID, NULL), **{name: wrong})


def value_disagrees(draw: Draw, case: Case) -> IllegalCase | None:
    """Other tokens or heads in the value, or other blocks in its cache."""
    if len(lanes(case)) == 1:
        return None
    name = "value_cache" if is_nct(case) else pick(draw, ["value", "value_cache"])
    array = case.arguments[name]
    shape = (array.shape[0] + 1, *array.shape[1:])
    blamed = ["value", "value_cache", "key", "key_cache", "slot_mapping"]
    return broken(case, f"{name} has shape {shape}", blamed, **{name: np.zeros(shape, array.dtype)})


def half_a_value(draw: Draw, case: Case) -> IllegalCase | None:
    if len(lanes(case)) == 1:
        return None
    name = pick(draw, ["value", "value_cache"])
    if draw(st.booleans()):
        return broken(case, f"only {name} is None", [name], NULL, **{name: None})
    scalar = np.zeros((), case.arguments[name].dtype)
    return broken(case, f"only {name} is 0-d", ["value", "value_cache"], INVALID, **{name: scalar})


def wrong_mode(draw: Draw, case: Case) -> IllegalCase:
    name = pick(draw, ["cache_mode", "scatter_mode"])
    wrong = draw(
        st.sampled_from(["ND", "norm", "pa_nz", "alibi", "NZ", "nhsd", "Norm ", 3, b"Norm"])
    )
    return broken(case, f"{name}={wrong!r}", [name], **{name: wrong})


def array_of_another_scenario(draw: Draw, case: Case) -> IllegalCase | None:
    names = ["compress_lens", "compress_seq_offset", "seq_lens"]
    if has_windows(case):
        if rule_of(case) != "Alibi" or case.arguments.get("scatter_mode") != "Alibi":
            return None
        names = ["compress_seq_offset"]
    name = pick(draw, names)
    slots = case.arguments["slot_mapping"]
    extra = np.zeros(slots.size, slots.dtype)
    return broken(case, f"{name} given", [name], **{name: extra})


def missing_window_array(draw: Draw, case: Case) -> IllegalCase | None:
    if not has_windows(case):
        return None
    names = ["compress_lens", "seq_lens"]
    if case.arguments.get("scatter_mode") in ("Rope", "Omni"):
        names.append("compress_seq_offset")
    name = pick(draw, names)
    return broken(case, f"{name} is None", [name], NULL, **{name: None})


def wrong_window_shape(draw: Draw, case: Case) -> IllegalCase | None:
    if not has_windows(case) or not writes(case):
        return None
    name = pick(draw, given(case, ["compress_lens", "compress_seq_offset", "seq_lens"]))
    array = case.arguments[name].reshape(-1)
    longer = np.concatenate([array, array[:1]])
    blamed = [
        *given(case, ["compress_lens", "compress_seq_offset", "seq_lens", "slot_mapping"]),
        "key",
    ]
    return broken(case, f"{name} has {len(longer)} entries", blamed, **{name: longer})


def wrong_length(draw: Draw, case: Case) -> IllegalCase | None:
    """seq_lens that do not fit the tokens."""
    if not has_windows(case) or not writes(case):
        return None
    lengths = case.arguments["seq_lens"]
    b = draw(st.integers(0, len(lengths) - 1))
    key = case.arguments["key"]
    most = key.shape[1] if key.ndim == 4 else int(lengths[b])
    wrong = draw(st.sampled_from([-1, most + 1, *too_big(case)]))
    blamed = ["seq_lens", "key"]
    return broken(case, f"seq_lens[{b}] is {wrong}", blamed, seq_lens=changed(lengths, b, wrong))


def negative_length_that_adds_up(draw: Draw, case: Case) -> IllegalCase | None:
    if number_of(case) not in (4, 5) or not writes(case) or len(case.arguments["seq_lens"]) < 2:
        return None
    lengths = np.array(case.arguments["seq_lens"])
    lengths[1] += lengths[0] + 1
    lengths[0] = -1
    return broken(case, "seq_lens[0] is -1", ["seq_lens"], seq_lens=lengths)


def wrong_window(draw: Draw, case: Case) -> IllegalCase | None:
    """A window that does not lie in its sequence."""
    if not has_windows(case) or not writes(case):
        return None
    here = [run for run in runs(case) if run[1] >= 0]
    if not here:
        return None
    i, _, n, w, o = draw(st.sampled_from(here))
    windows = case.arguments["compress_lens"]
    at = np.unravel_index(i, windows.shape)
    kinds = ["negative", "long"]
    if rule_of(case) != "Alibi":
        kinds += ["start", "late"]
    kind = pick(draw, kinds)
    blamed = ["compress_lens", "compress_seq_offset"]
    if kind == "negative":
        wrong = draw(st.sampled_from([-1, -(2**31)]))
        what = f"compress_lens[{i}] is {wrong}"
        return broken(case, what, blamed[:1], compress_lens=changed(windows, at, wrong))
    starts = case.arguments.get("compress_seq_offset")
    if kind == "long":
        if rule_of(case) != "Alibi" and o == -1:
            return None
        wrong = draw(st.sampled_from([n - max(o, 0) + 1, *too_big(case)]))
        what = f"compress_lens[{i}] is {wrong} of {n}"
        return broken(case, what, [*blamed, "seq_lens"], compress_lens=changed(windows, at, wrong))
    assert starts is not None
    wrong = draw(
        st.sampled_from([-2, -(2**31)] if kind == "start" else [n - w + 1, *too_big(case)])
    )
    if kind == "late" and wrong < 0:
        return None
    what = f"compress_seq_offset[{i}] is {wrong} of {n}, window {w}"
    return broken(case, what, [*blamed, "seq_lens"], compress_seq_offset=changed(starts, i, wrong))


def wrong_nct(draw: Draw, case: Case) -> IllegalCase | None:
    """strides and offsets that are of the wrong form or out of range."""
    if not is_nct(case) or not writes(case):
        return None
    name = pick(draw, ["strides", "offsets"])
    pair = list(case.arguments.get(name, (1, 1) if name == "strides" else (0, 0)))
    lane = draw(st.integers(0, len(lanes(case)) - 1))
    source = lanes(case)[lane][0]
    kind = pick(draw, ["short", "long", "float", "low", "far"])
    errors, blamed = INVALID, [name]
    if kind in ("short", "long", "float"):
        wrong: Any = {"short": pair[:1], "long": [*pair, 1], "float": [1.5, pair[1]]}[kind]
    elif kind == "low":
        pair[lane] = draw(
            st.sampled_from([0, -1, -(2**63)] if name == "strides" else [-1, -(2**63)])
        )
        wrong = pair
    else:
        tokens = case.arguments["slot_mapping"].size
        if name == "strides" and tokens < 2:
            return None
        size = memory_behind(case.arguments[source]).size
        pair[lane] = draw(st.sampled_from([size + 1, 2**31, 2**62, 2**63 - 1]))
        wrong, blamed = pair, ["strides", "offsets", source]
    return broken(case, f"{name}={wrong}", blamed, errors, **{name: wrong})


def nct_source_of_another_shape(draw: Draw, case: Case) -> IllegalCase | None:
    """Three axes that are not [T, H, D], as the slots and the cache have them."""
    if not is_nct(case) or not writes(case):
        return None
    source, cache = draw(st.sampled_from(lanes(case)))
    tokens = case.arguments["slot_mapping"].size
    shape = [tokens, *case.arguments[cache].shape[2:]]
    shape[draw(st.integers(0, 2))] += draw(st.sampled_from([1, -1]))
    blamed = [source, cache, "slot_mapping", "strides", "offsets"]
    wrong = np.zeros(shape, case.arguments[source].dtype)
    return broken(case, f"{source} has shape {shape}", blamed, **{source: wrong})


def slots_of_other_tokens_in_nct(draw: Draw, case: Case) -> IllegalCase | None:
    """More or fewer slots than a view [T, H, D] has tokens."""
    if not is_nct(case) or not writes(case) or case.arguments["key"].ndim != 3:
        return None
    slots = case.arguments["slot_mapping"]
    other = np.concatenate([slots, slots[:1]]) if draw(st.booleans()) else np.array(slots[1:])
    blamed = ["slot_mapping", "key", "value"]
    return broken(case, f"slot_mapping has shape {other.shape}", blamed, slot_mapping=other)


def scattered_nct_source(draw: Draw, case: Case) -> IllegalCase | None:
    if not is_nct(case) or not writes(case):
        return None
    source = draw(st.sampled_from(lanes(case)))[0]
    array = case.arguments[source]
    view = np.zeros((array.size, 2), array.dtype)[:, 0]
    if array.size < 2:
        return None
    return broken(case, f"{source} is not contiguous", [source], **{source: view})


def mean_of_float4(draw: Draw, case: Case) -> IllegalCase | None:
    if not has_windows(case) or rule_of(case) != "Rope" or not writes(case):
        return None
    names = [n for lane in lanes(case) for n in lane]
    if case.arguments["key"].dtype.itemsize != 1:
        return None
    name = pick(draw, FLOAT4)
    changes: dict[str, Any] = {n: case.arguments[n].view(np.uint8) for n in names}
    changes["dtype"] = name
    if len(lanes(case)) == 2:
        changes["value_dtype"] = name
    blamed = [*names, "dtype", "value_dtype", "scatter_mode", "compress_seq_offset"]
    return broken(case, f"Rope of {name}", blamed, **changes)


def unpacked_float4(draw: Draw, case: Case) -> IllegalCase | None:
    """One float4 a byte, as ml_dtypes has it."""
    if has_windows(case) or not writes(case):
        return None
    names = [n for lane in lanes(case) for n in lane]
    changes: dict[str, Any] = {
        n: np.zeros(case.arguments[n].shape, ml_dtypes.float4_e2m1fn) for n in names
    }
    if number_of(case) == 1 and case.arguments["key"].dtype.itemsize != 1:
        return None
    changes |= {"dtype": None} | ({"value_dtype": None} if len(lanes(case)) == 2 else {})
    return broken(case, "unpacked float4 arrays", names, **changes)


def value_of_another_type(draw: Draw, case: Case) -> IllegalCase | None:
    if number_of(case) == 1 or len(lanes(case)) == 1:
        return None
    size = case.arguments["key"].dtype.itemsize
    dtype = {1: np.dtype(np.float16), 2: raw_dtype("float32"), 4: np.dtype(np.int8)}[size]
    changes: dict[str, Any] = {
        n: np.zeros(case.arguments[n].shape, dtype) for n in ("value", "value_cache")
    }
    blamed = ["key", "key_cache", "value", "value_cache", "dtype", "value_dtype"]
    return broken(case, f"value lane is {dtype}", blamed, value_dtype=None, **changes)


OWN: tuple[Mutation, ...] = (
    slot_past_the_end,
    run_past_the_end,
    wrong_slot_count,
    wrong_cache_shape,
    wrong_rank,
    value_disagrees,
    half_a_value,
    wrong_mode,
    array_of_another_scenario,
    missing_window_array,
    wrong_window_shape,
    wrong_length,
    negative_length_that_adds_up,
    wrong_window,
    wrong_nct,
    nct_source_of_another_shape,
    slots_of_other_tokens_in_nct,
    scattered_nct_source,
    mean_of_float4,
    unpacked_float4,
    value_of_another_type,
)
#: scatter_pa_cache has no modes, so a shape of another rank is another scenario there.
ONE_LANE: tuple[Mutation, ...] = (
    slot_past_the_end,
    run_past_the_end,
    wrong_slot_count,
    wrong_cache_shape,
    wrong_rank,
    missing_window_array,
    wrong_window_shape,
    wrong_length,
    wrong_window,
    mean_of_float4,
)


@st.composite
def illegal_scatter_cases(
    draw: Draw, scenarios: Sequence[int] = SCENARIOS, dtypes: Sequence[str] = DTYPES
) -> IllegalCase:
    """scatter_pa_kv_cache calls with one rule broken."""
    return draw_illegal(draw, draw(scatter_cases(scenarios, dtypes)), OWN)


@st.composite
def illegal_scatter_pa_cache_cases(draw: Draw, dtypes: Sequence[str] = DTYPES) -> IllegalCase:
    """scatter_pa_cache calls with one rule broken."""
    return draw_illegal(draw, draw(scatter_pa_cache_cases(dtypes)), ONE_LANE)
