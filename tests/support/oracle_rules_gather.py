# SPDX-License-Identifier: Apache-2.0
"""Which arguments of the two gathers are legal, without a SoC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from oracle_gather import (
    batch_lengths,
    block_size_of,
    empty,
    query_lengths,
    selection_rows,
)
from oracle_rules import (
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

# -- gather_selection_kv_cache ----------------------------------------------------------------

ROPES = ("selection_k_rope", "full_k_rope")
CACHES = ("selection_kv_cache", "full_kv_cache")
TABLE, STATUS, TOPK = (
    "selection_kv_block_table",
    "selection_kv_block_status",
    "selection_topk_indices",
)
FULL_TABLE, KV, Q = "full_kv_block_table", "full_kv_actual_seq", "full_q_actual_seq"
INDICES = (TABLE, STATUS, TOPK, FULL_TABLE, KV, Q)
BLOCK = "selection_topk_block_size"


def selection_violations(arguments: Arguments) -> list[Violation]:
    """Every broken rule of a gather_selection_kv_cache call."""
    return first_stage(
        (_s_presence, _s_types, _s_shapes, _s_outputs, _s_lengths, _s_entries), arguments
    )


def _s_presence(a: Arguments) -> Iterator[Violation]:
    yield from check_arrays(a, (*CACHES, *INDICES), ROPES)
    if empty(a.get(ROPES[0])) != empty(a.get(ROPES[1])):
        given = [n for n in ROPES if a.get(n) is None]
        if given:
            yield null(given[0])
        yield invalid("one rope is empty and one is not", *ROPES)
    if not is_integer(a.get(BLOCK, 64)) or a.get(BLOCK, 64) <= 0:
        yield invalid("is not a positive integer", BLOCK)


def _s_types(a: Arguments) -> Iterator[Violation]:
    lanes = CACHES if empty(a.get(ROPES[0])) else (*ROPES, *CACHES)
    yield from check_data_dtypes(a, {"dtype": lanes})
    yield from check_index_dtypes(a, INDICES)


def _s_shapes(a: Arguments) -> Iterator[Violation]:
    ranks = dict.fromkeys(CACHES, 3) | {TABLE: 2, FULL_TABLE: 2, KV: 1, Q: 1}
    if not empty(a.get(ROPES[0])):
        ranks |= dict.fromkeys(ROPES, 3)
    wrong = [n for n, rank in ranks.items() if a[n].ndim != rank]
    if a[TOPK].ndim not in (3, 4):
        wrong.append(TOPK)
    if a[STATUS].ndim != a[TOPK].ndim:
        wrong += [STATUS, TOPK]
    for name in wrong:
        yield invalid("is of the wrong rank", name)
    if wrong:
        return
    *outer, heads, topk = a[TOPK].shape
    if heads != 1:
        yield invalid("has a head axis that is not 1", TOPK)
    if a[STATUS].shape != (*outer, heads, topk + 1):
        yield invalid("shapes disagree", STATUS, TOPK)
    rows, batch = int(np.prod(outer)), len(a[KV])
    if len(a[Q]) != batch:
        yield invalid("the two lengths disagree", KV, Q)
    if len(a[FULL_TABLE]) != batch:
        yield invalid("has not one row a request", FULL_TABLE, KV, Q)
    if len(outer) == 2 and outer[0] != batch:
        yield invalid("has not one row a request", TOPK, KV, Q, STATUS, FULL_TABLE)
    if len(outer) == 1 and (rows % batch if batch else rows):
        yield invalid("rows are no multiple of the requests", TOPK, KV, Q, STATUS, FULL_TABLE)
    if len(a[TABLE]) < rows:
        yield invalid("has fewer rows than there are", TABLE, TOPK)
    if a[CACHES[0]].shape[2] != a[CACHES[1]].shape[2]:
        yield invalid("caches disagree", *CACHES)
    if not empty(a.get(ROPES[0])):
        if a[ROPES[0]].shape[2] != a[ROPES[1]].shape[2]:
            yield invalid("ropes disagree", *ROPES)
        for rope, cache in zip(ROPES, CACHES, strict=True):
            if a[rope].shape[:2] != a[cache].shape[:2]:
                yield invalid("rope and cache disagree", rope, cache)
    block = a.get(BLOCK, 64)
    for cache in CACHES:
        if a[cache].shape[1] % block:
            yield invalid("block size is no multiple of the top-k block", cache, BLOCK, *ROPES)
    if a[TABLE].shape[1] * a[CACHES[0]].shape[1] < topk * block:
        yield invalid("has no room for topk blocks", TABLE, TOPK, BLOCK, CACHES[0])


def _s_outputs(a: Arguments) -> Iterator[Violation]:
    outputs = [CACHES[0], STATUS]
    inputs = [CACHES[1], TABLE, TOPK, FULL_TABLE, KV, Q]
    if not empty(a.get(ROPES[0])):
        outputs.append(ROPES[0])
        inputs.append(ROPES[1])
    yield from check_outputs(a, outputs, inputs)


def _s_lengths(a: Arguments) -> Iterator[Violation]:
    batch = len(a[KV])
    steps = int(np.prod(a[TOPK].shape[:-1])) // batch if batch else 0
    for b, q in enumerate(query_lengths(a[Q], a.get("q_lens_cumulative", False))):
        if q < 0:
            yield invalid(f"[{b}] is negative or decreases", Q)
        if q > steps:
            yield invalid(f"[{b}] is longer than S", Q)


def used_entries(a: Arguments) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(row, column) of the selection table and (request, column) of the full table in use."""
    block = a.get(BLOCK, 64)
    sbs, fbs = a[CACHES[0]].shape[1], a[CACHES[1]].shape[1]
    selection: set[tuple[int, int]] = set()
    full: set[tuple[int, int]] = set()
    cumulative = a.get("q_lens_cumulative", False)
    for r, b, row in selection_rows(a[STATUS], a[TOPK], a[KV], a[Q], block, cumulative):
        for place, (source, which) in enumerate(row.source):
            selection.add((r, place * block // sbs))
            if source == "full":
                full.add((b, which * block // fbs))
            else:
                selection.add((r, which * block // sbs))
    return selection, full


def _s_entries(a: Arguments) -> Iterator[Violation]:
    selection, full = used_entries(a)
    named: Counter[int] = Counter()
    for r, column in sorted(selection):
        entry = int(a[TABLE][r, column])
        named[entry] += 1
        if not 0 <= entry < a[CACHES[0]].shape[0]:
            yield invalid(f"[{r}, {column}] is outside the cache", TABLE)
    for entry, count in named.items():
        if count > 1:
            yield invalid(f"{count} entries name block {entry}", TABLE)
    for b, column in sorted(full):
        if column >= a[FULL_TABLE].shape[1]:
            yield invalid("an id lies beyond the full table", FULL_TABLE, TOPK, KV)
        elif not 0 <= int(a[FULL_TABLE][b, column]) < a[CACHES[1]].shape[0]:
            yield invalid(f"[{b}, {column}] is outside the cache", FULL_TABLE)


# -- gather_pa_kv_cache ---------------------------------------------------------------------------


def gather_pa_violations(arguments: Arguments) -> list[Violation]:
    """Every broken rule of a gather_pa_kv_cache call."""
    return first_stage((_p_presence, _p_types, _p_shapes, _p_outputs, _p_values), arguments)


def _p_lanes(a: Arguments) -> list[tuple[str, str]]:
    lanes = [("key_cache", "key"), ("value_cache", "value")]
    return lanes[:1] if a.get("value_cache") is None and a.get("value") is None else lanes


def _p_presence(a: Arguments) -> Iterator[Violation]:
    required = [n for lane in _p_lanes(a) for n in lane] + ["block_tables", "seq_lens"]
    yield from check_arrays(a, required, ("seq_offset",))
    mode = a.get("cache_mode", "Norm")
    if not (mode is None or isinstance(mode, str)) or mode not in (
        *(None, "", "Norm"),
        *("PA_NZ", "NHSD"),
    ):
        yield invalid("is not a cache mode", "cache_mode")


def _p_types(a: Arguments) -> Iterator[Violation]:
    lanes = dict(zip(("dtype", "value_dtype"), _p_lanes(a), strict=False))
    yield from check_data_dtypes(a, lanes)
    yield from check_index_dtypes(a, ("block_tables", "seq_lens", "seq_offset"))


def _p_shapes(a: Arguments) -> Iterator[Violation]:
    mode = a.get("cache_mode", "Norm")
    for name, rank in (("block_tables", 2), ("seq_lens", 1), ("seq_offset", 1)):
        if a.get(name) is not None and a[name].ndim != rank:
            yield invalid("is of the wrong rank", name)
            return
    batch = len(a["block_tables"])
    if len(a["seq_lens"]) != batch + bool(a.get("is_seq_lens_cumsum", False)):
        yield invalid("has the wrong length", "seq_lens", "block_tables")
    if a.get("seq_offset") is not None and len(a["seq_offset"]) != batch:
        yield invalid("has the wrong length", "seq_offset", "block_tables")
    blocks = set()
    for cache_name, out_name in _p_lanes(a):
        cache, out = a[cache_name], a[out_name]
        if cache.ndim not in ((4, 5) if mode == "PA_NZ" else (4,)):
            yield invalid("is of the wrong rank", cache_name)
            return
        if mode == "PA_NZ":
            lane = 32 // cache.dtype.itemsize
            elements = int(np.prod(cache.shape[1:-2])) * cache.shape[-1]
            wrong = cache.shape[-1] != lane or out.ndim != 2 or out.shape[1] != elements
        elif mode == "NHSD":
            wrong = out.ndim != 3 or out.shape[1:] != (cache.shape[1], cache.shape[3])
        else:
            wrong = out.ndim != 3 or out.shape[1:] != cache.shape[2:]
        if wrong:
            yield invalid("shapes disagree", cache_name, out_name)
            return
        blocks.add((cache.shape[0], block_size_of(cache, mode), out.shape[0]))
    if len(blocks) > 1:
        yield invalid("key and value disagree", *(n for lane in _p_lanes(a) for n in lane))


def _p_outputs(a: Arguments) -> Iterator[Violation]:
    lanes = _p_lanes(a)
    inputs = [cache for cache, _ in lanes] + ["block_tables", "seq_lens", "seq_offset"]
    yield from check_outputs(a, [out for _, out in lanes], inputs)


def _p_values(a: Arguments) -> Iterator[Violation]:
    cumsum = bool(a.get("is_seq_lens_cumsum", False))
    lengths = batch_lengths(a["seq_lens"], cumsum)
    if min(lengths, default=0) < 0:
        yield invalid("is negative or decreases", "seq_lens")
        return
    if cumsum and int(a["seq_lens"][0]) != 0:
        yield invalid("does not start at 0", "seq_lens")
        return
    if sum(lengths) != a["key"].shape[0]:
        yield invalid("does not add up", "key", "value", "seq_lens")
        return
    size = block_size_of(a["key_cache"], a.get("cache_mode", "Norm"))
    for b, n in enumerate(lengths):
        offset = 0 if a.get("seq_offset") is None else int(a["seq_offset"][b])
        if n == 0:
            continue
        if offset < 0:
            yield invalid(f"[{b}] is negative", "seq_offset")
            continue
        if size == 0:
            yield invalid("has empty blocks", "key_cache", "value_cache", "block_tables")
            continue
        columns = range(offset // size, offset // size + (n - 1) // size + 1)
        if columns[-1] >= a["block_tables"].shape[1]:
            yield invalid(
                f"request {b} needs a column past the table",
                *("block_tables", "seq_lens", "seq_offset"),
            )
            continue
        for column in columns:
            if not 0 <= int(a["block_tables"][b, column]) < a["key_cache"].shape[0]:
                yield invalid(f"[{b}, {column}] is outside the cache", "block_tables")
