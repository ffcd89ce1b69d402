# SPDX-License-Identifier: Apache-2.0
"""Scenarios 3, 4 and 5 of ScatterPaKvCache: compression per (batch, head).

Of each batch b and head h, a run of rows goes to consecutive slots from slot_mapping[b*H + h] on.
With n = seq_lens[b], w = compress_lens[b*H + h], o = compress_seq_offset[b*H + h] it holds

    Alibi  the last w tokens
    Rope   tokens before o, one mean of the w tokens from o on (if w > 0), tokens from o + w on
    Omni   the same without the mean
    o == -1 in Rope and Omni: all n tokens

Source of the rules: CANN's aclnnScatterPaKvCache and aclnnScatterPaCache documents.
"""

from __future__ import annotations

from functools import partial

from kvcore._core.lanes import WindowLane
from kvcore._core.plan import Spec
from kvcore._core.windows import WindowsSpec
from kvcore._kernels import windows
from kvcore.dtypes import DType
from kvcore.errors import ParamInvalidError, SlotRangeError
from kvcore.ops import checks
from kvcore.ops.scatter_case import (
    COMPRESS_LENS,
    COMPRESS_SEQ_OFFSET,
    KEY,
    KEY_CACHE,
    SEQ_LENS,
    SLOT_MAPPING,
    ScatterCase,
)
from kvcore.soc import SoC
from kvcore.strides import moving_strides

__all__ = ["check", "place", "resolve"]


def check(case: ScatterCase) -> None:
    """Check what is particular to these scenarios in shapes and dtypes."""
    infos = case.infos
    key, key_cache, slots = infos[KEY], infos[KEY_CACHE], infos[SLOT_MAPPING]
    assert key is not None
    assert key_cache is not None
    assert slots is not None
    if key.shape[-1] != case.head_size:
        wanted = (*key.shape[:-1], case.head_size)
        checks.shape(key, wanted, f"head size {case.head_size} of key_cache")
    if case.rule == "Rope" and case.dtype.name not in windows.MEANS:
        checks.fail("key", "a dtype that has a mean (no float4) in Rope", case.dtype)
    flat, square = ("[B*H]", "[B, H]")
    either = f"{square} or {flat}" if case.number == 3 else flat
    windows_info = checks.need(infos[COMPRESS_LENS], "compress_lens", _needed(case, either))
    lengths = checks.need(infos[SEQ_LENS], "seq_lens", _needed(case, "[B]"))
    offsets = infos[COMPRESS_SEQ_OFFSET]
    if case.rule == "Alibi":
        if offsets is not None:
            checks.fail(offsets.name, "None in Alibi", f"an array {list(offsets.shape)}")
    else:
        offsets = checks.need(offsets, "compress_seq_offset", _needed(case, flat))
    checks.rank(lengths, (1,), "[B]")
    batch = lengths.shape[0]
    if case.number == 3:
        batch = key.shape[0]
        checks.shape(lengths, (batch,), "[B], B of key")
    whole, parts = (batch * case.heads,), (batch, case.heads)
    numbers = f"B {batch}, H {case.heads}"
    if case.number == 3:
        checks.shape(slots, parts, f"{square}, {numbers}")
        if len(windows_info.shape) == 2:
            checks.shape(windows_info, parts, f"{square}, {numbers}")
        else:
            checks.shape(windows_info, whole, f"{flat}, {numbers}")
    else:
        checks.shape(slots, whole, f"{flat}, {numbers}")
        checks.shape(windows_info, whole, f"{flat}, {numbers}")
    if offsets is not None:
        checks.shape(offsets, whole, f"{flat}, {numbers}")


def _needed(case: ScatterCase, axes: str) -> str:
    return f"an array {axes} in {case.rule}"


def resolve(case: ScatterCase, soc: SoC | None) -> Spec:
    """The Spec of a compression case."""
    key, lengths = case.infos[KEY], case.infos[SEQ_LENS]
    assert key is not None
    assert lengths is not None
    return WindowsSpec(
        tuple(cache_arg for _, cache_arg, _ in case.lanes()),
        [_lane(case, *lane) for lane in case.lanes()],
        {
            "batch": lengths.shape[0],
            "heads": case.heads,
            "tokens": case.tokens,
            "longest": key.shape[1] if case.number == 3 else -1,
            "block_size": max(case.block_size, 1),
            "slots": min(case.blocks * case.block_size, checks.INT64_MAX),
        },
        _mean_kind(case.dtype) if case.rule == "Rope" else -1,
        (
            SLOT_MAPPING,
            COMPRESS_LENS,
            -1 if case.rule == "Alibi" else COMPRESS_SEQ_OFFSET,
            SEQ_LENS,
        ),
        partial(_fault, case, soc),
        soc=soc,
    )


def _mean_kind(dtype: DType) -> int:
    if dtype.name == "hifloat8":
        from kvcore import hifloat8  # builds its tables: only who has such data pays for them

        windows.set_hifloat8(hifloat8.VALUES, hifloat8.LIMITS.view("uint32"), hifloat8.CODES)
    return windows.MEANS.index(dtype.name)


def _lane(case: ScatterCase, source_arg: int, cache_arg: int, head_size: int) -> WindowLane:
    source, cache = case.infos[source_arg], case.infos[cache_arg]
    assert source is not None
    assert cache is not None
    # The stride of an axis of one item says nothing and may be anything.
    *outer, head_stride, tok_step = moving_strides(source.shape, source.strides)
    start_stride, tok_stride = outer if case.number == 3 else outer * 2
    block_stride, row_stride, _, page_step = moving_strides(cache.shape, cache.strides)
    if case.block_size == 1:
        row_stride = block_stride
    if case.blocks == 1:
        block_stride = case.block_size * row_stride
    return WindowLane(
        source_arg,
        cache_arg,
        start_stride,
        tok_stride,
        head_stride,
        tok_step if head_size > 1 else cache.itemsize,
        block_stride,
        row_stride,
        page_step if head_size > 1 else cache.itemsize,
        head_size,
        cache.itemsize,
    )


def _fault(
    case: ScatterCase, soc: SoC | None, rule: str, index: int, seen: int, other: int
) -> Exception:
    """The error of a value at that place of its array; ``other`` is what it was compared with."""
    if rule == "slot":
        return _slot_fault(case, index, seen, other)
    if rule == "rows":
        return _too_many_rows(case, soc, seen)
    batch = index // max(case.heads, 1)
    at = SEQ_LENS
    if rule == "length":
        expected = "a length >= 0"
    elif rule == "longest":
        expected = f"at most {other} (S of key)"
    elif rule == "sum":
        expected = f"lengths that sum to {case.tokens} (T of key)"
        # At an index, what follows was not added up: the sum is more than it says.
        seen_text = f"{other}" if index < 0 else f"{other + seen} up to index {index}"
        return _invalid("seq_lens", expected, other + seen, seen_text)
    elif rule == "offset":
        at, expected = COMPRESS_SEQ_OFFSET, "an offset >= -1"
    elif rule == "start":
        at, expected = COMPRESS_SEQ_OFFSET, f"at most {other} (seq_lens[{batch}])"
    elif rule == "window":
        at, expected = COMPRESS_LENS, "a length >= 0"
    elif rule == "alibi":
        at, expected = COMPRESS_LENS, f"at most {other} (seq_lens[{batch}])"
    else:
        at = COMPRESS_LENS
        expected = f"at most {other} (seq_lens[{batch}] - compress_seq_offset[{index}])"
    return _invalid(place(case, at, index), expected, seen, str(seen))


def place(case: ScatterCase, at: int, index: int) -> str:
    """The name of one entry of an index array, as in "slot_mapping[1, 0]"."""
    info = case.infos[at]
    assert info is not None
    if len(info.shape) == 2:
        return f"{info.name}[{index // case.heads}, {index % case.heads}]"
    return f"{info.name}[{index}]"


def _invalid(where: str, expected: str, seen: int, seen_text: str) -> ParamInvalidError:
    return ParamInvalidError(
        f"{where}: expected {expected}, got {seen_text}",
        argument=where.partition("[")[0],
        seen=seen,
        expected=expected,
    )


def _too_many_rows(case: ScatterCase, soc: SoC | None, rows: int) -> ParamInvalidError:
    """The error of a call that writes more rows than there are slots, which a SoC's document
    forbids."""
    expected = f"num_blocks * block_size >= {rows}, the rows that this call writes, on {soc:s}"
    seen = f"{case.blocks} * {case.block_size} = {case.blocks * case.block_size}"
    return _invalid("key_cache", expected, case.blocks * case.block_size, seen)


def _slot_fault(case: ScatterCase, index: int, slot: int, rows: int) -> SlotRangeError:
    bound = case.blocks * case.block_size
    run = f"slot + {rows} rows of the run <= {bound}"
    expected = f"slot < {bound}" if slot >= bound else run
    return SlotRangeError(
        f"{place(case, SLOT_MAPPING, index)}: expected {expected} "
        f"(num_blocks {case.blocks} * block_size {case.block_size}), got {slot}",
        argument="slot_mapping",
        seen=slot,
        expected=expected,
    )
