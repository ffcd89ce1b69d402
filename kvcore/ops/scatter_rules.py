# SPDX-License-Identifier: Apache-2.0
"""What ScatterPaKvCache asks of shapes, dtypes and modes, and which scenario a call is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcore._core.adopt import MAX_EXTENT
from kvcore._core.arrays import ArrayInfo
from kvcore._core.lanes import NZ_BYTES
from kvcore.dtypes import DType
from kvcore.errors import ParamNullError
from kvcore.ops import checks, compress
from kvcore.ops.scatter_case import (
    COMPRESS_LENS,
    COMPRESS_SEQ_OFFSET,
    KEY,
    KEY_CACHE,
    SEQ_LENS,
    SLOT_MAPPING,
    VALUE,
    VALUE_CACHE,
    Infos,
    ScatterCase,
)

__all__ = ["classify", "nct_rule"]

CACHE_MODES = ("Norm", "PA_NZ")
SCATTER_MODES = ("None", "Alibi", "Rope", "Omni", "Nct", "NHSD")


def classify(infos: Infos, params: tuple[Any, ...]) -> ScatterCase:
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
    case = ScatterCase(
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
                f"{name}: expected an array together with {other} (or None for both), got None",
                argument=name,
                seen=None,
                expected=f"an array together with {other}",
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
    """Two numbers that count; None is what the documents have as the default, the least ones."""
    if value is None:
        return least, least
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


def _check_lanes(case: ScatterCase) -> ScatterCase:
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


def _check_nz(case: ScatterCase) -> None:
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


def _check_nct(case: ScatterCase) -> None:
    for lane, (source_arg, cache_arg, head_size) in enumerate(case.lanes()):
        source, cache = case.infos[source_arg], case.infos[cache_arg]
        assert source is not None
        assert cache is not None
        if len(source.shape) == 3:
            wanted = (case.tokens, case.heads, head_size)
            checks.shape(
                source, wanted, f"[T, H, D] in Nct: T of slot_mapping, H and D of {cache.name}"
            )
        elif len(source.shape) == 0 or not checks.is_contiguous(source):
            checks.fail(
                source.name,
                "shape [T, H, D], a view of the fused buffer, or a C-contiguous buffer in Nct",
                f"shape {list(source.shape)}, strides {list(source.strides)} bytes",
            )
        if case.nct_items(lane) * source.itemsize > MAX_EXTENT:
            size = 1
            for n in source.shape:
                size *= n
            checks.fail(source.name, nct_rule(case, lane), size)


def nct_rule(case: ScatterCase, lane: int) -> str:
    """What a lane's memory must hold in Nct, for an error."""
    return (
        f"at least {case.nct_items(lane)} elements of memory from its first one on "
        f"((T-1) * stride + offset + H*D with T {case.tokens}, stride {case.strides[lane]}, "
        f"offset {case.offsets[lane]})"
    )
