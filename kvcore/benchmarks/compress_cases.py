# SPDX-License-Identifier: Apache-2.0
"""Compression, compared with a copy of the bytes and with slices in numpy and torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import kvcore
from kvcore.benchmarks.arrays import Functions, copies, rows, torch_if_installed, warm

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

    kept = LENGTH - WINDOW
    flat = [cache.reshape(BATCH, HEADS, LENGTH, SIZE) for cache in caches]
    sources = [source.reshape(BATCH, LENGTH, HEADS, SIZE) for source in (key, value)]
    pieces = [(0, WINDOW, kept)] if rule == "Alibi" else [(0, 0, START)]
    if rule != "Alibi":  # behind a Rope window is the row of its mean
        pieces.append((START + (rule == "Rope"), START + WINDOW, kept - START))
    means = rule == "Rope"

    def numpy_slices() -> None:
        for cache, source in zip(flat, sources, strict=True):
            for to, at, n in pieces:
                cache[:, :, to : to + n] = source[:, at : at + n].transpose(0, 2, 1, 3)
            if means:
                window = source[:, START : START + WINDOW].view(ml_dtypes.bfloat16)
                mean = window.astype(np.float32).mean(axis=1).astype(ml_dtypes.bfloat16)
                cache[:, :, START] = mean.view(np.uint16)

    moved = (
        (key, value)
        if rule == "Rope"
        else [np.ascontiguousarray(source[:, :kept]) for source in sources]
    )
    functions: Functions = {"kvcore": run, "copyto": copies(*moved), "numpy": numpy_slices}
    torch = torch_if_installed()
    if torch is not None:
        targets, tensors = (
            [torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for array in arrays]
            for arrays in (flat, sources)
        )

        def torch_slices() -> None:
            for target, tensor in zip(targets, tensors, strict=True):
                for to, at, n in pieces:
                    target[:, :, to : to + n].copy_(tensor[:, at : at + n].transpose(1, 2))
                if means:
                    window = tensor[:, START : START + WINDOW]
                    target[:, :, START] = window.mean(1, dtype=torch.float32)

        functions["torch copy_"] = torch_slices
    return functions
