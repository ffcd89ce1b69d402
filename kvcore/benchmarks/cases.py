# SPDX-License-Identifier: Apache-2.0
"""What is measured: real shapes, inside the last-level cache and far outside it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import kvcore
from kvcore.benchmarks.arrays import (
    Functions,
    copies,
    random_slots,
    rows,
    torch_if_installed,
    warm,
)
from kvcore.benchmarks.compress_cases import compress
from kvcore.benchmarks.gather_cases import gather, select

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """One measured case.

    name:   what it is called; summary: one line.
    nbytes: payload bytes one call moves.
    build:  makes the arrays and returns the functions by name: "kvcore" first, "copyto" (a plain
            copy of the same bytes) and peers.
    """

    name: str
    summary: str
    nbytes: int
    build: Callable[[], Functions]


def _norm(
    tokens: int,
    heads: int,
    sizes: tuple[int, int],
    num_slots: int,
    block_size: int = 128,
    num_threads: int = 1,
    consecutive: bool = False,
) -> Functions:
    key, value = (rows(tokens, heads, size, seed) for seed, size in enumerate(sizes))
    caches = [
        warm(np.empty((num_slots // block_size, block_size, heads, size), np.uint16))
        for size in sizes
    ]
    slots = random_slots(tokens, num_slots)
    if consecutive:
        slots = np.arange(tokens, dtype=np.int64) + block_size
    typed = [array.view(ml_dtypes.bfloat16) for array in (key, value, *caches)]
    flat = [cache.reshape(num_slots, heads, -1) for cache in caches]

    def run() -> None:
        kvcore.scatter_pa_kv_cache(
            typed[0], typed[2], slots, typed[1], typed[3], num_threads=num_threads
        )

    def numpy_fancy() -> None:
        flat[0][slots] = key
        flat[1][slots] = value

    functions: Functions = {
        "kvcore": run,
        "copyto": copies(key, value),
        "numpy": numpy_fancy,
    }
    if num_threads > 1:
        functions["copyto threads"] = _threaded_copy(num_threads, key, value)
        functions["kvcore one thread"] = lambda: kvcore.scatter_pa_kv_cache(
            typed[0], typed[2], slots, typed[1], typed[3], num_threads=1
        )
    torch = torch_if_installed()
    if torch is not None:
        index = torch.from_numpy(slots)
        tensors = [torch.from_numpy(a.view(np.int16)) for a in (key, value, *flat)]

        def index_copy() -> None:
            tensors[2].index_copy_(0, index, tensors[0])
            tensors[3].index_copy_(0, index, tensors[1])

        functions["torch index_copy_"] = index_copy
    return functions


def _threaded_copy(num_threads: int, *sources: NDArray[Any]) -> Callable[[], None]:
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(num_threads)
    parts = []
    for source in sources:
        target = warm(np.empty_like(source))
        cuts = np.linspace(0, len(source), num_threads + 1).astype(int)
        parts.append([(target[a:b], source[a:b]) for a, b in itertools.pairwise(cuts)])

    def part(i: int) -> None:
        for pieces in parts:
            np.copyto(*pieces[i])

    def copyto() -> None:
        list(pool.map(part, range(num_threads)))

    return copyto


def _paged_nz(consecutive: bool) -> Functions:
    tokens, heads, size, num_slots, block_size = 16384, 8, 128, 32768, 128
    key, value = (rows(tokens, heads, size, seed) for seed in (0, 1))
    shape = (num_slots // block_size, heads * size // 16, block_size, 16)
    caches = [warm(np.empty(shape, np.uint16)) for _ in range(2)]
    slots = random_slots(tokens, num_slots)
    if consecutive:
        slots = np.arange(tokens, dtype=np.int64) + block_size

    def run() -> None:
        kvcore.scatter_pa_kv_cache(
            key, caches[0], slots, value, caches[1], cache_mode="PA_NZ", num_threads=1
        )

    sources = [array.reshape(tokens, -1, 16) for array in (key, value)]
    return {
        "kvcore": run,
        "copyto": copies(key, value),
        **_advanced(caches, slots // block_size, slots % block_size, sources),
    }


def _advanced(
    caches: list[NDArray[Any]],
    block: NDArray[np.int64],
    row: NDArray[np.int64],
    sources: list[NDArray[Any]],
) -> Functions:
    """cache[block, :, row] = source, in numpy and in torch."""

    def numpy_fancy() -> None:
        for cache, source in zip(caches, sources, strict=True):
            cache[block, :, row] = source

    functions: Functions = {"numpy": numpy_fancy}
    torch = torch_if_installed()
    if torch is not None:
        places = torch.from_numpy(block), torch.from_numpy(row)
        tensors = [torch.from_numpy(source.view(np.int16)) for source in sources]
        targets = [torch.from_numpy(cache.view(np.int16)) for cache in caches]

        def index_put() -> None:
            for target, tensor in zip(targets, tensors, strict=True):
                target[places[0], :, places[1]] = tensor

        functions["torch index_put_"] = index_put
    return functions


def _nhsd() -> Functions:
    tokens, heads, size, num_slots, block_size = 16384, 8, 128, 32768, 128
    key, value = (rows(tokens, heads, size, seed) for seed in (0, 1))
    shape = (num_slots // block_size, heads, block_size, size)
    caches = [warm(np.empty(shape, np.uint16)) for _ in range(2)]
    slots = random_slots(tokens, num_slots)

    def run() -> None:
        kvcore.scatter_pa_kv_cache(
            key, caches[0], slots, value, caches[1], scatter_mode="NHSD", num_threads=1
        )

    return {
        "kvcore": run,
        "copyto": copies(key, value),
        **_advanced(caches, slots // block_size, slots % block_size, [key, value]),
    }


def _update() -> Functions:
    batch, length, hidden, max_seq = 32, 512, 4096, 1024
    new_kv = rows(batch * length, 1, hidden, 0).reshape(-1, hidden)
    past = warm(np.empty((2, batch, max_seq, hidden), np.uint16))
    offsets = np.full(batch, 700, np.int32)
    lengths = np.full(batch, length, np.int32)

    def run() -> None:
        kvcore.kv_cache_update(new_kv, 1, past, offsets, lengths, num_threads=1)

    def numpy_slices() -> None:
        for b in range(batch):
            past[1, b, 700 - length : 700] = new_kv[b * length : (b + 1) * length]

    functions: Functions = {"kvcore": run, "copyto": copies(new_kv), "numpy": numpy_slices}
    torch = torch_if_installed()
    if torch is not None:
        target = torch.from_numpy(past.view(np.int16))[1]
        tensor = torch.from_numpy(new_kv.view(np.int16))

        def copy_slices() -> None:
            for b in range(batch):
                target[b, 700 - length : 700].copy_(tensor[b * length : (b + 1) * length])

        functions["torch copy_"] = copy_slices
    return functions


def _one_token(planned: bool) -> Functions:
    functions = _norm(1, 8, (128, 128), 65536)
    if planned:
        key, value = (np.ones((1, 8, 128), ml_dtypes.bfloat16) for _ in range(2))
        caches = [np.ones((512, 128, 8, 128), ml_dtypes.bfloat16) for _ in range(2)]
        plan = kvcore.plan_scatter_pa_kv_cache(key, caches[0], np.array([77]), value, caches[1])
        functions["kvcore"] = plan.run
    return functions


def _row_bytes() -> Functions:
    # int8 latent rows of 656 bytes: 512 + 64 * 2 + 16 bytes of scales.
    tokens, num_slots, block_size, width = 16384, 65536, 128, 656
    key = np.random.default_rng(0).integers(-128, 128, (tokens, 1, width), dtype=np.int8)
    cache = warm(np.empty((num_slots // block_size, block_size, 1, width), np.int8))
    slots = random_slots(tokens, num_slots)
    flat = cache.reshape(num_slots, 1, width)

    def run() -> None:
        kvcore.scatter_pa_kv_cache(key, cache, slots, num_threads=1)

    def numpy_fancy() -> None:
        flat[slots] = key

    functions: Functions = {"kvcore": run, "copyto": copies(key), "numpy": numpy_fancy}
    torch = torch_if_installed()
    if torch is not None:
        target, index, tensor = (torch.from_numpy(array) for array in (flat, slots, key))
        functions["torch index_copy_"] = lambda: target.index_copy_(0, index, tensor)
    return functions


_K = 1024
_LLAMA = 16384 * 8 * 128 * 2 * 2

_ALL = [
    Case(
        "norm-64k",
        "Norm, 16,384 tokens 8x128 bf16 K+V, random among 65,536 slots",
        _LLAMA,
        lambda: _norm(16384, 8, (128, 128), 65536),
    ),
    Case(
        "norm-512k",
        "the same among 524,288 slots",
        _LLAMA,
        lambda: _norm(16384, 8, (128, 128), 524288),
    ),
    Case(
        "norm-64k-2t",
        "the same among 65,536 slots, two threads",
        _LLAMA,
        lambda: _norm(16384, 8, (128, 128), 65536, num_threads=2),
    ),
    Case(
        "norm-run",
        "Norm, 16,384 tokens 8x128 bf16 K+V, consecutive slots",
        _LLAMA,
        lambda: _norm(16384, 8, (128, 128), 65536, consecutive=True),
    ),
    Case(
        "norm-mla",
        "Norm, 16,384 tokens of latent 1x512 + 1x64 bf16, random among 65,536 slots",
        16384 * (512 + 64) * 2,
        lambda: _norm(16384, 1, (512, 64), 65536),
    ),
    Case("norm-656", "Norm, 16,384 int8 rows of 656 bytes, key only", 16384 * 656, _row_bytes),
    Case(
        "nz-run",
        "PA_NZ, 16,384 tokens 8x128 bf16 K+V, consecutive slots",
        _LLAMA,
        lambda: _paged_nz(True),
    ),
    Case(
        "nz-random",
        "PA_NZ, the same, random among 32,768 slots",
        _LLAMA,
        lambda: _paged_nz(False),
    ),
    Case("nhsd-random", "NHSD, the same, random among 32,768 slots", _LLAMA, _nhsd),
    Case(
        "update",
        "KVCacheOperation, 32 batches x 512 tokens x 4,096 hidden fp16",
        32 * 512 * 4096 * 2,
        _update,
    ),
    Case(
        "alibi",
        "Alibi compression, 16 x 1,024 tokens 8x128 bf16 K+V, the last 768 of each kept",
        16 * 768 * 8 * 128 * 4,
        lambda: compress("Alibi"),
    ),
    Case(
        "rope",
        "Rope compression, 16 x 1,024 tokens 8x128 bf16 K+V, means of 256",
        _LLAMA,
        lambda: compress("Rope"),
    ),
    Case(
        "omni",
        "Omni compression, the same without the 256",
        16 * 768 * 8 * 128 * 4,
        lambda: compress("Omni"),
    ),
    Case(
        "gather-pa",
        "GatherPaKvCache, 64 requests x 256 tokens 8x128 bf16 K+V",
        _LLAMA,
        gather,
    ),
    Case(
        "select-60",
        "GatherSelectionKvCache, 16 rows of top-k 2,048, K 512 + R 64 bf16, 60% held",
        16 * 819 * 576 * 2,
        lambda: select(0.6),
    ),
    Case(
        "select-100",
        "the same, all held: nothing is copied",
        0,
        lambda: select(1.0),
    ),
    Case(
        "norm-256",
        "Norm, 256 tokens 8x128 bf16 K+V (fits the cache)",
        256 * 8 * 128 * 4,
        lambda: _norm(256, 8, (128, 128), 65536),
    ),
    Case(
        "norm-1",
        "Norm, 1 token 8x128 bf16 K+V, one-shot",
        8 * 128 * 4,
        lambda: _one_token(False),
    ),
    Case(
        "norm-1-plan",
        "Norm, 1 token 8x128 bf16 K+V, plan.run()",
        8 * 128 * 4,
        lambda: _one_token(True),
    ),
]

#: The cases by name.
CASES: dict[str, Case] = {case.name: case for case in _ALL}

if sys.maxsize < 2**32:  # pragma: no cover - the large caches need a 64-bit address space
    CASES.clear()
