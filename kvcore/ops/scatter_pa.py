# SPDX-License-Identifier: Apache-2.0
"""ScatterPaKvCache: write tokens into a paged cache.

Source of the rules: CANN's aclnnScatterPaKvCache document, and the vendor's golden functions
where the document is silent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvcore._core.lanes import NZ_BYTES, Lane, make_lane
from kvcore._core.paged import SlotSpec
from kvcore._core.plan import Operator, Spec
from kvcore._core.reach import Reach
from kvcore.ops import checks, compress, soc_scatter
from kvcore.ops.scatter_case import ARGUMENTS, SLOT_MAPPING, ScatterCase
from kvcore.ops.scatter_rules import classify, nct_rule
from kvcore.soc import SoC

__all__ = [
    "reshape_and_cache",
    "scatter_pa_cache",
    "scatter_pa_kv_cache",
]


def _row_lane(
    case: ScatterCase, lane: int, source_arg: int, cache_arg: int, head_size: int
) -> Lane:
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


def _specify(case: ScatterCase, soc: SoC | None) -> Spec:
    compresses = case.rule not in ("rows", "Nct")
    spec = compress.resolve(case, soc) if compresses else _slot_spec(case, soc)
    return spec if soc is None else soc_scatter.apply(spec, case, soc)


def _specify_key(case: ScatterCase, soc: SoC | None) -> Spec:
    spec = compress.resolve(case, soc) if case.number == 3 else _slot_spec(case, soc)
    return spec if soc is None else soc_scatter.apply(spec, case, soc, soc_scatter.KEY_ONLY)


def _slot_spec(case: ScatterCase, soc: SoC | None) -> Spec:
    outputs = tuple(cache_arg for _, cache_arg, _ in case.lanes())
    lanes = [_row_lane(case, i, *lane) for i, lane in enumerate(case.lanes())]
    spec = SlotSpec(
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
    if case.rule == "Nct" and spec.num_tokens and spec.token_bytes:
        spec.reaches = tuple([_reach(case, i, *lane) for i, lane in enumerate(case.lanes())])
    return spec


def _reach(case: ScatterCase, lane: int, source_arg: int, cache_arg: int, head_size: int) -> Reach:
    source = case.infos[source_arg]
    assert source is not None
    item, stride = source.itemsize, case.strides[lane] * source.itemsize
    return Reach(
        source_arg,
        case.offsets[lane] * item,
        case.nct_items(lane) * item,
        (case.tokens, case.heads, head_size),
        (stride if case.tokens > 1 else 0, head_size * item, item),
        nct_rule(case, lane),
    )


def _slot_fault(blocks: int, block_size: int, index: int, slot: int) -> Exception:
    return checks.slot_fault("slot_mapping", index, slot, blocks, block_size)


SCATTER = Operator("scatter_pa_kv_cache", ARGUMENTS, classify, _specify)
# The same arguments, of which value and value_cache are never given.
SCATTER_KEY = Operator("scatter_pa_cache", ARGUMENTS, classify, _specify_key)


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
    strides, offsets: two integers each, with scatter_mode "Nct" only, (1, 1) and (0, 0) by default:
                  token i's H*Dk elements begin at element i*strides[0] + offsets[0] behind the
                  first one of key, a view [T, H, Dk] of a fused buffer (value: index 1).
    compress_lens, compress_seq_offset, seq_lens: with "Alibi", "Rope", "Omni" and 4-D keys; see
                  docs/operators.md.
    dtype, value_dtype: names of the types of raw unsigned arrays ("bfloat16", "float4_e2m1", ...).
    soc:          "A2", "A3" or "950": apply that hardware's documented limits too.
    num_threads:  threads to use at most; None for one per core. Small work stays on the caller.

    Everything is checked before the first byte is written. Raises ParamNullError,
    ParamInvalidError, or SlotRangeError for a slot that is not below nb * bs.
    Source: CANN aclnnScatterPaKvCache.

    >>> import numpy as np, kvcore
    >>> key = np.full((3, 2, 8), 7, np.float16)  # 3 tokens, 2 heads of 8 items
    >>> key_cache, value_cache = np.zeros((2, 4, 16, 2, 8), np.float16)  # 4 blocks of 16 rows
    >>> slots = np.array([0, 37, -1], np.int32)  # 37 = 2 * 16 + 5; -1 writes nothing
    >>> kvcore.scatter_pa_kv_cache(key, key_cache, slots, key, value_cache)
    >>> np.argwhere(key_cache.any((2, 3))).tolist()  # block and row of each token
    [[0, 0], [2, 5]]
    """
    if strides is not None:
        strides = checks.listed(strides)
    if offsets is not None:
        offsets = checks.listed(offsets)
    return SCATTER.call(  # type: ignore[no-any-return]  # None here, more for a twin
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


def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    **keywords: Any,
) -> None:
    """scatter_pa_kv_cache in vLLM's word and argument order; same keywords.

    >>> import numpy as np, kvcore
    >>> key, value = np.ones((2, 2, 1, 8), np.float16)  # 2 tokens, 1 head of 8 items
    >>> key_cache, value_cache = np.zeros((2, 4, 16, 1, 8), np.float16)  # 4 blocks of 16 rows
    >>> slots = np.array([16, 17])  # 16 = 1 * 16 + 0
    >>> kvcore.reshape_and_cache(key, value, key_cache, value_cache, slots)
    >>> np.argwhere(value_cache.any((2, 3))).tolist()  # block and row of each token
    [[1, 0], [1, 1]]
    """
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

    >>> import numpy as np, kvcore
    >>> key = np.arange(5, dtype=np.float32).reshape(1, 5, 1, 1)  # 1 request of 5 tokens, 1 head
    >>> key_cache = np.zeros((1, 8, 1, 1), np.float32)  # 1 block of 8 rows
    >>> kvcore.scatter_pa_cache(
    ...     key, key_cache, np.array([[2]]),  # the head's rows begin at slot 2
    ...     compress_lens=np.array([[3]]), seq_lens=np.array([5]),  # "Alibi": the last 3 of 5
    ... )
    >>> key_cache.ravel().tolist()
    [0.0, 0.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0]
    """
    return SCATTER_KEY.call(  # type: ignore[no-any-return]  # None here, more for a twin
        (key, key_cache, slot_mapping, None, None, compress_lens, compress_seq_offset, seq_lens),
        ("Norm", "None", None, None, dtype, None),
        soc,
        backend,
        num_threads,
    )
