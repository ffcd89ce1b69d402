# SPDX-License-Identifier: Apache-2.0
"""ScatterPaKvCache and ScatterPaCache, token by token, on the raw arguments.

Legal arguments are assumed; oracle_rules.violations says whether they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oracle_numbers import Array, bits, logical_name, mean_of_rows

ND = (None, "", "Norm")
NO_MODE = (None, "", "None")


@dataclass
class ScatterResult:
    """What each cache must hold afterwards.

    ``*_any_nan`` marks elements that must be a NaN, whichever (a mean that is NaN).
    """

    key_cache: Array
    value_cache: Array | None
    key_any_nan: Array
    value_any_nan: Array | None


def absent(array: Any) -> bool:
    """True for what says "no value lane": None or a 0-d array."""
    return array is None or np.ndim(array) == 0


def scenario(key: Array, cache_mode: str | None, scatter_mode: str | None, key_only: bool) -> int:
    """The row of the scenario table the arguments belong to."""
    if cache_mode == "PA_NZ":
        return 1
    if scatter_mode == "NHSD":
        return 7
    if scatter_mode == "Nct":
        return 6 if key_only else 2
    if key.ndim == 4:
        return 3
    if scatter_mode == "Alibi":
        return 4
    if scatter_mode in ("Rope", "Omni"):
        return 5
    return 6 if key_only else 2


def scatter_pa_kv_cache(
    key: Array,
    key_cache: Array,
    slot_mapping: Array,
    value: Array | None = None,
    value_cache: Array | None = None,
    *,
    compress_lens: Array | None = None,
    compress_seq_offset: Array | None = None,
    seq_lens: Array | None = None,
    cache_mode: str | None = "Norm",
    scatter_mode: str | None = "None",
    strides: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    dtype: str | None = None,
    value_dtype: str | None = None,
) -> ScatterResult:
    """The caches after the call, as new arrays of the caches' dtypes."""
    key_only = absent(value) and absent(value_cache)
    number = scenario(key, cache_mode, scatter_mode, key_only)
    lanes = [(0, key, key_cache, dtype)]
    if not key_only:
        assert value is not None
        assert value_cache is not None
        lanes.append((1, value, value_cache, value_dtype))
    done: list[tuple[Array, Array]] = []
    for lane, source, cache, named in lanes:
        out = np.array(cache)
        any_nan = np.zeros(cache.shape, bool)
        name = logical_name(cache, named)
        assert name is not None
        if number in (3, 4, 5):
            rule = _compress_rule(number, scatter_mode, compress_seq_offset)
            _compress(
                bits(source), bits(out), any_nan, slot_mapping, compress_lens, compress_seq_offset,
                seq_lens, rule, name,
            )  # fmt: skip
        elif number == 1:
            _nz(bits(source), bits(out), slot_mapping)
        elif number == 7:
            _nhsd(bits(source), bits(out), slot_mapping)
        elif scatter_mode == "Nct":
            _nct(
                memory_behind(bits(source)),
                bits(out),
                slot_mapping,
                1 if strides is None else int(strides[lane]),
                0 if offsets is None else int(offsets[lane]),
            )
        else:
            _norm(bits(source), bits(out), slot_mapping)
        done.append((out, any_nan))
    if key_only:
        return ScatterResult(done[0][0], None, done[0][1], None)
    return ScatterResult(done[0][0], done[1][0], done[0][1], done[1][1])


def scatter_pa_cache(
    key: Array,
    key_cache: Array,
    slot_mapping: Array,
    *,
    compress_lens: Array | None = None,
    compress_seq_offset: Array | None = None,
    seq_lens: Array | None = None,
    dtype: str | None = None,
) -> ScatterResult:
    """The key lane alone, scenarios 2 (mode None) and 3."""
    return scatter_pa_kv_cache(
        key,
        key_cache,
        slot_mapping,
        compress_lens=compress_lens,
        compress_seq_offset=compress_seq_offset,
        seq_lens=seq_lens,
        dtype=dtype,
    )


def _norm(tokens: Array, cache: Array, slots: Array) -> None:
    block_size = cache.shape[1]
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // block_size, slot % block_size] = tokens[i]


def _nhsd(tokens: Array, cache: Array, slots: Array) -> None:
    num_heads, block_size = cache.shape[1:3]
    for i, slot in enumerate(slots.tolist()):
        for h in range(num_heads if slot >= 0 else 0):
            cache[slot // block_size, h, slot % block_size, :] = tokens[i, h, :]


def _nz(tokens: Array, cache: Array, slots: Array) -> None:
    lane = 32 // cache.dtype.itemsize  # stored items, so a packed float4 pair counts once
    block_size = cache.shape[-2]
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        flat = np.ascontiguousarray(tokens[i]).reshape(-1)
        block, row = divmod(slot, block_size)
        for c in range(len(flat) // lane):
            column = (c,) if cache.ndim == 4 else divmod(c, cache.shape[2])
            cache[(block, *column, row)] = flat[c * lane : (c + 1) * lane]


def memory_behind(array: Array) -> Array:
    """The items from an array's first one to the end of the ndarray that it is a view of."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    first, past = array.ctypes.data, max(ends(owner)[1], ends(array)[1])
    nbytes = (past - first) // array.itemsize * array.itemsize
    if nbytes <= 0:
        return np.empty(0, array.dtype)
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(first), np.uint8).view(array.dtype)


def ends(array: Array) -> tuple[int, int]:
    """Addresses of an array's first byte and one past its last."""
    if array.size == 0:
        return array.ctypes.data, array.ctypes.data
    corners = [array.ctypes.data]
    for size, step in zip(array.shape, array.strides, strict=True):
        corners += [corner + (size - 1) * step for corner in corners]
    return min(corners), max(corners) + array.itemsize


def _nct(flat: Array, cache: Array, slots: Array, stride: int, offset: int) -> None:
    block_size, num_heads, head_size = cache.shape[1:]
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            start = i * stride + offset
            token = flat[start : start + num_heads * head_size].reshape(num_heads, head_size)
            cache[slot // block_size, slot % block_size] = token


def _compress_rule(number: int, scatter_mode: str | None, compress_seq_offset: Array | None) -> str:
    if number == 3 and scatter_mode in NO_MODE:
        return "Alibi" if compress_seq_offset is None else "Rope"
    assert scatter_mode is not None
    return scatter_mode


def run_tokens(rule: str, n: int, w: int, o: int) -> list[int | tuple[int, int]]:
    """What a run writes, row by row: a token's index, or the (first, past) tokens of a mean."""
    if rule == "Alibi":
        return [n - w + j for j in range(w)]
    if o == -1:
        return list(range(n))
    window: list[int | tuple[int, int]] = [(o, o + w)] if w > 0 and rule == "Rope" else []
    return [*range(o), *window, *range(o + w, n)]


def _compress(
    source: Array,
    cache: Array,
    any_nan: Array,
    slot_mapping: Array,
    compress_lens: Array | None,
    compress_seq_offset: Array | None,
    seq_lens: Array | None,
    rule: str,
    name: str,
) -> None:
    assert seq_lens is not None
    assert compress_lens is not None
    slots = [int(x) for x in slot_mapping.reshape(-1)]
    windows = [int(x) for x in compress_lens.reshape(-1)]
    starts = [-1] * len(slots)
    if rule != "Alibi":
        assert compress_seq_offset is not None
        starts = [int(x) for x in compress_seq_offset.reshape(-1)]
    lengths = [int(x) for x in seq_lens]
    num_heads = source.shape[-2]
    block_size = cache.shape[1]
    for b, n in enumerate(lengths):
        if source.ndim == 4:
            tokens = source[b]
        else:
            first = sum(lengths[:b])
            tokens = source[first : first + n]
        for h in range(num_heads):
            i = b * num_heads + h
            if slots[i] < 0:
                continue
            for j, what in enumerate(run_tokens(rule, n, windows[i], starts[i])):
                at = ((slots[i] + j) // block_size, (slots[i] + j) % block_size, 0)
                if isinstance(what, tuple):
                    cache[at], any_nan[at] = mean_of_rows(tokens[what[0] : what[1], h], name)
                else:
                    cache[at], any_nan[at] = tokens[what, h], False
