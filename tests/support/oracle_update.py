# SPDX-License-Identifier: Apache-2.0
"""KVCacheOperation and the layout conversions, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from oracle_numbers import Array, bits


def tokens_of(new_kv: Array) -> Array:
    """``[ntokens, hidden]`` of a 2-D or 4-D new_kv."""
    if new_kv.ndim == 2:
        return new_kv
    a, b, c, d = new_kv.shape
    return np.ascontiguousarray(new_kv).reshape(a * b, c * d)


def kv_cache_update(
    new_kv: Array,
    layer_id: Any,
    past: Array,
    token_offset: Array,
    seq_len: Array,
    *,
    dtype: str | None = None,
) -> Array:
    """``past`` after the call, as a new array."""
    out = np.array(past)
    tokens = bits(tokens_of(new_kv))
    layer = int(np.asarray(layer_id).reshape(-1)[0])
    done = 0
    for b in range(len(seq_len)):
        n, end = int(seq_len[b]), int(token_offset[b])
        for j in range(n):
            bits(out)[layer, b, end - n + j] = tokens[done + j]
        done += n
    return out


def nd_to_nz(x: Array) -> Array:
    """``[..., rows, C]`` to ``[..., C // c0, rows, c0]``, c0 in stored items."""
    c0 = 32 // x.dtype.itemsize
    *outer, rows, columns = x.shape
    out = np.zeros((*outer, columns // c0, rows, c0), x.dtype)
    for c in range(columns // c0):
        bits(out)[..., c, :, :] = bits(x)[..., c * c0 : (c + 1) * c0]
    return out


def nz_to_nd(x: Array) -> Array:
    """The inverse of :func:`nd_to_nz`."""
    *outer, columns, rows, c0 = x.shape
    out = np.zeros((*outer, rows, columns * c0), x.dtype)
    for c in range(columns):
        bits(out)[..., c * c0 : (c + 1) * c0] = bits(x)[..., c, :, :]
    return out


def paged_nd_to_nz(cache: Array, five: bool = False) -> Array:
    """``[nb, bs, H, D]`` to ``[nb, H*D // c0, bs, c0]`` or ``[nb, H, D // c0, bs, c0]``."""
    nb, bs, heads, size = cache.shape
    c0 = 32 // cache.dtype.itemsize
    out = np.zeros((nb, heads, size // c0, bs, c0), cache.dtype)
    for h in range(heads):
        for c in range(size // c0):
            bits(out)[:, h, c] = bits(cache)[:, :, h, c * c0 : (c + 1) * c0]
    return out if five else out.reshape(nb, heads * size // c0, bs, c0)


def paged_nz_to_nd(cache: Array, num_heads: int | None = None) -> Array:
    """The inverse of :func:`paged_nd_to_nz`; num_heads is needed for the 4-D form."""
    bs, c0 = cache.shape[-2:]
    five = cache if cache.ndim == 5 else None
    if five is None:
        assert num_heads is not None
        five = np.ascontiguousarray(cache).reshape(
            cache.shape[0], num_heads, cache.shape[1] // num_heads, bs, c0
        )
    nb, heads, columns = five.shape[:3]
    out = np.zeros((nb, bs, heads, columns * c0), cache.dtype)
    for h in range(heads):
        for c in range(columns):
            bits(out)[:, :, h, c * c0 : (c + 1) * c0] = bits(five)[:, h, c]
    return out


LAYOUT_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "nd_to_nz": nd_to_nz,
    "nz_to_nd": nz_to_nd,
    "paged_nd_to_nz": paged_nd_to_nz,
    "paged_nz_to_nd": paged_nz_to_nd,
}
