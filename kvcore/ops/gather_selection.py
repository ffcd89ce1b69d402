# SPDX-License-Identifier: Apache-2.0
"""GatherSelectionKvCache: fetch the blocks that sparse attention asked for, and nothing else.

Source of the rules: CANN's GatherSelectionKvCache document and kernels.  Where the vendor's two
code paths (top-k up to 32, and beyond) differ, one rule holds here; docs/gather.md names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from kvcore._core.arrays import ArrayInfo
from kvcore._core.plan import Operator, Spec
from kvcore._core.select import SelectSpec
from kvcore._core.selected import IndexArray, SelectionLane
from kvcore.dtypes import DType
from kvcore.errors import ParamInvalidError, ParamNullError, shown
from kvcore.ops import checks, soc_gather
from kvcore.soc import SoC

__all__ = [
    "SelectionCase",
    "classify",
    "gather_selection_kv_cache",
]

ARGUMENTS = (
    "selection_k_rope",
    "selection_kv_cache",
    "selection_kv_block_table",
    "selection_kv_block_status",
    "selection_topk_indices",
    "full_k_rope",
    "full_kv_cache",
    "full_kv_block_table",
    "full_kv_actual_seq",
    "full_q_actual_seq",
)
ROPE, CACHE, TABLE, STATUS, TOPK, FULL_ROPE, FULL_CACHE, FULL_TABLE, KV_LENS, Q_LENS = range(10)
INDICES = (TABLE, STATUS, TOPK, FULL_TABLE, KV_LENS, Q_LENS)
#: Positions of ids are kept in 32 bits; no top-k comes near.
MAX_TOPK = 2**30
Infos = tuple[ArrayInfo | None, ...]


@dataclass(frozen=True, slots=True)
class SelectionCase:
    """What a call's shapes and dtypes amount to, every rule about them checked.

    infos: those of the call, None for an empty rope pair.  rows: B * S.  block: tokens of one id.
    cumulative: the query lengths are running totals.
    """

    infos: Infos
    dtype: DType
    index_dtype: DType
    batch: int
    steps: int
    rows: int
    topk: int
    block: int
    cumulative: bool

    def info(self, argument: int) -> ArrayInfo:
        """An array that this case has."""
        found = self.infos[argument]
        assert found is not None
        return found

    def lanes(self) -> list[tuple[int, int]]:
        """(selection argument, full argument) of K, and of rope where there is one."""
        both = [(CACHE, FULL_CACHE), (ROPE, FULL_ROPE)]
        return both[:1] if self.infos[ROPE] is None else both


def classify(infos: Infos, params: tuple[Any, ...]) -> SelectionCase:
    """Check every rule about shapes and dtypes."""
    block, cumulative, dtype = params
    infos = _without_empty_rope(infos)
    needed = {name: checks.need(infos[i], name) for i, name in _required()}
    index_dtype = checks.one_index_dtype(*(needed[ARGUMENTS[i]] for i in INDICES))
    wanted = checks.dtype_named(dtype, "dtype")
    own = checks.data_dtype(needed["full_kv_cache"], wanted)
    for i in (CACHE, ROPE, FULL_ROPE):
        info = infos[i]
        if info is not None:
            checks.same_dtype(info, checks.data_dtype(info, wanted), own, "full_kv_cache")
    batch, steps, topk = _row_shape(needed)
    case = SelectionCase(
        infos, own, index_dtype, batch, steps, batch * steps, topk, block, cumulative
    )
    _check_caches(case)
    _check_tables(case)
    outputs = [STATUS] + [here for here, _ in case.lanes()]
    for i in outputs:
        checks.output(case.info(i))
    return case


def _required() -> list[tuple[int, str]]:
    return [(i, name) for i, name in enumerate(ARGUMENTS) if i not in (ROPE, FULL_ROPE)]


def _without_empty_rope(infos: Infos) -> Infos:
    pair = infos[ROPE], infos[FULL_ROPE]
    empty = [info is None or 0 in info.shape for info in pair]
    if all(empty):
        return tuple(None if i in (ROPE, FULL_ROPE) else info for i, info in enumerate(infos))
    if any(empty):
        i = empty.index(True)
        name, other = ARGUMENTS[(ROPE, FULL_ROPE)[i]], ARGUMENTS[(FULL_ROPE, ROPE)[i]]
        expected = f"an array together with {other} (or an empty pair)"
        found = pair[i]
        if found is None:
            raise ParamNullError(
                f"{name}: expected {expected}, got None",
                argument=name,
                seen=None,
                expected=expected,
            )
        checks.fail(name, expected, f"an empty one {list(found.shape)}")
    return infos


def _row_shape(needed: dict[str, ArrayInfo]) -> tuple[int, int, int]:
    """(B, S, topk) from the index arrays' shapes."""
    topk_ids, status = needed["selection_topk_indices"], needed["selection_kv_block_status"]
    kv_lens, q_lens = needed["full_kv_actual_seq"], needed["full_q_actual_seq"]
    checks.rank(topk_ids, (3, 4), "[B, S, 1, topk] or [rows, 1, topk]")
    checks.rank(kv_lens, (1,), "[B]")
    batch = kv_lens.shape[0]
    checks.shape(q_lens, (batch,), "[B] of full_kv_actual_seq")
    *outer, heads, topk = topk_ids.shape
    if heads != 1:
        checks.fail("selection_topk_indices", "a head axis of 1", list(topk_ids.shape))
    if topk > MAX_TOPK:
        checks.fail("selection_topk_indices", f"a top-k of at most {MAX_TOPK}", topk)
    checks.shape(status, (*outer, 1, topk + 1), "the shape of selection_topk_indices, topk + 1")
    if len(outer) == 2:
        if outer[0] != batch:
            checks.fail(
                "selection_topk_indices",
                f"shape [{batch}, S, 1, topk] (B of full_kv_actual_seq)",
                list(topk_ids.shape),
            )
        return batch, outer[1], topk
    rows = outer[0]
    if rows % batch if batch else rows:
        checks.fail(
            "selection_topk_indices",
            f"a whole multiple of B = {batch} rows",
            list(topk_ids.shape),
        )
    return batch, rows // batch if batch else 0, topk


def _check_caches(case: SelectionCase) -> None:
    cache, full = case.info(CACHE), case.info(FULL_CACHE)
    checks.rank(cache, (3,), "[SB, sbs, K]")
    checks.rank(full, (3,), "[FB, fbs, K]")
    if cache.shape[2] != full.shape[2]:
        checks.fail(
            "selection_kv_cache", f"K = {full.shape[2]} as full_kv_cache", list(cache.shape)
        )
    if len(case.lanes()) == 2:
        rope, full_rope = case.info(ROPE), case.info(FULL_ROPE)
        checks.rank(rope, (3,), "[SB, sbs, R]")
        checks.rank(full_rope, (3,), "[FB, fbs, R]")
        size = full_rope.shape[2]
        checks.shape(rope, (*cache.shape[:2], size), "blocks of selection_kv_cache, R")
        checks.shape(full_rope, (*full.shape[:2], size), "blocks of full_kv_cache, R")
    for info in (cache, full):
        if info.shape[1] % case.block:
            checks.fail(
                info.name,
                f"blocks of a whole multiple of {case.block} tokens (selection_topk_block_size)",
                list(info.shape),
            )


def _check_tables(case: SelectionCase) -> None:
    table, full_table = case.info(TABLE), case.info(FULL_TABLE)
    checks.rank(table, (2,), "[N, SMAX]")
    if table.shape[0] < case.rows:
        checks.fail(
            "selection_kv_block_table", f"at least {case.rows} rows (B * S)", list(table.shape)
        )
    checks.rank(full_table, (2,), "[B, FMAX]")
    if full_table.shape[0] != case.batch:
        checks.fail("full_kv_block_table", f"{case.batch} rows (B)", list(full_table.shape))
    page = case.info(CACHE).shape[1]
    if table.shape[1] * page < case.topk * case.block:
        checks.fail(
            "selection_kv_block_table",
            f"columns for {case.topk} blocks of {case.block} tokens a row (block size {page})",
            list(table.shape),
        )


def _lanes(case: SelectionCase) -> list[SelectionLane]:
    lanes = []
    for here_arg, full_arg in case.lanes():
        here, full = case.info(here_arg), case.info(full_arg)
        pieces, item = here.shape[2], here.itemsize
        if 0 in here.shape:  # no bytes: no entry of the cache can be in use
            continue
        joined = pieces == 1 or here.strides[2] == full.strides[2] == item
        lanes.append(
            SelectionLane(
                here_arg,
                full_arg,
                (here.strides[0], here.strides[1], here.strides[2]),
                (full.strides[0], full.strides[1], full.strides[2]),
                1 if joined else pieces,
                pieces * item if joined else item,
            )
        )
    return lanes


def _index_arrays(case: SelectionCase) -> list[IndexArray]:
    """Where row b * S + s of each index array lies."""
    found = []
    for argument in (TOPK, STATUS, TABLE, FULL_TABLE, KV_LENS, Q_LENS):
        info = case.info(argument)
        steps = info.strides
        if argument == FULL_TABLE:
            outer, inner = steps[0], 0
        elif len(steps) == 4:
            outer, inner = steps[:2]
        else:
            outer, inner = case.steps * steps[0], steps[0]
        found.append(IndexArray(argument, outer, inner, steps[-1], info.itemsize))
    return found


def _specify(case: SelectionCase, soc: SoC | None) -> Spec:
    warnings = () if soc is None else soc_gather.check_gather_selection(case, soc)
    table, full_table = case.info(TABLE), case.info(FULL_TABLE)
    cache, full = case.info(CACHE), case.info(FULL_CACHE)
    sizes = {
        "rows": case.rows,
        "batch": case.batch,
        "steps": case.steps,
        "topk": case.topk,
        "block": case.block,
        "table_rows": table.shape[0],
        "blocks": cache.shape[0],
        "page": cache.shape[1],
        "full_blocks": full.shape[0],
        "full_page": full.shape[1],
        "full_columns": full_table.shape[1],
        "cumulative": case.cumulative,
    }
    spec = SelectSpec(
        (STATUS, *(here for here, _ in case.lanes())),
        sizes,
        _lanes(case),
        _index_arrays(case),
        partial(_fault, sizes),
        warnings,
        soc,
    )
    if soc is not None and case.rows and case.topk:
        spec.value_quirks = soc_gather.SelectionQuirks(case, soc)
    return spec


def _fault(
    sizes: dict[str, Any], rule: str, row: int, index: int, seen: int, other: int
) -> ParamInvalidError:
    """The error of a value; ``row`` counts requests where the argument has one entry for each."""
    argument, where = "full_q_actual_seq", f"[{row}]"
    if rule == "negative":
        expected = "a length >= 0"
    elif rule == "decrease":
        expected = f"at least {other}, the total before it (q_lens_cumulative)"
    elif rule == "long":
        expected = f"a length of at most S = {other} rows a request"
        if not sizes["cumulative"]:
            expected += " (running totals? pass q_lens_cumulative=True)"
    elif rule == "entry":
        argument, where = "selection_kv_block_table", f"[{row}, {index}]"
        expected = f"0 <= block < {sizes['blocks']} in an entry that is used"
    elif rule == "shared":
        argument = "selection_kv_block_table"
        expected = "a selection block of its own for each entry that is used"
        seen_text = f"block {seen} twice" if other == row else f"block {seen} of row {other} again"
        return ParamInvalidError(
            f"{argument}{where}: expected {expected}, got {seen_text}",
            argument=argument,
            seen=seen,
            expected=expected,
        )
    elif rule == "beyond":
        argument, where = "full_kv_block_table", ""
        expected = f"more than {seen} columns for id {index} of row {row}"
        seen = sizes["full_columns"]
    elif rule == "full entry":
        argument, where = "full_kv_block_table", f"[{row // sizes['steps']}, {index}]"
        expected = f"0 <= block < {sizes['full_blocks']} in an entry that is used"
    else:
        argument = "full_kv_actual_seq"
        where = f"[{row // sizes['steps']}]"
        expected = "a selection whose length fits int32"
    return ParamInvalidError(
        f"{argument}{where}: expected {expected}, got {seen}",
        argument=argument,
        seen=seen,
        expected=expected,
    )


SELECT = Operator("gather_selection_kv_cache", ARGUMENTS, classify, _specify)


def params_of(block: Any, cumulative: Any, dtype: Any, stats: Any) -> tuple[int, bool, Any]:
    if stats is not None and not isinstance(stats, dict):
        checks.fail("stats", "a dict to fill, or None", type(stats).__name__)
    if isinstance(block, bool) or not hasattr(block, "__index__"):
        checks.fail("selection_topk_block_size", "an int > 0", shown(block))
    size = int(block.__index__())
    if not 0 < size <= checks.INT64_MAX:
        checks.fail("selection_topk_block_size", "an int > 0", size)
    return size, checks.flag(cumulative, "q_lens_cumulative"), dtype


def gather_selection_kv_cache(
    selection_k_rope: Any,
    selection_kv_cache: Any,
    selection_kv_block_table: Any,
    selection_kv_block_status: Any,
    selection_topk_indices: Any,
    full_k_rope: Any,
    full_kv_cache: Any,
    full_kv_block_table: Any,
    full_kv_actual_seq: Any,
    full_q_actual_seq: Any,
    *,
    selection_topk_block_size: int = 64,
    q_lens_cumulative: bool = False,
    stats: dict[str, Any] | None = None,
    dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Bring each row's top-k blocks into its selection; returns the rows' lengths, int32 [N].

    selection_k_rope:   [SB, sbs, R], written in place; an empty pair of ropes (None, or no
                        elements) is none.
    selection_kv_cache: [SB, sbs, K], written in place.
    selection_kv_block_table: [N, SMAX], N >= rows = B*S; which selection blocks a row owns.
    selection_kv_block_status: [B, S, 1, topk+1] or [rows, 1, topk+1], read and written: the id at
                        each place (-1 none), and last the number of valid tokens.
    selection_topk_indices: [B, S, 1, topk] or [rows, 1, topk]: wanted ids; id t is the tokens
                        t*block to t*block + block - 1. Negative ids, ids past the row's length
                        and repeats count for nothing.
    full_k_rope, full_kv_cache: [FB, fbs, R] and [FB, fbs, K], only read; any memory, a read-only
                        memory map too.
    full_kv_block_table: [B, FMAX].
    full_kv_actual_seq, full_q_actual_seq: [B], each request's tokens, new ones included, and how
                        many of them are new. Row s of a request sees its first kv - (q-1-s)
                        tokens, or all from s = q on.
    selection_topk_block_size: tokens of one id; divides sbs and fbs.
    q_lens_cumulative:  full_q_actual_seq holds running totals.
    stats:              a dict to fill with int64 arrays [rows]: tokens reused, moved, refreshed
                        and read, blocks swapped, bytes_read and bytes_moved. Filled once the
                        values are checked, before a byte moves; what fails there leaves every
                        array as it was.
    dtype:              name of the type of raw unsigned arrays.
    soc:                "A2" or "A3": apply that hardware's documented limits too.
    num_threads:        threads to use at most; None for one per core. Small work stays on the
                        caller.

    A wanted block that the row holds stays or is moved; one that it does not hold, or that the
    newest q tokens reach into, is read from the full cache: exactly that many bytes. Place p of
    row r is token p*block of the blocks in selection_kv_block_table[r]. Index arrays are all
    int32 or all int64, data arrays of one type. Tokens past the end of a partial block are
    unspecified.

    Everything is checked before the first byte is written: ParamNullError or ParamInvalidError
    for table entries in use that lie outside their cache or name one selection block twice, ids
    beyond the full table, query lengths below 0 or above S. A status that claims an id at a place
    that does not hold it is the caller's fault: that row's bytes are wrong, no other's.
    Source: CANN GatherSelectionKvCache.

    >>> import numpy as np, kvcore
    >>> full = np.arange(8, dtype=np.float16).reshape(2, 4, 1)  # 2 blocks of 4 tokens
    >>> chosen = np.zeros((1, 4, 1), np.float16)  # the selection: 1 block of 4
    >>> status = np.array([[[[-1, -1, 0]]]])  # one row, two places, nothing held
    >>> lengths = kvcore.gather_selection_kv_cache(
    ...     None, chosen, np.array([[0]]), status, np.array([[[[3, 1]]]]), None, full,
    ...     np.array([[1, 0]]), np.array([8]), np.array([1]), selection_topk_block_size=2,
    ... )
    >>> lengths.tolist(), status.ravel().tolist()  # the block with the largest id comes last
    ([4], [1, 3, 4])
    >>> chosen.ravel().tolist()  # tokens 2, 3 of table entry 1; 6, 7 of entry 0
    [6.0, 7.0, 2.0, 3.0]
    """
    return SELECT.call(
        (
            selection_k_rope,
            selection_kv_cache,
            selection_kv_block_table,
            selection_kv_block_status,
            selection_topk_indices,
            full_k_rope,
            full_kv_cache,
            full_kv_block_table,
            full_kv_actual_seq,
            full_q_actual_seq,
        ),
        params_of(selection_topk_block_size, q_lens_cumulative, dtype, stats),
        soc,
        backend,
        num_threads,
        stats,
    )
