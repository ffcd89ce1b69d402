# SPDX-License-Identifier: Apache-2.0
"""Offsets past 2**31 elements and bytes, in sparse memory: only written pages exist."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import kvcore

GIB = 2**30


def sparse(nbytes: int) -> np.ndarray:
    """Zeroed bytes that take no memory until they are written."""
    if sys.maxsize < 2**40:
        pytest.skip("needs 64-bit addresses")
    try:
        # Linux counts address space against memory unless it is told not to.
        no_reserve = 0x4000 if sys.platform == "linux" else 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    except OSError as error:
        pytest.skip(f"no {nbytes >> 30} GiB of address space here: {error}")


def tokens(count: int, *shape: int, dtype: Any = np.uint16) -> np.ndarray:
    return (
        (np.arange(1, count * int(np.prod(shape)) + 1) % 60_000)
        .astype(dtype)
        .reshape(count, *shape)
    )


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_more_than_two_to_the_31_elements(itemsize: int, num_threads: int) -> None:
    kind = np.dtype(f"u{itemsize}")
    blocks, block_size, heads, size = 2**17, 128, 1, 256  # 2**32 elements
    cache = sparse(blocks * block_size * heads * size * itemsize).view(kind)
    cache = cache.reshape(blocks, block_size, heads, size)
    last = blocks * block_size - 1
    edges = [
        2**31 // size,
        2**31 // size - 1,
        2**31 // (size * itemsize),
        last,
        last - 1,
        0,
        2**23 + 7,
    ]
    edges = sorted(set(edges), reverse=True)
    slots = np.array(edges)
    key = tokens(len(slots), heads, size, dtype=kind)
    plan = kvcore.plan_scatter_pa_kv_cache(key, cache, slots, num_threads=num_threads)
    plan.run()
    rows = cache.reshape(-1, heads, size)
    for i, slot in enumerate(edges):
        np.testing.assert_array_equal(rows[slot], key[i])
        for near in (slot - 1, slot + 1):
            if near not in edges and 0 <= near <= last:
                assert not rows[near].any()
    ends = plan.touched()[1][0].ranges - cache.ctypes.data
    assert ends[-1, 1] == cache.nbytes
    assert ends.sum(axis=0)[1] - ends.sum(axis=0)[0] == key.nbytes


@pytest.mark.parametrize("mode", ["norm", "nhsd", "nz"])
def test_only_the_stride_product_is_large(mode: str) -> None:
    # A small cache whose rows lie far apart: few elements, 48 GiB from end to end.
    blocks, block_size, heads, size = 4, 4, 2, 16
    memory = sparse(48 * GIB).view(np.uint16)
    far = 3 * GIB  # bytes between rows; block strides are 4 times that
    if mode == "norm":
        cache = as_strided(memory, (blocks, block_size, heads, size), (4 * far, far, 2 * 2**20, 2))
        options: dict[str, Any] = {}
    elif mode == "nhsd":
        cache = as_strided(
            memory, (blocks, heads, block_size, size), (4 * far, 2 * far, far // 2, 2)
        )
        options = {"scatter_mode": "NHSD"}
    else:
        cache = as_strided(memory, (blocks, heads, block_size, 16), (4 * far, 2 * far, far // 2, 2))
        options = {"cache_mode": "PA_NZ"}
    slots = np.array([15, 0, 7, 10])
    key = tokens(4, heads, size)
    for num_threads in (1, 2):
        kvcore.scatter_pa_kv_cache(key, cache, slots, num_threads=num_threads, **options)
        for i, slot in enumerate(slots.tolist()):
            block, row = divmod(slot, block_size)
            written = cache[block, row] if mode == "norm" else cache[block, :, row]
            np.testing.assert_array_equal(written, key[i])
        cache[...] = 0


def test_tokens_far_apart() -> None:
    memory = sparse(24 * GIB).view(np.uint16)
    key = as_strided(memory, (8, 2, 16), (3 * GIB, GIB, 2))
    key[...] = tokens(8, 2, 16)
    cache = np.zeros((2, 4, 2, 16), np.uint16)
    kvcore.scatter_pa_kv_cache(key, cache, np.arange(8))
    np.testing.assert_array_equal(cache.reshape(8, 2, 16), key)
    kvcore.scatter_pa_kv_cache(key[::-1], cache, np.arange(8))
    np.testing.assert_array_equal(cache.reshape(8, 2, 16), key[::-1])


def test_fused_tokens_far_apart() -> None:
    # Nct: i * stride passes 2**31 elements, and 2**32 bytes.
    memory = sparse(12 * GIB).view(np.uint16)
    stride, offset = 2**31 + 5, 2**31 - 3
    want = tokens(2, 2, 16)
    for i in range(2):
        memory[i * stride + offset : i * stride + offset + 32] = want[i].reshape(-1)
    cache = np.zeros((1, 4, 2, 16), np.uint16)
    kvcore.scatter_pa_kv_cache(
        memory,
        cache,
        np.array([3, 1]),
        scatter_mode="Nct",
        strides=(stride, 1),
        offsets=(offset, 0),
    )
    np.testing.assert_array_equal(cache[0, [3, 1]], want)


def test_slots_far_apart() -> None:
    memory = sparse(10 * GIB).view(np.int32)
    slots = as_strided(memory, (3,), (4 * GIB,))
    slots[...] = [5, 0, 3]
    cache = np.zeros((2, 4, 1, 16), np.uint16)
    kvcore.scatter_pa_kv_cache(tokens(3, 1, 16), cache, slots)
    np.testing.assert_array_equal(cache.reshape(8, 1, 16)[[5, 0, 3]], tokens(3, 1, 16))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_contiguous_cache(num_threads: int) -> None:
    layers, batch, max_seq, hidden = 4, 8, 2**17, 1024  # 2**32 elements, 8 GiB
    past = sparse(layers * batch * max_seq * hidden * 2).view(np.uint16)
    past = past.reshape(layers, batch, max_seq, hidden)
    lengths = np.array([1, 0, 2, 0, 0, 0, 0, 3])
    offsets = np.array([max_seq, 0, max_seq // 2, 0, 0, 0, 0, max_seq])
    new = tokens(6, hidden)
    kvcore.kv_cache_update(new, layers - 1, past, offsets, lengths, num_threads=num_threads)
    done = 0
    for b, (n, end) in enumerate(zip(lengths.tolist(), offsets.tolist(), strict=True)):
        np.testing.assert_array_equal(past[layers - 1, b, end - n : end], new[done : done + n])
        done += n
    assert not past[layers - 2, :, -1].any()
    assert not past[layers - 1, 1, -1].any()


def test_a_file_of_more_than_two_to_the_32_bytes(tmp_path: Any) -> None:
    try:
        cache = np.memmap(tmp_path / "cache", np.uint8, "w+", shape=(2**16, 128, 2, 512))  # 8 GiB
    except OSError as error:
        pytest.skip(f"no sparse file of 8 GiB here: {error}")
    slots = np.array([2**23 - 1, 2**22, 0])
    key = tokens(3, 2, 512, dtype=np.uint8)
    kvcore.scatter_pa_kv_cache(key, cache, slots)
    rows = cache.reshape(-1, 2, 512)
    np.testing.assert_array_equal(rows[slots], key)
    assert not rows[2**22 - 1].any()


def test_a_slot_that_is_legal_only_in_64_bits() -> None:
    # 2**32 rows of one byte: a slot cut to 32 bits would be another legal one.
    cache = sparse(2**32 + 2**20).reshape(-1, 2**10, 1, 1)
    slots = np.array([2**32 + 5, 2**31 + 3, 2**31 - 1])
    kvcore.scatter_pa_kv_cache(np.full((3, 1, 1), 7, np.uint8), cache, slots)
    flat = cache.reshape(-1)
    assert (flat[slots] == 7).all()
    assert not flat[[5, 2**31 + 2, 2**31]].any()
    past_end = cache.size
    with pytest.raises(kvcore.SlotRangeError, match=rf"slot < {past_end} .* got {past_end}$"):
        kvcore.scatter_pa_kv_cache(np.zeros((1, 1, 1), np.uint8), cache, np.array([past_end]))


def test_an_overlap_far_away() -> None:
    memory = sparse(16 * GIB).view(np.uint16)
    cache = as_strided(memory, (2, 2, 1, 16), (8 * GIB, 4 * GIB, 32, 2))
    inside = memory[2 * GIB : 2 * GIB + 16].reshape(1, 1, 16)  # 4 GiB in: a row of the cache
    beside = memory[2 * GIB + 16 : 2 * GIB + 32].reshape(1, 1, 16)
    with pytest.raises(kvcore.ParamInvalidError, match=r"key_cache: .* shared with key"):
        kvcore.scatter_pa_kv_cache(inside, cache, np.array([3]))
    beside[...] = 5
    kvcore.scatter_pa_kv_cache(beside, cache, np.array([3]))
    assert (cache[1, 1] == 5).all()
    assert not inside.any()
