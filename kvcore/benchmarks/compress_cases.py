# SPDX-License-Identifier: Apache-2.0
"""Compression beside a copy of all K and V, and numpy slices."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import kvcore
from kvcore.benchmarks.arrays import Functions, copies, rows, warm

__all__ = ["compress"]

BATCH, LENGTH, HEADS, SIZE, BLOCK = 16, 1024, 8, 128, 128
START, WINDOW = 512, 256


def compress(rule: str) -> Functions:
    """16 requests of 1,024 tokens; a window of 256 is dropped or becomes its mean."""
    key, value = (rows(BATCH * LENGTH, HEADS, SIZE, seed) & 0xBFFF for seed in (0, 1))
    caches = [
        warm(np.empty((BATCH * HEADS * LENGTH // BLOCK, BLOCK, 1, SIZE), np.uint16))
        for _ in range(2)
    ]
    typed = [array.view(ml_dtypes.bfloat16) for array in (key, value, *caches)]
    slots = np.arange(BATCH * HEADS, dtype=np.int64) * LENGTH
    more: dict[str, Any] = {
        "compress_lens": np.full(BATCH * HEADS, LENGTH - WINDOW if rule == "Alibi" else WINDOW),
        "seq_lens": np.full(BATCH, LENGTH),
        "scatter_mode": rule,
        "num_threads": 1,
    }
    if rule != "Alibi":
        more["compress_seq_offset"] = np.full(BATCH * HEADS, START)

    def run() -> None:
        kvcore.scatter_pa_kv_cache(typed[0], typed[2], slots, typed[1], typed[3], **more)

    functions: Functions = {"kvcore": run}
    if rule == "Rope":
        functions["copyto"] = copies(key, value)
        return functions
    kept = slice(WINDOW, None) if rule == "Alibi" else np.r_[:START, START + WINDOW : LENGTH]
    flat = [cache.reshape(BATCH, HEADS, LENGTH, SIZE) for cache in caches]
    sources = [source.reshape(BATCH, LENGTH, HEADS, SIZE) for source in (key, value)]
    functions["copyto"] = copies(
        *(np.ascontiguousarray(source[:, : LENGTH - WINDOW]) for source in sources)
    )

    def numpy_slices() -> None:
        for cache, source in zip(flat, sources, strict=True):
            cache[:, :, : LENGTH - WINDOW] = source[:, kept].transpose(0, 2, 1, 3)

    functions["numpy"] = numpy_slices
    return functions
