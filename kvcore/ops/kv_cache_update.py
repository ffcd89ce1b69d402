# SPDX-License-Identifier: Apache-2.0
"""KVCacheOperation (ATB): append new tokens to a contiguous cache."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvcore._core.arrays import ArrayInfo
from kvcore._core.lanes import Lane, make_lane
from kvcore._core.paged import AppendSpec
from kvcore._core.plan import Operator, Spec
from kvcore.dtypes import DType
from kvcore.errors import ParamInvalidError, in_words, shown
from kvcore.ops import checks, soc_update
from kvcore.soc import SoC

__all__ = ["kv_cache_update"]

ARGUMENTS = ("new_kv", "layer_id", "past", "token_offset", "seq_len")
NEW_KV, LAYER_ID, PAST, TOKEN_OFFSET, SEQ_LEN = range(5)


@dataclass(frozen=True, slots=True)
class UpdateCase:
    """What a call's shapes and dtypes amount to, every rule about them checked.

    layer: the one that was given as a number, or None.  tokens: rows of new_kv.
    """

    infos: tuple[ArrayInfo | None, ...]
    layer: int | None
    dtype: DType
    layers: int
    batch: int
    max_seq: int
    hidden: int
    tokens: int

    def info(self, argument: int) -> ArrayInfo:
        """An array that this case has."""
        found = self.infos[argument]
        assert found is not None
        return found


def classify(infos: tuple[ArrayInfo | None, ...], params: tuple[Any, ...]) -> UpdateCase:
    """Check every rule about shapes and dtypes."""
    layer, dtype = params
    new_kv = checks.need(infos[NEW_KV], "new_kv")
    past = checks.need(infos[PAST], "past")
    token_offset = checks.need(infos[TOKEN_OFFSET], "token_offset")
    seq_len = checks.need(infos[SEQ_LEN], "seq_len")
    wanted = checks.dtype_named(dtype, "dtype")
    own = checks.data_dtype(new_kv, wanted)
    checks.same_dtype(past, checks.data_dtype(past, wanted), own, "new_kv")
    checks.rank(past, (4,), "[layer, batch, max_seq, hidden]")
    layers, batch, max_seq, hidden = past.shape
    checks.rank(new_kv, (2, 4), "[ntokens, hidden] or [a, b, c, d]")
    checks.shape(token_offset, (batch,), "[batch] of past")
    checks.shape(seq_len, (batch,), "[batch] of past")
    if layer is None:
        layer_id = checks.need(infos[LAYER_ID], "layer_id", "an int or an array [1]")
        checks.shape(layer_id, (1,), "[1]")
        checks.one_index_dtype(layer_id, token_offset, seq_len)
    else:
        checks.one_index_dtype(token_offset, seq_len)
        if not 0 <= layer < layers:
            raise _fault(layers, max_seq, 0, "layer_id", 0, layer, 0)
    half = len(new_kv.shape) // 2
    tokens, width = math.prod(new_kv.shape[:half]), math.prod(new_kv.shape[half:])
    if width != hidden:
        seen = list(new_kv.shape)
        checks.fail("new_kv", f"tokens of hidden size {hidden} (past {list(past.shape)})", seen)
    checks.output(past)
    return UpdateCase(infos, layer, own, layers, batch, max_seq, hidden, tokens)


def _lane(case: UpdateCase) -> Lane:
    new_kv, past = case.info(NEW_KV), case.info(PAST)
    shape, steps = new_kv.shape, new_kv.strides
    inner = outer_stride = 0
    if len(shape) == 2:
        tok_stride = steps[0]
        levels = [(shape[1], steps[1], past.strides[3])]
    else:
        a, b, c, d = shape
        outer_stride, tok_stride = steps[:2]
        inner = b
        if a <= 1 or outer_stride == b * tok_stride:
            inner = outer_stride = 0
        elif b == 1:
            inner, tok_stride, outer_stride = 0, outer_stride, 0
        levels = [(c, steps[2], d * past.strides[3]), (d, steps[3], past.strides[3])]
    return make_lane(
        NEW_KV,
        PAST,
        tok_stride=tok_stride,
        tok_inner=inner,
        tok_outer_stride=outer_stride,
        block_stride=past.strides[1],
        row_stride=past.strides[2],
        levels=levels,
        item_bytes=past.itemsize,
    )


def _specify(case: UpdateCase, soc: SoC | None) -> Spec:
    past = case.info(PAST)
    warnings: tuple[str, ...] = ()
    if soc is not None:
        indices = (case.infos[LAYER_ID], case.info(TOKEN_OFFSET), case.info(SEQ_LEN))
        warnings = soc_update.check_update(
            case.info(NEW_KV), past, case.dtype, case.hidden, indices, soc
        )
    layers, max_seq, tokens = case.layers, case.max_seq, case.tokens
    return AppendSpec(
        (PAST,),
        [_lane(case)],
        {
            "tokens": tokens,
            "batch": case.batch,
            "max_seq": max_seq,
            "layers": layers,
            "layer_stride": past.strides[0],
        },
        case.layer,
        (LAYER_ID, TOKEN_OFFSET, SEQ_LEN),
        partial(_fault, layers, max_seq, tokens, machine=soc.name if soc else ""),
        warnings,
        soc,
    )


def _fault(
    layers: int,
    max_seq: int,
    tokens: int,
    rule: str,
    index: int,
    seen: int,
    other: int,
    machine: str = "",
) -> Exception:
    """The error of a value; ``other`` is what it was compared with."""
    argument, where = rule, f"[{index}]"
    if rule == "layer_id":
        expected, where = f"0 <= layer < {layers}", ""
    elif rule == "seq_len":
        expected = "a length >= 0"
    elif rule == "sum":
        argument, where = "seq_len", ""
        expected = f"lengths that sum to {tokens} (tokens of new_kv)"
        sums = other if seen < 0 else other + seen
        return ParamInvalidError(
            f"seq_len: expected {expected}, got {sums}"
            + ("" if seen < 0 else f" at index {index}"),
            argument="seq_len",
            seen=sums,
            expected=expected,
        )
    elif rule == "token_offset":
        expected = f"at least seq_len[{index}] = {other} (the length after this write)"
    elif rule == "max_seq":
        argument, expected = "token_offset", f"at most max_seq {max_seq}"
    elif rule == "soc seq_len":
        argument, expected = "seq_len", f"a length > 0 on {machine}"
    else:
        argument, expected = "token_offset", f"less than max_seq {max_seq} on {machine}"
    return ParamInvalidError(
        f"{argument}{where}: expected {expected}, got {in_words(seen)}",
        argument=argument,
        seen=seen,
        expected=expected,
    )


UPDATE = Operator("kv_cache_update", ARGUMENTS, classify, _specify)


def _layer(layer_id: Any) -> tuple[Any, int | None]:
    """(array, None) or (None, int)."""
    if type(layer_id) is int:
        return None, layer_id
    if isinstance(layer_id, np.integer) or (
        hasattr(layer_id, "__index__") and not hasattr(layer_id, "shape")
    ):
        seen = shown(layer_id)
        if not isinstance(layer_id, bool):
            try:
                return None, operator.index(layer_id)
            except Exception as error:  # an __index__ may raise what it likes
                seen = f"{type(error).__name__}: {error}"
        checks.fail("layer_id", "an int or an array [1]", seen)
    return layer_id, None


def kv_cache_update(
    new_kv: Any,
    layer_id: Any,
    past: Any,
    token_offset: Any,
    seq_len: Any,
    *,
    dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Append each request's new tokens to one layer of a contiguous cache; returns past.

    new_kv:       [ntokens, hidden], or [a, b, c, d] read as [a*b, c*d] tokens in order.
    layer_id:     [1] int32 or int64, or a Python int.
    past:         [layer, batch, max_seq, hidden]; only that layer's new rows are written.
    token_offset: [batch], the length *after* this write.
    seq_len:      [batch], new tokens per request; 0 writes nothing.

    Request b's seq_len[b] tokens go to positions token_offset[b] - seq_len[b] and following.
    Everything is checked before the first byte is written: layer_id in [0, layers), seq_len >= 0,
    token_offset >= seq_len and <= max_seq, sum(seq_len) == ntokens; ParamNullError or
    ParamInvalidError otherwise. Source: ATB KVCacheOperation (which checks neither the layer nor
    the offsets).

    >>> import numpy as np, kvcore
    >>> past = np.zeros((2, 2, 8, 4), np.float16)  # 2 layers, 2 requests of up to 8 tokens
    >>> new = np.ones((3, 4), np.float16)  # 2 tokens of the first request, 1 of the second
    >>> lengths, totals = np.array([2, 1]), np.array([5, 1])  # tokens 3 and 4, and token 0
    >>> kvcore.kv_cache_update(new, 1, past, totals, lengths) is past
    True
    >>> np.argwhere(past.any(3)).tolist()  # layer, request and position of each token
    [[1, 0, 3], [1, 0, 4], [1, 1, 0]]
    """
    array, layer = _layer(layer_id)
    return UPDATE.call(
        (new_kv, array, past, token_offset, seq_len),
        (layer, dtype),
        soc,
        backend,
        num_threads,
    )
