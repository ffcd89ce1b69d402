# SPDX-License-Identifier: Apache-2.0
"""torch_npu's tensors by their pointers, with modules that stand for torch and torch_npu."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from double.direct import Double
from fake_torch import FakeTorch, Tensor
from npu_fixtures import a3 as a3

import kvcore
from kvcore.errors import BackendUnavailableError, SlotRangeError
from kvcore.npu.call.device_arrays import DeviceArray
from kvcore.npu.cann import library


@pytest.fixture
def fake(a3: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    made = FakeTorch(a3.stream())
    monkeypatch.setitem(sys.modules, "torch", made.torch)
    monkeypatch.setitem(sys.modules, "torch_npu", made.torch_npu)
    library.forget()
    yield made
    stream = made.torch_npu.npu.current_stream(0).npu_stream
    cann = library.current()
    cann.aclrtSynchronizeStream(stream)
    made.free()
    # Nobody has ended what torch_npu has begun.
    assert a3.num_calls("aclFinalize") == a3.num_calls("aclrtResetDevice") == 0
    cann.aclrtDestroyStream(stream)


def norm() -> dict[str, Any]:
    values = np.random.default_rng(1).integers(-9, 9, (4, 6, 16)).astype(np.float16)
    return {
        "key": values[:, :2].copy(),
        "value": values[:, 2:4].copy(),
        "key_cache": np.zeros((2, 4, 2, 16), np.float16),
        "value_cache": np.zeros((2, 4, 2, 16), np.float16),
        "slot_mapping": np.array([1, 6, -1, 3], np.int32),
    }


def test_tensors_go_to_the_npu_on_torch_s_current_stream(fake: FakeTorch, a3: Double) -> None:
    arrays = norm()
    tensors = {name: fake.tensor(array) for name, array in arrays.items()}
    kvcore.scatter_pa_kv_cache(**tensors)
    stream = fake.torch_npu.npu.current_stream(0).npu_stream
    assert next(c for c in a3.calls() if c.startswith("aclnnScatterPaKvCache(")).endswith(
        f"{stream:#x})"
    )
    kvcore.scatter_pa_kv_cache(**arrays)
    for name in ("key_cache", "value_cache"):
        np.testing.assert_array_equal(tensors[name].array.to_host(), arrays[name])
    # The workspace came from torch, with what its own operators add.
    assert [made.dtype.name for made in fake.made[5:]] == ["uint8"]


def test_a_slice_of_a_fused_tensor(fake: FakeTorch) -> None:
    arrays = norm()
    tensors = {name: fake.tensor(array) for name, array in arrays.items()}
    fused = fake.tensor(np.concatenate([arrays["key"], arrays["value"]], axis=1))
    for name, at in (("key", 0), ("value", 2 * 16 * 2)):
        view = DeviceArray(fused.array.memory, (4, 2, 16), "float16", (4 * 32, 32, 2), at)
        tensors[name] = Tensor(view, fused.dtype)
    kvcore.scatter_pa_kv_cache(**tensors)
    kvcore.scatter_pa_kv_cache(**arrays)
    for name in ("key_cache", "value_cache"):
        np.testing.assert_array_equal(tensors[name].array.to_host(), arrays[name])


def test_slots_on_the_host(fake: FakeTorch) -> None:
    arrays = norm()
    tensors = {k: fake.tensor(array) for k, array in arrays.items() if k != "slot_mapping"}
    slots = arrays["slot_mapping"]
    kvcore.scatter_pa_kv_cache(**tensors, slot_mapping=slots, backend="aclnn")
    kvcore.scatter_pa_kv_cache(**arrays)
    np.testing.assert_array_equal(tensors["key_cache"].array.to_host(), arrays["key_cache"])
    with pytest.raises(SlotRangeError):
        kvcore.scatter_pa_kv_cache(
            **tensors, slot_mapping=np.array([1, 2, 3, 8], np.int32), backend="aclnn"
        )


def test_the_lengths_of_a_selection_are_a_tensor(fake: FakeTorch) -> None:
    arrays = {
        "selection_k_rope": np.zeros((4, 8, 16), np.float16),
        "selection_kv_cache": np.zeros((4, 8, 32), np.float16),
        "selection_kv_block_table": np.arange(4, dtype=np.int32).reshape(4, 1),
        "selection_kv_block_status": np.full((2, 1, 1, 3), -1, np.int32),
        "selection_topk_indices": np.array([3, 1, 0, 2], np.int32).reshape(2, 1, 1, 2),
        "full_k_rope": np.ones((4, 8, 16), np.float16),
        "full_kv_cache": np.ones((4, 8, 32), np.float16),
        "full_kv_block_table": np.arange(4, dtype=np.int32).reshape(2, 2),
        "full_kv_actual_seq": np.array([16, 10], np.int32),
        "full_q_actual_seq": np.ones(2, np.int32),
    }
    tensors = {name: fake.tensor(array) for name, array in arrays.items()}
    answer = kvcore.gather_selection_kv_cache(**tensors, selection_topk_block_size=4)
    want = kvcore.gather_selection_kv_cache(**arrays, selection_topk_block_size=4)
    assert isinstance(answer, Tensor)
    np.testing.assert_array_equal(answer.array.to_host(), want)  # 0 past the rows of the call


def test_tensors_without_torch_npu(fake: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: fake.tensor(array) for name, array in norm().items()}
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch_npu")
        with pytest.raises(BackendUnavailableError, match="import torch_npu first"):
            kvcore.scatter_pa_kv_cache(**tensors)
