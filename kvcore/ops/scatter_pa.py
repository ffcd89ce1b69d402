# SPDX-License-Identifier: Apache-2.0
"""ScatterPaKvCache: write tokens into a paged cache.

Source of the rules: CANN's aclnnScatterPaKvCache document, and the vendor's golden functions
where the document is silent.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from kvcore._core.arrays import ArrayInfo
from kvcore._core.lanes import NZ_BYTES, Lane, make_lane
from kvcore._core.paged import SlotSpec
from kvcore._core.plan import Operator, Plan, Spec
from kvcore.dtypes import DType
from kvcore.errors import ParamNullError
from kvcore.ops import checks, compress, soc_scatter
from kvcore.ops.scatter_case import (
    ARGUMENTS,
    COMPRESS_LENS,
    COMPRESS_SEQ_OFFSET,
    KEY,
    KEY_CACHE,
    SEQ_LENS,
    SLOT_MAPPING,
    VALUE,
    VALUE_CACHE,
    Case,
    Infos,
)
from kvcore.soc import SoC

__all__ = [
    "ARGUMENTS",
    "Case",
    "classify",
    "plan_scatter_pa_cache",
    "plan_scatter_pa_kv_cache",
    "reshape_and_cache",
    "scatter_pa_cache",
    "scatter_pa_kv_cache",
]

CACHE_MODES = ("Norm", "PA_NZ")
SCATTER_MODES = ("None", "Alibi", "Rope", "Omni", "Nct", "NHSD")


def classify(infos: Infos, params: tuple[Any, ...]) -> Case:
    """Check every rule about shapes, dtypes and modes, and say which scenario this is."""
    cache_mode, scatter_mode, strides, offsets, dtype, value_dtype = params
    cache_mode = checks.mode(cache_mode, "cache_mode", CACHE_MODES, "Norm")
    scatter_mode = checks.mode(scatter_mode, "scatter_mode", SCATTER_MODES, "None")
    key = checks.need(infos[KEY], "key")
    key_cache = checks.need(infos[KEY_CACHE], "key_cache")
    slots = checks.need(infos[SLOT_MAPPING], "slot_mapping")
    key_only = _is_key_only(infos[VALUE], infos[VALUE_CACHE])
    number, rule = _scenario(key, cache_mode, scatter_mode, infos, key_only)
    index_dtype = checks.one_index_dtype(
        slots, infos[COMPRESS_LENS], infos[COMPRESS_SEQ_OFFSET], infos[SEQ_LENS]
    )
    key_type, value_type = _dtypes(infos, key_only, number, dtype, value_dtype)
    if rule == "Nct":
        strides = _nct_numbers(strides, "strides", 1)
        offsets = _nct_numbers(offsets, "offsets", 0)
    else:
        strides, offsets = (), ()
    sizes = _cache_sizes(key_cache, number, "key_cache")
    if number in (1, 2, 6, 7):
        _no_optional(infos, number)
        checks.rank(slots, (1,), "[T]")
        tokens = slots.shape[0]
        if rule == "rows" and tokens != key.shape[0]:
            checks.fail("slot_mapping", f"shape [{key.shape[0]}] (T of key)", list(slots.shape))
    else:
        tokens = key.shape[0] * (key.shape[1] if number == 3 else 1)
    case = Case(
        number,
        rule,
        cache_mode,
        scatter_mode,
        infos,
        key_only,
        tokens,
        sizes.heads if rule in ("rows", "Nct") else key.shape[-2],
        sizes.head_size,
        0,
        sizes.blocks,
        sizes.block_size,
        key_type,
        value_type,
        index_dtype,
        strides,
        offsets,
    )
    return _check_lanes(case)


class _Sizes:
    """The sizes a cache's shape states."""

    def __init__(self, blocks: int, block_size: int, heads: int, head_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.heads = heads
        self.head_size = head_size


def _cache_sizes(cache: ArrayInfo, number: int, name: str) -> _Sizes:
    if number == 1:
        checks.rank(
            cache,
            (4, 5),
            f"[nb, H*D//{_c0(cache)}, bs, {_c0(cache)}] or "
            f"[nb, H, D//{_c0(cache)}, bs, {_c0(cache)}] (PA_NZ)",
        )
        return _Sizes(cache.shape[0], cache.shape[-2], 0, 0)
    if number == 7:
        checks.rank(cache, (4,), "[nb, H, bs, D] (NHSD)")
        blocks, heads, block_size, head_size = cache.shape
    else:
        axes = "[nb, bs, H, D]" if number in (2, 6) else "[nb, bs, 1, D]"
        checks.rank(cache, (4,), axes)
        blocks, block_size, heads, head_size = cache.shape
        if number in (3, 4, 5) and heads != 1:
            checks.fail(
                name,
                f"shape {axes} (compression writes one head a row)",
                list(cache.shape),
            )
    return _Sizes(blocks, block_size, heads, head_size)


def _c0(info: ArrayInfo) -> int:
    return NZ_BYTES // info.itemsize if info.itemsize else NZ_BYTES


def _is_key_only(value: ArrayInfo | None, cache: ArrayInfo | None) -> bool:
    if value is None and cache is None:
        return True
    for info, name, other in (
        (value, "value", "value_cache"),
        (cache, "value_cache", "value"),
    ):
        if info is None:
            raise ParamNullError(
                f"{name}: expected an array beside {other} (or None for both), got None",
                argument=name,
                seen=None,
                expected=f"an array beside {other}",
            )
    assert value is not None
    assert cache is not None
    flat = [info.name for info in (value, cache) if len(info.shape) == 0]
    if len(flat) == 1:
        checks.fail(flat[0], "an array, or 0-d for both value and value_cache", "a 0-d array")
    return len(flat) == 2


def _scenario(
    key: ArrayInfo, cache_mode: str, scatter_mode: str, infos: Infos, key_only: bool
) -> tuple[int, str]:
    if cache_mode == "PA_NZ":
        checks.rank(key, (3,), "[T, H, D]")
        return 1, "rows"
    if scatter_mode == "Nct":
        return (6 if key_only else 2), "Nct"
    if scatter_mode == "NHSD":
        checks.rank(key, (3,), "[T, H, D]")
        return 7, "rows"
    if scatter_mode == "None":
        checks.rank(key, (3, 4), "[T, H, D], or [B, S, H, D] with compress_lens and seq_lens")
        if len(key.shape) == 3:
            return (6 if key_only else 2), "rows"
        return 3, "Alibi" if infos[COMPRESS_SEQ_OFFSET] is None else "Rope"
    checks.rank(key, (3, 4), "[T, H, D] or [B, S, H, D]")
    if len(key.shape) == 4:
        return 3, scatter_mode
    return (4 if scatter_mode == "Alibi" else 5), scatter_mode


def _dtypes(
    infos: Infos, key_only: bool, number: int, dtype: Any, value_dtype: Any
) -> tuple[DType, DType]:
    key, key_cache = infos[KEY], infos[KEY_CACHE]
    assert key is not None
    assert key_cache is not None
    wanted = checks.dtype_named(dtype, "dtype")
    value_wanted = checks.dtype_named(value_dtype, "value_dtype")
    key_type = checks.data_dtype(key, wanted)
    checks.same_dtype(key_cache, checks.data_dtype(key_cache, wanted), key_type, "key")
    if key_only:
        return key_type, key_type
    value, value_cache = infos[VALUE], infos[VALUE_CACHE]
    assert value is not None
    assert value_cache is not None
    strict = value_wanted is not None
    if value_wanted is None:
        value_wanted = wanted
    value_type = checks.data_dtype(value, value_wanted, "value_dtype", strict=strict)
    cache_type = checks.data_dtype(value_cache, value_wanted, "value_dtype", strict=strict)
    checks.same_dtype(value_cache, cache_type, value_type, "value")
    if number != 1:
        checks.same_dtype(value, value_type, key_type, "key (only PA_NZ mixes dtypes)")
    return key_type, value_type


def _nct_numbers(value: Any, name: str, least: int) -> tuple[int, ...]:
    if value is None:
        raise ParamNullError(
            f"{name}: expected two integers with scatter_mode 'Nct', got None",
            argument=name,
            seen=None,
            expected="two integers",
        )
    numbers = checks.integers(value, name, 2)
    for i, number in enumerate(numbers):
        if not least <= number <= checks.INT64_MAX:
            checks.fail(f"{name}[{i}]", f"an int64 >= {least}", number)
    return numbers


def _no_optional(infos: Infos, number: int) -> None:
    for i in (COMPRESS_LENS, COMPRESS_SEQ_OFFSET, SEQ_LENS):
        info = infos[i]
        if info is not None:
            checks.fail(info.name, f"None in scenario {number}", f"an array {list(info.shape)}")


def _check_lanes(case: Case) -> Case:
    """Check both lanes against the case's sizes and fill in what only they know."""
    infos = case.infos
    key = infos[KEY]
    assert key is not None
    heads, head_size = case.heads, case.head_size
    value_head_size = 0
    if case.number == 1:
        _, heads, head_size = key.shape
        case = replace(case, heads=heads, head_size=head_size)
    elif case.rule == "rows":
        checks.shape(key, (case.tokens, heads, head_size), "[T, H, D] of key_cache")
    if not case.key_only:
        value, value_cache = infos[VALUE], infos[VALUE_CACHE]
        assert value is not None
        assert value_cache is not None
        key_cache = infos[KEY_CACHE]
        assert key_cache is not None
        if len(value_cache.shape) != len(key_cache.shape):
            checks.fail(
                "value_cache",
                f"rank {len(key_cache.shape)} as key_cache",
                list(value_cache.shape),
            )
        if case.number == 1:
            checks.rank(value, (3,), "[T, H, D]")
            value_head_size = value.shape[2]
        else:
            value_head_size = value_cache.shape[-1]
            checks.shape(
                value_cache,
                (*key_cache.shape[:-1], value_head_size),
                "leading sizes of key_cache",
            )
        if case.rule != "Nct":
            checks.shape(value, (*key.shape[:-1], value_head_size), "leading sizes of key")
    case = replace(case, value_head_size=value_head_size)
    if case.number == 1:
        _check_nz(case)
    elif case.rule == "Nct":
        _check_nct(case)
    elif case.number in (3, 4, 5):
        compress.check(case)
    for _, cache_arg, _ in case.lanes():
        cache = infos[cache_arg]
        assert cache is not None
        checks.output(cache)
    return case


def _check_nz(case: Case) -> None:
    for source_arg, cache_arg, head_size in case.lanes():
        source, cache = case.infos[source_arg], case.infos[cache_arg]
        assert source is not None
        assert cache is not None
        c0 = _c0(cache)
        if head_size * cache.itemsize % NZ_BYTES:
            checks.fail(
                source.name,
                f"a head size of whole {NZ_BYTES}-byte columns in PA_NZ (multiple of {c0})",
                head_size,
            )
        columns = head_size // c0
        if len(cache.shape) == 5:
            wanted = (case.blocks, case.heads, columns, case.block_size, c0)
        else:
            wanted = (case.blocks, case.heads * columns, case.block_size, c0)  # type: ignore[assignment]
        checks.shape(cache, wanted, "PA_NZ")


def _check_nct(case: Case) -> None:
    for lane, (source_arg, cache_arg, head_size) in enumerate(case.lanes()):
        source, cache = case.infos[source_arg], case.infos[cache_arg]
        assert source is not None
        assert cache is not None
        if len(source.shape) == 0:
            checks.fail(source.name, "a buffer of at least one axis", "a 0-d array")
        if not _c_contiguous(source):
            checks.fail(
                source.name,
                "a C-contiguous buffer in Nct (pass the whole fused storage)",
                f"strides {source.strides} bytes",
            )
        size = 1
        for n in source.shape:
            size *= n
        needed = 0
        if case.tokens:
            needed = (case.tokens - 1) * case.strides[lane] + case.offsets[lane]
            needed += case.heads * head_size
        if needed > size:
            checks.fail(
                source.name,
                f"at least {needed} elements ((T-1) * stride + offset + H*D with T {case.tokens}, "
                f"stride {case.strides[lane]}, offset {case.offsets[lane]})",
                size,
            )


def _c_contiguous(info: ArrayInfo) -> bool:
    if 0 in info.shape:
        return True
    step = info.itemsize
    for size, stride in zip(reversed(info.shape), reversed(info.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _row_lane(case: Case, lane: int, source_arg: int, cache_arg: int, head_size: int) -> Lane:
    source, cache = case.infos[source_arg], case.infos[cache_arg]
    assert source is not None
    assert cache is not None
    item = cache.itemsize
    steps = cache.strides
    tok_offset = 0
    if case.rule == "Nct":
        tok_offset = case.offsets[lane] * item if case.tokens else 0
        tok_stride = case.strides[lane] * item if case.tokens > 1 else 0
        head_step, item_step = head_size * item, item
    else:
        tok_stride, head_step, item_step = source.strides
    if case.number == 1:
        c0 = NZ_BYTES // item
        columns = head_size // c0
        *_, column_step, row_stride, cell_step = steps
        head_page = steps[1] if len(cache.shape) == 5 else columns * column_step
        levels = [
            (case.heads, head_step, head_page),
            (columns, c0 * item_step, column_step),
            (c0, item_step, cell_step),
        ]
    else:
        row_stride = steps[2] if case.number == 7 else steps[1]
        head_page = steps[1] if case.number == 7 else steps[2]
        levels = [(case.heads, head_step, head_page), (head_size, item_step, steps[3])]
    return make_lane(
        source_arg,
        cache_arg,
        tok_stride=tok_stride,
        block_stride=steps[0],
        row_stride=row_stride,
        levels=levels,
        item_bytes=item,
        tok_offset=tok_offset,
        nz=case.number == 1,
    )


def _resolve(infos: Infos, params: tuple[Any, ...], soc: SoC | None) -> Spec:
    case = classify(infos, params)
    compresses = case.rule not in ("rows", "Nct")
    spec = compress.resolve(case, soc) if compresses else _slot_spec(case, soc)
    return spec if soc is None else soc_scatter.apply(spec, case, soc)


def _resolve_key(infos: Infos, params: tuple[Any, ...], soc: SoC | None) -> Spec:
    case = classify(infos, params)
    spec = compress.resolve(case, soc) if case.number == 3 else _slot_spec(case, soc)
    return spec if soc is None else soc_scatter.apply(spec, case, soc, soc_scatter.KEY_ONLY)


def _slot_spec(case: Case, soc: SoC | None) -> Spec:
    outputs = tuple(cache_arg for _, cache_arg, _ in case.lanes())
    lanes = [_row_lane(case, i, *lane) for i, lane in enumerate(case.lanes())]
    return SlotSpec(
        outputs,
        lanes,
        case.tokens,
        max(case.block_size, 1),
        min(case.blocks * case.block_size, checks.INT64_MAX),
        partial(_slot_fault, case.blocks, case.block_size),
        SLOT_MAPPING,
        (),
        soc,
    )


def _slot_fault(blocks: int, block_size: int, index: int, slot: int) -> Exception:
    return checks.slot_fault("slot_mapping", index, slot, blocks, block_size)


SCATTER = Operator("scatter_pa_kv_cache", ARGUMENTS, _resolve)
# The same arguments, of which value and value_cache are never given.
SCATTER_KEY = Operator("scatter_pa_cache", ARGUMENTS, _resolve_key)


def scatter_pa_kv_cache(
    key: Any,
    key_cache: Any,
    slot_mapping: Any,
    value: Any = None,
    value_cache: Any = None,
    *,
    compress_lens: Any = None,
    compress_seq_offset: Any = None,
    seq_lens: Any = None,
    cache_mode: str | None = "Norm",
    scatter_mode: str | None = "None",
    strides: Any = None,
    offsets: Any = None,
    dtype: Any = None,
    value_dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> None:
    """Write one row per token into a paged cache, in place.

    key:          [T, H, Dk]; any strides.
    key_cache:    Norm [nb, bs, H, Dk]; "PA_NZ" [nb, H*Dk//c0, bs, c0] or [nb, H, Dk//c0, bs, c0]
                  with c0 = 32 bytes of elements; scatter_mode "NHSD" [nb, H, bs, Dk]. Written.
    slot_mapping: [T] int32 or int64; slot s is row s % bs of block s // bs. A negative slot
                  writes nothing; of repeated slots the last token wins.
    value, value_cache: as key and key_cache, with a head size of their own; None for both is
                  key only.
    strides, offsets: two integers each, with scatter_mode "Nct" only: token i's H*Dk elements
                  begin at element i*strides[0] + offsets[0] of key, a flat buffer (value: index 1).
    compress_lens, compress_seq_offset, seq_lens: with "Alibi", "Rope", "Omni" and 4-D keys; see
                  docs/operators.md.
    dtype, value_dtype: names of the types of raw unsigned arrays ("bfloat16", "float4_e2m1", ...).
    soc:          "A2", "A3" or "950": apply that hardware's documented limits too.
    num_threads:  None for one thread per core on large work, one on small.

    Everything is checked before the first byte is written. Raises ParamNullError,
    ParamInvalidError, or SlotRangeError for a slot that is not below nb * bs.
    Source: CANN aclnnScatterPaKvCache.
    """
    if strides is not None:
        strides = checks.listed(strides)
    if offsets is not None:
        offsets = checks.listed(offsets)
    SCATTER.call(
        (
            key,
            key_cache,
            slot_mapping,
            value,
            value_cache,
            compress_lens,
            compress_seq_offset,
            seq_lens,
        ),
        (cache_mode, scatter_mode, strides, offsets, dtype, value_dtype),
        soc,
        backend,
        num_threads,
    )


def plan_scatter_pa_kv_cache(
    key: Any,
    key_cache: Any,
    slot_mapping: Any,
    value: Any = None,
    value_cache: Any = None,
    *,
    compress_lens: Any = None,
    compress_seq_offset: Any = None,
    seq_lens: Any = None,
    cache_mode: str | None = "Norm",
    scatter_mode: str | None = "None",
    strides: Any = None,
    offsets: Any = None,
    dtype: Any = None,
    value_dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Plan:
    """A Plan of scatter_pa_kv_cache with the same arguments: run() it any number of times."""
    return SCATTER.plan(
        (
            key,
            key_cache,
            slot_mapping,
            value,
            value_cache,
            compress_lens,
            compress_seq_offset,
            seq_lens,
        ),
        (
            cache_mode,
            scatter_mode,
            None if strides is None else checks.listed(strides),
            None if offsets is None else checks.listed(offsets),
            dtype,
            value_dtype,
        ),
        soc,
        backend,
        num_threads,
    )


def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    **keywords: Any,
) -> None:
    """scatter_pa_kv_cache in vLLM's word and argument order; same keywords."""
    scatter_pa_kv_cache(key, key_cache, slot_mapping, value, value_cache, **keywords)


def scatter_pa_cache(
    key: Any,
    key_cache: Any,
    slot_mapping: Any,
    *,
    compress_lens: Any = None,
    compress_seq_offset: Any = None,
    seq_lens: Any = None,
    dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> None:
    """scatter_pa_kv_cache of the key alone: one row per token, or compression.

    key:          [T, H, D], with key_cache [nb, bs, H, D] and slot_mapping [T]; or [B, S, H, D]
                  with key_cache [nb, bs, 1, D], slot_mapping [B, H], compress_lens, seq_lens and,
                  for means ("Rope"), compress_seq_offset. Without the last it is "Alibi".
    key_cache:    written.
    Everything else is as in scatter_pa_kv_cache.
    Source: CANN aclnnScatterPaCache.
    """
    SCATTER_KEY.call(
        (key, key_cache, slot_mapping, None, None, compress_lens, compress_seq_offset, seq_lens),
        ("Norm", "None", None, None, dtype, None),
        soc,
        backend,
        num_threads,
    )


def plan_scatter_pa_cache(
    key: Any,
    key_cache: Any,
    slot_mapping: Any,
    *,
    compress_lens: Any = None,
    compress_seq_offset: Any = None,
    seq_lens: Any = None,
    dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Plan:
    """A Plan of scatter_pa_cache with the same arguments: run() it any number of times."""
    return SCATTER_KEY.plan(
        (key, key_cache, slot_mapping, None, None, compress_lens, compress_seq_offset, seq_lens),
        ("Norm", "None", None, None, dtype, None),
        soc,
        backend,
        num_threads,
    )
