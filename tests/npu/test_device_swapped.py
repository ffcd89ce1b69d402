# SPDX-License-Identifier: Apache-2.0
"""Swapped memory in operators: kernels have the device's address, copies the host's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_fixtures import npu
from double.direct import Double

import kvcore
from kvcore.errors import SlotRangeError
from kvcore.npu import options

__all__ = ["npu"]


def swapped(dev: kvcore.Device, array: np.ndarray[Any, Any]) -> Any:
    buffer = dev.empty_swapped(array.shape, array.dtype.name)
    buffer.numpy()[...] = array
    return buffer


def values(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).integers(-99, 99, shape).astype(np.float16)


@pytest.mark.parametrize("rows_alone", [False, True])
def test_strided_keys_and_values_and_slots(npu: Double, rows_alone: bool) -> None:
    npu.runtime.kvdouble_quirk(b"no_2d_on_device", rows_alone)
    fused, slots = values(5, 3, 2, 16), np.array([7, 9, 0, 9, -1, 9, 11, 9, 2, 9], np.int32)
    caches = [np.zeros((3, 4, 2, 16), np.float16) for _ in range(2)]
    kvcore.scatter_pa_kv_cache(fused[:, 1], caches[0], slots[::2].copy(), fused[:, 2], caches[1])
    with kvcore.Device(backend="aclnn") as dev:
        there, index = swapped(dev, fused), swapped(dev, slots)
        placed = [swapped(dev, np.zeros_like(cache)) for cache in caches]
        given = (there[:, 1], placed[0], index[::2], there[:, 2], placed[1])
        for check in ("host", "device"):
            with options.use_options(check=check):
                kvcore.scatter_pa_kv_cache(*given)
        dev.default_stream.synchronize_blocking()
        for cache, want in zip(placed, caches, strict=True):
            np.testing.assert_array_equal(cache.numpy(), want)
        index.numpy()[2] = 12
        with options.use_options(check="device"), pytest.raises(SlotRangeError):
            kvcore.scatter_pa_kv_cache(*given)
    npu.runtime.kvdouble_quirk(b"no_2d_on_device", False)


def test_lengths_that_the_host_needs(npu: Double) -> None:
    new, past = values(3, 32), np.zeros((2, 2, 16, 32), np.float16)
    index = [np.array(one, np.int32) for one in ([1], [5, 9], [2, 1])]
    with kvcore.Device(backend="aclnn") as dev:
        there, rows = swapped(dev, past), swapped(dev, new)
        layer, offsets, lengths = (swapped(dev, one) for one in index)
        kvcore.kv_cache_update(rows, layer, there, offsets, lengths)
        dev.default_stream.synchronize_blocking()
        kvcore.kv_cache_update(new, index[0], past, *index[1:])
        np.testing.assert_array_equal(there.numpy(), past)
