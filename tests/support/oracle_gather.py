# SPDX-License-Identifier: Apache-2.0
"""GatherSelectionKvCache and GatherPaKvCache, one row and one token at a time.

Legal arguments are assumed; oracle_rules.violations says whether they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oracle_numbers import Array, bits

STATS = ("reused", "moved", "refreshed", "read", "swapped", "bytes_read", "bytes_moved")


def empty(array: Any) -> bool:
    """True for what stands for "no rope": None, or an array of no elements."""
    return array is None or np.size(array) == 0


# -- gather_selection_kv_cache --------------------------------------------------------------------


@dataclass
class Row:
    """What one row does.

    ids:      block id by place, after the swap.
    source:   by place: ("stay", place), ("move", old place) or ("full", id).
    tokens:   by place: how many tokens of the block are valid.
    kind:     by place: reused, moved, refreshed or read.
    swapped:  whether the largest id had to change places.
    """

    ids: list[int] = field(default_factory=list)
    source: list[tuple[str, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    swapped: bool = False


@dataclass
class SelectionResult:
    """After the call.

    selection_k_rope is None when the rope pair is empty.  ``*_specified`` masks ``[SB, sbs]``
    tokens: False where a partial block ends and the bytes are nobody's promise.
    selection_kv_actual_seq is the returned int32 ``[N]``.  stats: per-row int64 arrays.
    rows: how it came about.
    """

    selection_k_rope: Array | None
    selection_kv_cache: Array
    selection_kv_block_status: Array
    selection_kv_actual_seq: Array
    specified: Array
    stats: dict[str, Array]
    rows: list[Row]


def query_lengths(full_q_actual_seq: Array, cumulative: bool) -> list[int]:
    """Per-request query lengths from lengths or running totals."""
    q = [int(x) for x in full_q_actual_seq]
    return [q[i] - (q[i - 1] if i else 0) for i in range(len(q))] if cumulative else q


def row_length(kv: int, q: int, s: int) -> int:
    """Tokens that row s of a request may see."""
    kv = max(kv, 0)
    return kv - (q - 1 - s) if s < q else kv


def plan_row(status: list[int], topk_ids: list[int], kv: int, q: int, s: int, block: int) -> Row:
    """Steps 1 to 7 for one row; status has topk entries and the length."""
    topk = len(topk_ids)
    n_kv = row_length(kv, q, s)
    fresh = max(kv, 0) - q
    row = Row()
    if n_kv <= 0:
        return row
    last = -(-n_kv // block) - 1
    tail = n_kv - last * block

    wanted: list[int] = []
    for block_id in topk_ids:
        if 0 <= block_id <= last and block_id not in wanted:
            wanted.append(block_id)
    n = len(wanted)

    whole_places = max(min(status[topk] // block, topk), 0)
    listed = status[:whole_places]
    held = {x: p for p, x in enumerate(listed) if x >= 0 and listed.count(x) == 1}

    placed: dict[int, int] = {x: held[x] for x in wanted if x in held and held[x] < n}
    free = [p for p in range(n) if p not in placed.values()]
    for block_id in wanted:
        if block_id not in placed:
            placed[block_id] = free.pop(0)

    row.ids = sorted(wanted, key=lambda x: placed[x])
    for place, block_id in enumerate(row.ids):
        row.tokens.append(tail if block_id == last else block)
        if block_id not in held:
            row.source.append(("full", block_id))
            row.kind.append("read")
        elif (block_id + 1) * block > fresh:
            row.source.append(("full", block_id))
            row.kind.append("refreshed")
        elif held[block_id] == place:
            row.source.append(("stay", place))
            row.kind.append("reused")
        else:
            row.source.append(("move", held[block_id]))
            row.kind.append("moved")

    if n and (block > 1 or topk <= 32):
        largest = row.ids.index(max(row.ids))
        row.swapped = largest != n - 1
        columns: tuple[list[Any], ...] = (row.ids, row.source, row.tokens, row.kind)
        for column in columns:
            column[largest], column[n - 1] = column[n - 1], column[largest]
    return row


def selection_rows(
    status: Array,
    topk_indices: Array,
    kv_lens: Array,
    q_lens: Array,
    block: int,
    cumulative: bool,
) -> Iterator[tuple[int, int, Row]]:
    """(row, request, plan) of every row; status and topk_indices as the caller passed them."""
    topk = topk_indices.shape[-1]
    flat_status = np.array(status).reshape(-1, topk + 1).tolist()
    flat_topk = np.array(topk_indices).reshape(-1, topk).tolist()
    rows, batch = len(flat_topk), len(kv_lens)
    steps = rows // batch if batch else 0
    q = query_lengths(q_lens, cumulative)
    for r in range(rows):
        b, s = divmod(r, steps)
        yield (
            r,
            b,
            plan_row(flat_status[r], flat_topk[r], int(kv_lens[b]), q[b], s, block),
        )


def gather_selection_kv_cache(
    selection_k_rope: Array | None,
    selection_kv_cache: Array,
    selection_kv_block_table: Array,
    selection_kv_block_status: Array,
    selection_topk_indices: Array,
    full_k_rope: Array | None,
    full_kv_cache: Array,
    full_kv_block_table: Array,
    full_kv_actual_seq: Array,
    full_q_actual_seq: Array,
    *,
    selection_topk_block_size: int = 64,
    q_lens_cumulative: bool = False,
    dtype: str | None = None,
) -> SelectionResult:
    """Everything the call leaves behind, as new arrays."""
    block = int(selection_topk_block_size)
    topk = selection_topk_indices.shape[-1]
    num_rows = int(np.prod(selection_topk_indices.shape[:-1]))
    lanes = [(bits(selection_kv_cache), np.array(selection_kv_cache), bits(full_kv_cache))]
    if not empty(selection_k_rope):
        assert selection_k_rope is not None
        assert full_k_rope is not None
        lanes.append((bits(selection_k_rope), np.array(selection_k_rope), bits(full_k_rope)))
    token_bytes = sum(full.shape[2] * full.dtype.itemsize for _, _, full in lanes)
    sbs, fbs = selection_kv_cache.shape[1], full_kv_cache.shape[1]
    specified = np.ones(selection_kv_cache.shape[:2], bool)
    status = np.array(selection_kv_block_status, order="C")  # so that reshape is a view
    status_rows = status.reshape(-1, topk + 1)
    lengths = np.zeros(len(selection_kv_block_table), np.int32)
    stats = {name: np.zeros(num_rows, np.int64) for name in STATS}
    plans: list[Row] = []

    def selection_token(r: int, token: int) -> tuple[int, int]:
        return int(selection_kv_block_table[r, token // sbs]), token % sbs

    def full_token(b: int, token: int) -> tuple[int, int]:
        return int(full_kv_block_table[b, token // fbs]), token % fbs

    for r, b, row in selection_rows(
        selection_kv_block_status, selection_topk_indices, full_kv_actual_seq, full_q_actual_seq,
        block, q_lens_cumulative,
    ):  # fmt: skip
        plans.append(row)
        for place, (source, which) in enumerate(row.source):
            for j in range(row.tokens[place]):
                to = selection_token(r, place * block + j)
                for old, new, full in lanes:
                    if source == "full":
                        bits(new)[to] = full[full_token(b, which * block + j)]
                    else:  # the bytes as they were before the call
                        bits(new)[to] = old[selection_token(r, which * block + j)]
            for j in range(row.tokens[place], block):
                specified[selection_token(r, place * block + j)] = False
            stats[row.kind[place]][r] += row.tokens[place]
        lengths[r] = sum(row.tokens)
        status_rows[r, :] = [*row.ids, *[-1] * (topk - len(row.ids)), lengths[r]]
        stats["swapped"][r] = row.swapped
        stats["bytes_read"][r] = (stats["read"][r] + stats["refreshed"][r]) * token_bytes
        stats["bytes_moved"][r] = stats["moved"][r] * token_bytes

    rope = lanes[1][1] if len(lanes) > 1 else None
    return SelectionResult(rope, lanes[0][1], status, lengths, specified, stats, plans)


# -- gather_pa_kv_cache ---------------------------------------------------------------------------


@dataclass
class GatherPaResult:
    """key and value after the call, as new arrays; value is None for key only."""

    key: Array
    value: Array | None


def gather_pa_kv_cache(
    key_cache: Array,
    value_cache: Array | None,
    block_tables: Array,
    seq_lens: Array,
    key: Array,
    value: Array | None,
    *,
    seq_offset: Array | None = None,
    cache_mode: str | None = "Norm",
    is_seq_lens_cumsum: bool = False,
    dtype: str | None = None,
    value_dtype: str | None = None,
) -> GatherPaResult:
    """Tokens of each request, one after the other."""
    after = [
        _gather_lane(cache, block_tables, seq_lens, out, seq_offset, cache_mode, is_seq_lens_cumsum)
        for cache, out in ((key_cache, key), (value_cache, value))
        if cache is not None and out is not None
    ]
    return GatherPaResult(after[0], after[1] if len(after) > 1 else None)


def batch_lengths(seq_lens: Array, cumsum: bool) -> list[int]:
    """Tokens of each request."""
    totals = [int(x) for x in seq_lens]
    return [b - a for a, b in itertools.pairwise(totals)] if cumsum else totals


def block_size_of(cache: Array, cache_mode: str | None) -> int:
    """Rows of one block."""
    return int(cache.shape[-2] if cache_mode in ("PA_NZ", "NHSD") else cache.shape[1])


def _gather_lane(
    cache: Array,
    tables: Array,
    seq_lens: Array,
    out: Array,
    seq_offset: Array | None,
    cache_mode: str | None,
    cumsum: bool,
) -> Array:
    result = np.array(out)
    source, to = bits(cache), bits(result)
    block_size = block_size_of(cache, cache_mode)
    done = 0
    for b, n in enumerate(batch_lengths(seq_lens, cumsum)):
        first = 0 if seq_offset is None else int(seq_offset[b]) // block_size
        for j in range(n):
            block, row = int(tables[b, first + j // block_size]), j % block_size
            if cache_mode == "PA_NZ":
                lane = cache.shape[-1]
                columns = source[block].reshape(-1, block_size, lane)
                for c in range(columns.shape[0]):
                    to[done, c * lane : (c + 1) * lane] = columns[c, row]
            elif cache_mode == "NHSD":
                for h in range(cache.shape[1]):
                    to[done, h] = source[block, h, row]
            else:
                to[done] = source[block, row]
            done += 1
    return result
