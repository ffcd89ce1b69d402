# SPDX-License-Identifier: Apache-2.0
"""Arrays of two NPUs, of two Devices, of a Device and of none: one call cannot have both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_fixtures import npu
from double.direct import Double
from fake_torch import FakeTorch, Tensor

import kvcore
from kvcore.errors import ParamInvalidError
from kvcore.npu.call import launch
from kvcore.npu.call.device_arrays import DeviceArray
from kvcore.npu.cann import library

__all__ = ["npu"]

NAMES = ("key", "key_cache", "slot_mapping", "value", "value_cache")
CALLS: dict[str, Callable[..., Any]] = {
    "one-shot": kvcore.scatter_pa_kv_cache,
    "plan": kvcore.plan_scatter_pa_kv_cache,
}


@pytest.fixture
def two(npu: Double) -> Double:
    npu.runtime.kvdouble_devices(2)
    library.forget()
    return npu


@pytest.fixture
def fake(two: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    made = FakeTorch(0)
    monkeypatch.setitem(sys.modules, "torch", made.torch)
    monkeypatch.setitem(sys.modules, "torch_npu", made.torch_npu)
    monkeypatch.setattr(Tensor, "is_npu", True, raising=False)
    yield made
    library.current().aclrtSynchronizeDevice()
    made.free()
    launch.release(None, 0)


def host() -> dict[str, Any]:
    return {
        "key": np.ones((2, 2, 16), np.float16),
        "key_cache": np.zeros((2, 4, 2, 16), np.float16),
        "slot_mapping": np.array([0, 5], np.int32),
        "value": np.ones((2, 2, 16), np.float16),
        "value_cache": np.zeros((2, 4, 2, 16), np.float16),
    }


def buffers(dev: kvcore.Device) -> dict[str, Any]:
    found = {}
    for name, array in host().items():
        found[name] = dev.empty(array.shape, array.dtype.name)
        dev.default_stream.copy(found[name], array)
    dev.default_stream.synchronize_blocking()
    return found


def refused(call: Callable[[], Any], name: str, expected: str, seen: str) -> None:
    with pytest.raises(ParamInvalidError) as caught:
        call()
    error = caught.value
    assert (error.argument, error.expected, error.seen) == (name, expected, seen)
    assert str(error) == f"{name}: expected {expected}, got {seen}"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("other", ["aclnn:1", "aclnn"])
def test_buffers_of_two_devices(two: Double, call: str, other: str) -> None:
    with kvcore.Device(backend="aclnn") as a, kvcore.Device(backend=other) as b:
        ours, theirs = buffers(a), buffers(b)
        for name in NAMES:
            mixed = ours | {name: theirs[name]}
            blamed, first = ("key_cache", "key") if name == "key" else (name, "key")
            here, there = ("1", "0") if name == "key" else ("0", "1")
            expected, seen = f"memory of the Device that {first} is of", "another Device's"
            if other == "aclnn:1":
                expected = f"memory of NPU {here}, where {first} is"
                seen = f"memory of NPU {there}"
            refused(lambda m=mixed: CALLS[call](**m), blamed, expected, seen)
        assert not [c for c in two.calls() if c.startswith("aclnn")]
        CALLS["one-shot"](**ours)
        CALLS["one-shot"](**theirs)


@pytest.mark.parametrize("other", ["aclnn:1", "aclnn"])
def test_plans_on_a_stream_of_another_device(two: Double, other: str) -> None:
    with kvcore.Device(backend="aclnn") as a, kvcore.Device(backend=other) as b:
        plan = kvcore.plan_scatter_pa_kv_cache(**buffers(b))
        with pytest.raises(ParamInvalidError, match="key: expected memory of the stream's own"):
            a.stream().launch(plan)
        with pytest.raises(ParamInvalidError, match="key: expected memory of the stream's own"):  # noqa: SIM117
            with a.capture(one := a.stream()):
                one.launch(plan)
        b.stream().launch(plan)


@pytest.mark.parametrize("call", CALLS)
def test_tensors_of_two_devices(fake: FakeTorch, two: Double, call: str) -> None:
    tensors = {name: fake.tensor(array) for name, array in host().items()}
    moved = DeviceArray.of(host()["value"], device_id=1)
    tensors["value"] = Tensor(moved, tensors["value"].dtype)
    fake.made.append(tensors["value"])
    expected = "memory of NPU 0, where key is"
    refused(lambda: CALLS[call](**tensors), "value", expected, "memory of NPU 1")
    assert not [c for c in two.calls() if c.startswith("aclnn")]


def test_a_tensor_of_another_npu_than_the_stream_s(fake: FakeTorch, two: Double) -> None:
    tensors = {name: fake.tensor(array) for name, array in host().items()}
    plan = kvcore.plan_scatter_pa_kv_cache(**tensors)
    with kvcore.Device(backend="aclnn:1") as dev:
        stream = dev.stream()
        refused(lambda: stream.launch(plan), "key", "memory of NPU 1", "memory of NPU 0")
    with kvcore.Device(backend="aclnn:0") as dev:
        dev.stream().launch(plan)
    assert tensors["key_cache"].array.to_host().reshape(8, 32)[[0, 5]].all()


def test_a_tensor_beside_a_buffer_needs_a_stream(fake: FakeTorch, two: Double) -> None:
    """Torch's stream and the Device's do not wait for each other."""
    with kvcore.Device(backend="aclnn") as dev:
        mixed = buffers(dev) | {"key": fake.tensor(host()["key"])}
        expected = "memory of the same owner as key, or stream.launch of a plan"
        seen = "a Device's buffer and an array of none, which share no stream"
        plan = kvcore.plan_scatter_pa_kv_cache(**mixed)
        for call in (lambda: kvcore.scatter_pa_kv_cache(**mixed), plan.run):
            refused(call, "key_cache", expected, seen)
        assert not [c for c in two.calls() if c.startswith("aclnn")]
        stream, out = dev.stream(), dev.empty_host((2, 4, 2, 16), "float16")
        stream.launch(plan)
        stream.copy(out, mixed["key_cache"])
        stream.synchronize_blocking()
        assert out.numpy().reshape(8, 32)[[0, 5]].all()
