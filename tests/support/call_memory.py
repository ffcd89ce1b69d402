# SPDX-License-Identifier: Apache-2.0
"""The most memory a call holds at once: run by test_call_memory.py under count_malloc.c.

Prints one JSON object: case -> [tokens, bytes].  A case runs once before it is counted, so that
what is remembered between calls (a signature's rules, worker threads) is there.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np

import kvcore
from kvcore._kernels import isa, parallel

TOKENS = 24576
CONTEXT = 65536
counter = ctypes.CDLL(None)
counter.kv_count_peak.restype = ctypes.c_long
rng = np.random.default_rng(0)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.uint16)


def scatter(slots: np.ndarray, shape: tuple[int, ...], **more: Any) -> Callable[[int], Any]:
    tokens = [ones(TOKENS, 2, 64) for _ in range(2)]
    caches = [ones(*shape) for _ in range(2)]
    return lambda threads: kvcore.scatter_pa_kv_cache(
        tokens[0], caches[0], slots, tokens[1], caches[1], num_threads=threads, **more
    )


def strided(slots: np.ndarray) -> Callable[[int], Any]:
    tokens, cache = ones(TOKENS, 2, 64), ones(512, 128, 2, 64)
    return lambda threads: kvcore.scatter_pa_cache(tokens[::-1], cache, slots, num_threads=threads)


def compressed(rule: str, padded: bool, length: int = 256) -> Callable[[int], Any]:
    heads, batch = 2, TOKENS // length
    outer = (batch, length) if padded else (batch * length,)
    tokens = [ones(*outer, heads, 64) for _ in range(2)]
    caches = [ones(512, 128, 1, 64) for _ in range(2)]
    slots = rng.permutation(batch * heads) * length
    more: dict[str, Any] = {"compress_lens": np.full(batch * heads, 16)}
    more["seq_lens"] = np.full(batch, length)
    if rule != "Alibi":
        more["compress_seq_offset"] = np.full(batch * heads, 9)
    if padded:
        slots = slots.reshape(batch, heads)
    return lambda threads: kvcore.scatter_pa_kv_cache(
        tokens[0], caches[0], slots, tokens[1], caches[1], scatter_mode=rule,
        num_threads=threads, **more,
    )  # fmt: skip


def update() -> Callable[[int], Any]:
    batch = 48
    past, new = ones(2, batch, 1024, 64), ones(TOKENS, 64)
    offsets, lengths = np.full(batch, 700), np.full(batch, TOKENS // batch)
    return lambda threads: kvcore.kv_cache_update(
        new, 1, past, offsets, lengths, num_threads=threads
    )


def gather() -> Callable[[int], Any]:
    batch = 48
    caches, out = [ones(512, 128, 2, 64) for _ in range(2)], [ones(TOKENS, 2, 64) for _ in range(2)]
    table = rng.permutation(512)[: batch * 4].reshape(batch, 4).astype(np.int32)
    lengths = np.full(batch, TOKENS // batch, np.int32)
    return lambda threads: kvcore.gather_pa_kv_cache(
        caches[0], caches[1], table, lengths, *out, num_threads=threads
    )


def selection(
    block: int, rows: int = 12, page: int = 64, index: Any = np.int32, spare: int = 0
) -> Callable[[int], Any]:
    """TOKENS selected ids; spare: blocks of the selection cache that no table names."""
    topk = TOKENS // rows
    pages, full_pages = topk * block // page, CONTEXT * block // 64
    here = np.ones((rows * pages + spare, page, 2), np.uint8)
    full = np.ones((full_pages, 64, 2), np.uint8)
    table = (rng.permutation(rows * pages) + spare).reshape(rows, pages).astype(index)
    full_table = np.broadcast_to(np.arange(full_pages, dtype=index), (rows, full_pages))
    status = np.full((rows, 1, 1, topk + 1), -1, index)
    ids = np.empty((rows, 1, 1, topk), index)
    order = rng.permutation(CONTEXT).astype(index)
    offsets = itertools.cycle((0, CONTEXT // 2))

    def call(threads: int) -> Any:
        # Nothing that is held is wanted again: every id is read.
        ids[:, 0, 0] = order[(first := next(offsets)) : first + topk]
        return kvcore.gather_selection_kv_cache(
            None, here, table, status, ids, None, full, full_table,
            np.full(rows, CONTEXT * block, index), np.ones(rows, index),
            selection_topk_block_size=block, num_threads=threads,
        )  # fmt: skip

    status[..., -1] = 0
    return call


def cases() -> dict[str, Callable[[int], Any]]:
    apart = rng.permutation(65536)[:TOKENS]
    repeated = rng.integers(0, 65536, TOKENS)
    row, nhsd = (512, 128, 2, 64), (512, 2, 128, 64)
    return {
        "Norm": scatter(apart, row),
        "Norm, int32 slots": scatter(apart.astype(np.int32), row),
        "Norm, slots repeat": scatter(repeated, row),
        "PA_NZ": scatter(apart, (512, 8, 128, 16), cache_mode="PA_NZ"),
        "PA_NZ, slots repeat": scatter(repeated, (512, 8, 128, 16), cache_mode="PA_NZ"),
        "NHSD": scatter(apart, nhsd, scatter_mode="NHSD"),
        "NHSD, slots repeat": scatter(repeated, nhsd, scatter_mode="NHSD"),
        "scatter_pa_cache, reversed": strided(apart),
        "Alibi, padded": compressed("Alibi", True),
        "Rope, padded": compressed("Rope", True),
        "Omni, padded": compressed("Omni", True),
        "Alibi": compressed("Alibi", False),
        "Rope": compressed("Rope", False),
        "Omni": compressed("Omni", False),
        "KVCacheOperation": update(),
        "GatherPaKvCache": gather(),
        "GatherSelectionKvCache, blocks of 16": selection(16),
        "GatherSelectionKvCache, single tokens": selection(1),
        "GatherSelectionKvCache, int64 indices": selection(1, index=np.int64),
        "GatherSelectionKvCache, one row": selection(1, rows=1),
        "GatherSelectionKvCache, top-k of 32": selection(1, rows=768, page=16),
        "GatherSelectionKvCache, pages of one token": selection(1, page=1),
        "GatherSelectionKvCache, one row, pages of one token": selection(1, rows=1, page=1),
        "GatherSelectionKvCache, a cache of many blocks": selection(1, page=1, spare=1 << 20),
    }


def main() -> None:
    found = {}
    parallel.set_parallel_bytes(0)
    for name, call in cases().items():
        for stream_bytes in (0, 1 << 40):
            isa.set_stream_bytes(stream_bytes)
            for threads in (1, 2):
                call(threads)
                gc.collect()
                counter.kv_count_begin()
                call(threads)
                key = f"{name}, {threads} threads, {'streaming' if not stream_bytes else 'cached'}"
                found[key] = [TOKENS, counter.kv_count_peak()]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
