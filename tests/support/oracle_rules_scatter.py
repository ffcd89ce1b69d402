# SPDX-License-Identifier: Apache-2.0
"""Which arguments of ScatterPaKvCache and ScatterPaCache are legal, without a SoC."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oracle_numbers import FLOAT4, logical_name
from oracle_rules import (
    SLOT,
    Arguments,
    Violation,
    check_arrays,
    check_data_dtypes,
    check_index_dtypes,
    check_outputs,
    first_stage,
    invalid,
    is_integer,
    null,
)
from oracle_scatter import ND, NO_MODE, absent, memory_behind, run_tokens, scenario

OPTIONAL = ("compress_lens", "compress_seq_offset", "seq_lens")
MODES = (*NO_MODE, "Alibi", "Rope", "Omni", "Nct", "NHSD")


def scatter_violations(arguments: Arguments) -> list[Violation]:
    """Every broken rule of a scatter_pa_kv_cache call."""
    return first_stage((_presence, _types, _optional, _shapes, _outputs, _values), arguments)


def scatter_pa_cache_violations(arguments: Arguments) -> list[Violation]:
    """The key lane alone; scenarios 2 and 3 only."""
    return scatter_violations(arguments)


def _number(a: Arguments) -> int:
    return scenario(a["key"], a.get("cache_mode", "Norm"), a.get("scatter_mode", "None"), _alone(a))


def _alone(a: Arguments) -> bool:
    return absent(a.get("value")) and absent(a.get("value_cache"))


def _lanes(a: Arguments) -> list[tuple[str, str]]:
    return [("key", "key_cache")] if _alone(a) else [("key", "key_cache"), ("value", "value_cache")]


def _rule(a: Arguments) -> str | None:
    """Alibi, Rope or Omni for a compressing call."""
    mode = a.get("scatter_mode", "None")
    number = _number(a)
    if number not in (3, 4, 5):
        return None
    if mode in NO_MODE:
        return "Alibi" if a.get("compress_seq_offset") is None else "Rope"
    return str(mode)


def _presence(a: Arguments) -> Iterator[Violation]:
    yield from check_arrays(a, ("key", "key_cache", "slot_mapping"), ("value", "value_cache"))
    yield from check_arrays(a, (), OPTIONAL)
    if not (isinstance(a.get("cache_mode", "Norm"), str) or a.get("cache_mode") is None) or (
        a.get("cache_mode", "Norm") not in (*ND, "PA_NZ")
    ):
        yield invalid("is not a cache mode", "cache_mode")
    mode = a.get("scatter_mode", "None")
    if not (isinstance(mode, str) or mode is None) or mode not in MODES:
        yield invalid("is not a scatter mode", "scatter_mode")
    pair = {n: a.get(n) for n in ("value", "value_cache")}
    if absent(pair["value"]) != absent(pair["value_cache"]):
        missing = [n for n, v in pair.items() if v is None]
        yield null(missing[0]) if missing else invalid("is 0-d and its partner is not", *pair)


def _types(a: Arguments) -> Iterator[Violation]:
    lanes = {"dtype": ("key", "key_cache")}
    if not _alone(a):
        lanes["value_dtype"] = ("value", "value_cache")
    yield from check_data_dtypes(a, lanes)
    yield from check_index_dtypes(a, ("slot_mapping", *OPTIONAL))
    key_type = logical_name(a["key"], a.get("dtype"))
    value_type = key_type if _alone(a) else logical_name(a["value"], a.get("value_dtype"))
    if _number(a) != 1 and value_type != key_type:
        yield invalid("key and value differ in dtype", "key", "value", "dtype", "value_dtype")
    if _rule(a) == "Rope" and key_type in FLOAT4:
        yield invalid("float4 has no mean", "key", "value", "dtype", "value_dtype", "scatter_mode")


def _optional(a: Arguments) -> Iterator[Violation]:
    """The optional arrays of the scenario, and no other."""
    rule = _rule(a)
    needs: tuple[str, ...] = ()
    if rule is not None:
        needs = ("compress_lens", "seq_lens")
        if rule != "Alibi":
            needs = OPTIONAL
    for name in OPTIONAL:
        if name in needs and a.get(name) is None:
            yield null(name)
        if name not in needs and a.get(name) is not None:
            yield invalid("belongs to another scenario", name)


def _shapes(a: Arguments) -> Iterator[Violation]:
    number = _number(a)
    lanes = _lanes(a)
    caches = [cache for _, cache in lanes]
    ranks = {a[c].ndim for c in caches}
    if len(ranks) > 1:
        yield invalid("caches differ in rank", *caches)
        return
    nct = number in (2, 6) and a.get("scatter_mode") == "Nct"
    for source, cache in lanes:
        fault = _lane_shape(a, number, source, cache, nct)
        if fault is not None:
            yield fault
            return
    if len(lanes) == 2:
        if not nct and a["key"].shape[:-1] != a["value"].shape[:-1]:
            yield invalid("key and value disagree", "key", "value")
        if number == 1:
            wrong = any(a[caches[0]].shape[i] != a[caches[1]].shape[i] for i in (0, -2))
            if a[caches[0]].ndim == 5:
                wrong = wrong or a[caches[0]].shape[1] != a[caches[1]].shape[1]
        else:
            wrong = a[caches[0]].shape[:3] != a[caches[1]].shape[:3]
        if wrong:
            yield invalid("caches disagree", *caches)
    yield from _index_shapes(a, number)


def _lane_shape(a: Arguments, number: int, source: str, cache: str, nct: bool) -> Violation | None:
    x, c = a[source], a[cache]
    if number == 1:
        if x.ndim != 3:
            return invalid("is not 3-D", source)
        if c.ndim not in (4, 5):
            return invalid("is not 4-D or 5-D", cache)
        heads, size = x.shape[1:]
        lane = 32 // x.dtype.itemsize
        if size % lane:
            return invalid("head size is not a multiple of 32 bytes", source, cache)
        columns = (heads * size // lane,) if c.ndim == 4 else (heads, size // lane)
        if (*c.shape[1:-2], c.shape[-1]) != (*columns, lane):
            return invalid("shapes disagree", source, cache)
        return None
    if c.ndim != 4:
        return invalid("is not 4-D", cache)
    if nct:
        if x.ndim == 3:
            wanted = (a["slot_mapping"].shape[0], *c.shape[2:])
            disagree = invalid("is not [T, H, D]", source, cache, "slot_mapping")
            return None if x.shape == wanted else disagree
        if x.ndim < 1:
            return invalid("is 0-d", source)
        return None if x.flags.c_contiguous else invalid("is not C-contiguous", source)
    if x.ndim != (4 if number == 3 else 3):
        return invalid("is of the wrong rank", source, cache)
    heads, size = x.shape[-2:]
    expected = (c.shape[1], c.shape[3])
    if number == 7:
        wrong = expected != (heads, size)
    else:
        wrong = c.shape[2:] != ((1 if number in (3, 4, 5) else heads), size)
    return invalid("shapes disagree", source, cache) if wrong else None


def _index_shapes(a: Arguments, number: int) -> Iterator[Violation]:
    key, slots = a["key"], a["slot_mapping"]
    if number not in (3, 4, 5):
        nct = number in (2, 6) and a.get("scatter_mode") == "Nct"
        if slots.ndim != 1:
            yield invalid("is not 1-D", "slot_mapping")
        elif not nct and len(slots) != key.shape[0]:
            yield invalid("has not one slot a token", "slot_mapping", "key", "value")
        if nct:
            for name in ("strides", "offsets"):
                pair = a.get(name)
                if pair is not None and (len(pair) != 2 or not all(is_integer(x) for x in pair)):
                    yield invalid("is not two integers", name)
        return
    if a["seq_lens"].ndim != 1:
        yield invalid("is not 1-D", "seq_lens")
        return
    batch, heads = len(a["seq_lens"]), key.shape[-2]
    if number == 3 and batch != key.shape[0]:
        yield invalid("disagrees with key", "seq_lens", "key")
    flat, square = (batch * heads,), (batch, heads)
    allowed = {
        "slot_mapping": (square,) if number == 3 else (flat,),
        "compress_lens": (square, flat) if number == 3 else (flat,),
        "compress_seq_offset": (flat,),
    }
    for name, shapes in allowed.items():
        if a.get(name) is not None and a[name].shape not in shapes:
            yield invalid("disagrees with key and seq_lens", name, "seq_lens", "key")


def _outputs(a: Arguments) -> Iterator[Violation]:
    lanes = _lanes(a)
    inputs = [source for source, _ in lanes] + ["slot_mapping", *OPTIONAL]
    yield from check_outputs(a, [cache for _, cache in lanes], inputs)


def num_slots(a: Arguments) -> int:
    """nb * bs of the caches."""
    cache = a["key_cache"]
    number = _number(a)
    return int(cache.shape[0] * (cache.shape[-2] if number in (1, 7) else cache.shape[1]))


def _values(a: Arguments) -> Iterator[Violation]:
    if _rule(a) is not None:
        if any(a[source].size for source, _ in _lanes(a)):
            yield from _window_values(a, num_slots(a))
        return
    nct = _number(a) in (2, 6) and a.get("scatter_mode") == "Nct"
    nothing = a["slot_mapping"].size == 0 or (a["key_cache"].size == 0 and num_slots(a) > 0)
    if nothing or (not nct and a["key"].size == 0):
        return
    bound = num_slots(a)
    if nct:
        yield from _nct_values(a)
    for i, slot in enumerate(a["slot_mapping"].tolist()):
        if slot >= bound:
            yield Violation(("slot_mapping",), SLOT, f"[{i}] is past the cache")


def _nct_values(a: Arguments) -> Iterator[Violation]:
    tokens = len(a["slot_mapping"])
    strides = (1, 1) if a.get("strides") is None else a["strides"]
    offsets = (0, 0) if a.get("offsets") is None else a["offsets"]
    for lane, (source, cache) in enumerate(_lanes(a)):
        _, _, heads, size = a[cache].shape
        stride, offset = int(strides[lane]), int(offsets[lane])
        held = memory_behind(a[source]).size
        if (tokens - 1) * stride + offset + heads * size > held:
            yield invalid("tokens reach past the buffer", source, "strides", "offsets")
    for lane in range(2):
        if int(strides[lane]) <= 0:
            yield invalid("is not positive", "strides")
        if int(offsets[lane]) < 0:
            yield invalid("is negative", "offsets")


def _window_values(a: Arguments, bound: int) -> Iterator[Violation]:
    rule = _rule(a)
    assert rule is not None
    key, heads = a["key"], a["key"].shape[-2]
    lengths = [int(n) for n in a["seq_lens"]]
    if min(lengths, default=0) < 0:
        yield invalid("is negative", "seq_lens")
    if key.ndim == 4:
        if max(lengths, default=0) > key.shape[1]:
            yield invalid("is longer than S", "seq_lens")
    elif sum(lengths) != key.shape[0]:
        yield invalid("does not add up to T", "seq_lens", "key")
    slots = a["slot_mapping"].reshape(-1).tolist()
    windows = a["compress_lens"].reshape(-1).tolist()
    starts = [-1] * len(slots)
    if rule != "Alibi":
        starts = np.array(a["compress_seq_offset"]).tolist()
    for i, (slot, w, o) in enumerate(zip(slots, windows, starts, strict=True)):
        n = lengths[i // heads]
        if w < 0:
            yield invalid(f"[{i}] is negative", "compress_lens")
        elif rule == "Alibi" and w > n:
            yield invalid(f"[{i}] is longer than the sequence", "compress_lens")
        elif o < -1:
            yield invalid(f"[{i}] is below -1", "compress_seq_offset")
        elif rule != "Alibi" and o != -1 and o + w > n:
            what = f"[{i}]: the window ends past the sequence"
            yield invalid(what, "compress_seq_offset", "compress_lens")
        elif slot >= 0 and 0 <= n <= np.prod(key.shape[:-2]):
            rows = len(run_tokens(rule, n, w, o))
            if slot + max(rows, 1) > bound:
                yield Violation(("slot_mapping",), SLOT, f"[{i}]: the run ends past the cache")
