# SPDX-License-Identifier: Apache-2.0
"""Writing tokens through torch, against the pair of index_copy_ that it replaces.

K and V, 8 heads of 128 in bfloat16, slots at random; one thread each.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvcore

torch = pytest.importorskip("torch", reason="torch is not installed")
import kvcore.torch  # noqa: E402

HEADS, SIZE, BLOCK_SIZE = 8, 128, 128
FUNCTIONS = ["index_copy_", "torch.ops.kvcore", "installed"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = kvcore.get_num_threads()
    kvcore.set_num_threads(1)
    yield
    kvcore.set_num_threads(before)


@pytest.fixture(scope="module")
def torch_npu() -> Iterator[Any]:
    with kvcore.torch.install(types.ModuleType("torch_npu")) as handle:
        yield handle.ns


@pytest.fixture(scope="module", params=[1, 256, 16_384])
def tensors(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    """key, value, key_cache, value_cache, slots."""
    count = request.param
    num_slots = max(4 * count, 64 * BLOCK_SIZE)
    key, value = torch.randn(2, count, HEADS, SIZE).bfloat16()
    caches = torch.ones(2, num_slots // BLOCK_SIZE, BLOCK_SIZE, HEADS, SIZE, dtype=torch.bfloat16)
    return key, value, *caches, torch.randperm(num_slots)[:count]


def made(function: str, tensors: tuple[Any, ...], torch_npu: Any) -> Callable[[], None]:
    """One call of that function, ready to be repeated."""
    key, value, key_cache, value_cache, slots = tensors
    if function == "torch.ops.kvcore":
        scatter = torch.ops.kvcore.scatter_pa_kv_cache
        return lambda: scatter(key, key_cache, slots, value, value_cache)
    if function == "installed":
        store = torch_npu._npu_reshape_and_cache
        return lambda: store(key, value, key_cache, value_cache, slots)
    flat = key_cache.view(-1, HEADS, SIZE), value_cache.view(-1, HEADS, SIZE)

    def pair() -> None:
        flat[0].index_copy_(0, slots, key)
        flat[1].index_copy_(0, slots, value)

    return pair


@pytest.mark.parametrize("function", FUNCTIONS)
def test_scatter(benchmark: Any, tensors: tuple[Any, ...], torch_npu: Any, function: str) -> None:
    count = len(tensors[4])
    benchmark.group = f"{count} tokens"
    benchmark.extra_info["bytes"] = 2 * tensors[0].nbytes
    run = made(function, tensors, torch_npu)
    iterations = {1: 500, 256: 50}.get(count, 1)
    benchmark.pedantic(run, rounds=30, iterations=iterations, warmup_rounds=2)
