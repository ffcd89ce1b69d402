# SPDX-License-Identifier: Apache-2.0
"""GatherPaKvCache: the tokens of each request from a paged cache, one after the other.

Source of the rules: CANN's aclnnGatherPaKvCache document, and the vendor's kernels where it is
silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from kvcore._core.arrays import ArrayInfo
from kvcore._core.gather import GatherSpec
from kvcore._core.lanes import NZ_BYTES, Lane, make_lane
from kvcore._core.plan import Operator, Spec
from kvcore.dtypes import DType
from kvcore.errors import ParamInvalidError
from kvcore.ops import checks, soc_gather
from kvcore.soc import SoC

__all__ = ["GatherCase", "classify", "gather_pa_kv_cache"]

ARGUMENTS = (
    "key_cache",
    "value_cache",
    "block_tables",
    "seq_lens",
    "key",
    "value",
    "seq_offset",
)
KEY_CACHE, VALUE_CACHE, BLOCK_TABLES, SEQ_LENS, KEY, VALUE, SEQ_OFFSET = range(7)
CACHE_MODES = ("Norm", "PA_NZ", "NHSD")
Infos = tuple[ArrayInfo | None, ...]


@dataclass(frozen=True, slots=True)
class GatherCase:
    """What a call's shapes, dtypes and modes amount to, every rule about them checked.

    lanes: (cache argument, output argument) of key and value.  dtypes: one per lane.
    tokens: rows of the outputs.  token_bytes: of each lane.  totals: seq_lens are running totals.
    """

    cache_mode: str
    infos: Infos
    lanes: tuple[tuple[int, int], ...]
    dtypes: tuple[DType, ...]
    index_dtype: DType
    tokens: int
    token_bytes: tuple[int, ...]
    batch: int
    columns: int
    blocks: int
    block_size: int
    totals: bool

    def info(self, argument: int) -> ArrayInfo:
        """An array that this case has."""
        found = self.infos[argument]
        assert found is not None
        return found


def classify(infos: Infos, params: tuple[Any, ...]) -> GatherCase:
    """Check every rule about shapes, dtypes and modes."""
    cache_mode, totals, dtype, value_dtype = params
    cache_mode = checks.mode(cache_mode, "cache_mode", CACHE_MODES, "Norm")
    key_cache = checks.need(infos[KEY_CACHE], "key_cache")
    tables = checks.need(infos[BLOCK_TABLES], "block_tables")
    lengths = checks.need(infos[SEQ_LENS], "seq_lens")
    key = checks.need(infos[KEY], "key")
    offsets = infos[SEQ_OFFSET]
    lanes: tuple[tuple[int, int], ...] = ((KEY_CACHE, KEY),)
    if infos[VALUE_CACHE] is not None or infos[VALUE] is not None:
        why = "an array together with {} (or None for both)"
        checks.need(infos[VALUE_CACHE], "value_cache", why.format("value"))
        checks.need(infos[VALUE], "value", why.format("value_cache"))
        lanes += ((VALUE_CACHE, VALUE),)
    index_dtype = checks.one_index_dtype(tables, lengths, offsets)
    checks.rank(tables, (2,), "[B, M]")
    batch, columns = tables.shape
    checks.shape(
        lengths,
        (batch + totals,),
        "[B + 1], running totals of B requests" if totals else "[B] of block_tables",
    )
    if offsets is not None:
        checks.shape(offsets, (batch,), "[B] of block_tables")
    found = [_lane(infos, i, lane, cache_mode, dtype, value_dtype) for i, lane in enumerate(lanes)]
    if len(found) > 1:
        _agree(infos, cache_mode)
    blocks, block_size = _page(key_cache, cache_mode)
    return GatherCase(
        cache_mode,
        infos,
        lanes,
        tuple(lane_dtype for lane_dtype, _ in found),
        index_dtype,
        key.shape[0],
        tuple(token_bytes for _, token_bytes in found),
        batch,
        columns,
        blocks,
        block_size,
        totals,
    )


def _page(cache: ArrayInfo, cache_mode: str) -> tuple[int, int]:
    """(blocks, rows of one)."""
    return cache.shape[0], cache.shape[1 if cache_mode == "Norm" else -2]


def _lane(
    infos: Infos,
    i: int,
    lane: tuple[int, int],
    cache_mode: str,
    dtype: Any,
    value_dtype: Any,
) -> tuple[DType, int]:
    """Check one cache against its output: (dtype, bytes of a token)."""
    cache, out = infos[lane[0]], infos[lane[1]]
    assert cache is not None
    assert out is not None
    keyword = "dtype"
    wanted = checks.dtype_named(dtype, "dtype")
    named = checks.dtype_named(value_dtype, "value_dtype")
    strict = True
    if i == 1:
        # dtype= speaks for both lanes unless value_dtype= is there, or it fits the key alone.
        keyword, strict = "value_dtype", named is not None
        wanted = named if named is not None else wanted
    own = checks.data_dtype(cache, wanted, keyword, strict=strict)
    checks.same_dtype(out, checks.data_dtype(out, wanted, keyword, strict=strict), own, cache.name)
    if cache_mode == "PA_NZ":
        c0 = NZ_BYTES // cache.itemsize
        axes = f"[nb, H*D//{c0}, bs, {c0}] or [nb, H, D//{c0}, bs, {c0}] (PA_NZ)"
        checks.rank(cache, (4, 5), axes)
        if cache.shape[-1] != c0:
            checks.fail(cache.name, f"shape {axes}", list(cache.shape))
        checks.rank(out, (2,), "[sum of lengths, H*D] (PA_NZ)")
        width = c0
        for size in cache.shape[1:-2]:
            width *= size
        checks.shape(out, (out.shape[0], width), f"[sum of lengths, H*D] of {cache.name}")
    else:
        axes = "[nb, bs, H, D]" if cache_mode == "Norm" else "[nb, H, bs, D] (NHSD)"
        checks.rank(cache, (4,), axes)
        checks.rank(out, (3,), "[sum of lengths, H, D]")
        heads = cache.shape[2 if cache_mode == "Norm" else 1]
        wanted_shape = (out.shape[0], heads, cache.shape[3])
        checks.shape(out, wanted_shape, f"[sum of lengths, H, D] of {cache.name}")
        width = heads * cache.shape[3]
    checks.output(out)
    return own, width * cache.itemsize


def _agree(infos: Infos, cache_mode: str) -> None:
    key_cache, value_cache = infos[KEY_CACHE], infos[VALUE_CACHE]
    key, value = infos[KEY], infos[VALUE]
    assert key_cache is not None
    assert value_cache is not None
    assert key is not None
    assert value is not None
    seen, wanted = list(value_cache.shape), list(key_cache.shape)
    if len(seen) != len(wanted):
        checks.fail("value_cache", f"rank {len(wanted)} as key_cache", seen)
    # In a 4-D PA_NZ cache the axis of heads is folded with the columns.
    own = {"Norm": (3,), "NHSD": (3,), "PA_NZ": (len(wanted) - 4 + 1, len(wanted) - 1)}[cache_mode]
    if [n for i, n in enumerate(seen) if i not in own] != [
        n for i, n in enumerate(wanted) if i not in own
    ]:
        checks.fail("value_cache", f"the blocks, block size and heads of key_cache {wanted}", seen)
    if value.shape[0] != key.shape[0]:
        checks.fail("value", f"{key.shape[0]} tokens as key", list(value.shape))


def _row_lane(case: GatherCase, cache_arg: int, out_arg: int) -> Lane:
    cache, out = case.info(cache_arg), case.info(out_arg)
    item, steps, shape = cache.itemsize, cache.strides, cache.shape
    item_step = out.strides[-1]
    if case.cache_mode == "PA_NZ":
        c0, columns = shape[-1], shape[-3]
        heads = shape[1] if len(shape) == 5 else 1
        levels = [
            (heads, columns * c0 * item_step, steps[1]),
            (columns, c0 * item_step, steps[-3]),
            (c0, item_step, steps[-1]),
        ]
        row_stride = steps[-2]
    else:
        head_axis = 2 if case.cache_mode == "Norm" else 1
        levels = [
            (shape[head_axis], out.strides[1], steps[head_axis]),
            (shape[3], item_step, steps[3]),
        ]
        row_stride = steps[3 - head_axis]
    return make_lane(
        out_arg,
        cache_arg,
        tok_stride=out.strides[0],
        block_stride=steps[0],
        row_stride=row_stride,
        levels=levels,
        item_bytes=item,
        nz=case.cache_mode == "PA_NZ",
    )


def _specify(case: GatherCase, soc: SoC | None) -> Spec:
    warnings = () if soc is None else soc_gather.check_gather_pa(case, soc)
    return GatherSpec(
        tuple(out for _, out in case.lanes),
        [_row_lane(case, *lane) for lane in case.lanes],
        {
            "tokens": case.tokens,
            "batch": case.batch,
            "columns": case.columns,
            "blocks": case.blocks,
            "block_size": case.block_size,
            "totals": case.totals,
        },
        (BLOCK_TABLES, SEQ_LENS, -1 if case.infos[SEQ_OFFSET] is None else SEQ_OFFSET),
        partial(_fault, case.tokens, case.blocks, case.columns, soc_gather.out_of_range_note(soc)),
        warnings,
        soc,
    )


def _fault(
    tokens: int,
    blocks: int,
    columns: int,
    note: str,
    rule: str,
    index: int,
    seen: int,
    other: int,
) -> ParamInvalidError:
    """The error of a value; ``other`` is what it was compared with."""
    argument, where = "seq_lens", f"[{index}]"
    if rule == "start":
        expected = "0 (running totals start with it)"
    elif rule == "decrease":
        expected = f"at least seq_lens[{index - 1}] = {other} (running totals do not decrease)"
    elif rule == "length":
        expected = "a length >= 0"
    elif rule == "sum":
        where = ""
        expected = f"lengths that sum to {tokens} (tokens of key)"
        seen += other
    elif rule == "offset":
        argument, expected = "seq_offset", "an offset >= 0"
    elif rule == "empty":
        expected = "0 (the cache's blocks have no rows)"
    elif rule == "column":
        argument = "block_tables"
        expected = f"at least {seen + 1} columns for the tokens of request {index}"
        seen = columns
    else:
        argument, where = "block_tables", f"[{index}, {other}]"
        expected = f"0 <= block < {blocks}{note}"
    return ParamInvalidError(
        f"{argument}{where}: expected {expected}, got {seen}",
        argument=argument,
        seen=seen,
        expected=expected,
    )


GATHER = Operator("gather_pa_kv_cache", ARGUMENTS, classify, _specify)


def gather_pa_kv_cache(
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    key: Any,
    value: Any,
    *,
    seq_offset: Any = None,
    cache_mode: str | None = "Norm",
    is_seq_lens_cumsum: bool = False,
    dtype: Any = None,
    value_dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> None:
    """Copy the tokens of each request out of a paged cache, one request after the other.

    key_cache:    Norm [nb, bs, H, Dk]; "PA_NZ" [nb, H*Dk//c0, bs, c0] or [nb, H, Dk//c0, bs, c0]
                  with c0 = 32 bytes of elements; "NHSD" [nb, H, bs, Dk]. Any strides.
    value_cache:  the same with a head size of its own; None, with value, is key only.
    block_tables: [B, M] int32 or int64; which block holds tokens j*bs to j*bs + bs - 1 of a
                  request, per column j. Entries that no token needs may hold anything.
    seq_lens:     [B] lengths, or with is_seq_lens_cumsum [B + 1] running totals from 0.
    key, value:   [sum of lengths, H, D]; PA_NZ [sum of lengths, H*D]. Written in place.
    seq_offset:   [B] tokens of each request to pass over, in whole blocks: the first is row 0 of
                  column seq_offset // bs, the remainder is dropped as on the hardware.
    dtype, value_dtype: names of the types of raw unsigned arrays.
    soc:          "A2", "A3" or "950": apply that hardware's documented limits too.
    num_threads:  threads to use at most; None for one per core. Small work stays on the caller.

    Everything is checked before the first byte is written: ParamNullError or ParamInvalidError
    for a needed column past the table or block outside the cache, lengths that are negative or
    do not sum to the rows of key, totals that decrease or do not start with 0.
    Source: CANN aclnnGatherPaKvCache (key only, NHSD and 5-D caches are this library's own).

    >>> import numpy as np, kvcore
    >>> cache = np.arange(12, dtype=np.float32).reshape(3, 4, 1, 1)  # 3 blocks of 4 rows
    >>> tables = np.array([[2, 0], [1, -1]])  # the blocks of two requests
    >>> key = np.empty((8, 1, 1), np.float32)  # 8 = 5 + 3 tokens
    >>> kvcore.gather_pa_kv_cache(cache, None, tables, np.array([5, 3]), key, None)
    >>> key.ravel().tolist()  # block 2, one row of block 0; three rows of block 1
    [8.0, 9.0, 10.0, 11.0, 0.0, 4.0, 5.0, 6.0]
    """
    return GATHER.call(  # type: ignore[no-any-return]  # None here, more for a twin
        (key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset),
        (cache_mode, checks.flag(is_seq_lens_cumsum, "is_seq_lens_cumsum"), dtype, value_dtype),
        soc,
        backend,
        num_threads,
    )
