# SPDX-License-Identifier: Apache-2.0
"""What a launch uses lives until the device is done with it, whoever drops or frees it before."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_fixtures import npu
from double.direct import Double
from fake_torch import FakeTorch
from test_npu_two_devices import buffers, fake, host, two

import kvcore
from kvcore.errors import KVCoreError, ParamInvalidError

__all__ = ["fake", "npu", "two"]

SELECTION = {
    "selection_k_rope": np.zeros((4, 64, 64), np.float16),
    "selection_kv_cache": np.zeros((4, 64, 512), np.float16),
    "selection_kv_block_table": np.arange(4, dtype=np.int32).reshape(2, 2),
    "selection_kv_block_status": np.full((2, 1, 1, 3), -1, np.int32),
    "selection_topk_indices": np.zeros((2, 1, 1, 2), np.int32),
    "full_k_rope": np.zeros((4, 64, 64), np.float16),
    "full_kv_cache": np.ones((4, 64, 512), np.float16),
    "full_kv_block_table": np.arange(4, dtype=np.int32).reshape(2, 2),
    "full_kv_actual_seq": np.full(2, 100, np.int32),
    "full_q_actual_seq": np.ones(2, np.int32),
}


class Noticed:
    """A plan that says when it was handed over."""

    def __init__(self, plan: Any) -> None:
        self.arrays, self.reads, self.writes = plan.arrays, plan.reads, plan.writes
        self.handed_over = threading.Event()
        self._plan = plan

    def run(self) -> None:
        self._plan.run()
        self.handed_over.set()


def take_memory(dev: kvcore.Device) -> None:
    """Whoever allocates frees what has gone."""
    for _ in range(2):
        dev.empty(10).free()


def on_device(dev: kvcore.Device, arrays: dict[str, Any]) -> dict[str, Any]:
    found = {name: dev.empty(array.shape, array.dtype.name) for name, array in arrays.items()}
    for name, array in arrays.items():
        dev.default_stream.copy(found[name], array)
    dev.default_stream.synchronize_blocking()
    return found


@pytest.mark.parametrize("launched", [False, True])
def test_an_answer_that_nobody_keeps(npu: Double, launched: bool) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        placed = on_device(dev, SELECTION)
        stream = dev.default_stream
        if launched:
            plan = Noticed(kvcore.plan_gather_selection_kv_cache(**placed))
            (stream := dev.stream()).launch(plan)
            assert plan.handed_over.wait(60)
        else:
            kvcore.gather_selection_kv_cache(**placed)
        take_memory(dev)
        stream.synchronize_blocking()
        seen = dev.empty_host((4, 64, 512), "float16")
        stream.copy(seen, placed["selection_kv_cache"])
        stream.synchronize_blocking()
        assert seen.numpy()[0].all()


@pytest.mark.parametrize("away", ["dropped", "freed", "with their plan"])
def test_buffers_that_go_behind_a_direct_call(npu: Double, away: str) -> None:
    """Nobody keeps what the call was given; the memory comes back when it is done."""
    with kvcore.Device(backend="aclnn") as dev:
        placed = buffers(dev)
        cache = placed["key_cache"]
        kvcore.scatter_pa_kv_cache(**placed)  # what calls share is there from now on
        dev.default_stream.synchronize_blocking()
        take_memory(dev)
        before = npu.live("device_memory")
        if away == "with their plan":
            kvcore.plan_scatter_pa_kv_cache(**placed).run()
        else:
            kvcore.scatter_pa_kv_cache(**placed)
        count = len(placed) - 1
        for name in list(placed):
            buffer = placed.pop(name)
            if away == "freed" and buffer is not cache:
                buffer.free()
        del buffer
        take_memory(dev)
        dev.default_stream.synchronize_blocking()
        seen = dev.empty_host(cache.shape, "float16")
        dev.default_stream.copy(seen, cache)
        dev.default_stream.synchronize_blocking()
        assert seen.numpy().reshape(8, 32)[[0, 5]].all()
        take_memory(dev)
        assert npu.live("device_memory") == before - count


class Borrowed:
    """Another library's array of device memory, which knows of no owner."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    @property
    def __kvcore_device_array__(self) -> Any:
        return self._buffer.__kvcore_device_array__


class Owned(Borrowed):
    """One that says what its memory goes with."""

    def __init__(self, buffer: Any) -> None:
        super().__init__(buffer)
        self.owner = Borrowed(buffer)

    @property
    def __kvcore_owner__(self) -> object:
        return self.owner


@pytest.mark.parametrize("kind", [Borrowed, Owned])
def test_a_direct_call_holds_what_owns_the_memory(npu: Double, kind: type[Borrowed]) -> None:
    """The array itself, unless it names another object; and that only until the call is done."""
    with kvcore.Device(backend="aclnn") as dev:
        placed = buffers(dev)
        array = kind(placed["key"])
        seen, owner = weakref.ref(array), weakref.ref(getattr(array, "owner", array))
        kvcore.scatter_pa_kv_cache(**{**placed, "key": array})
        del array
        gc.collect()
        assert owner() is not None
        assert (seen() is None) == (kind is Owned)
        dev.default_stream.synchronize_blocking()
        take_memory(dev)
        gc.collect()
        assert owner() is None


@pytest.mark.parametrize("handed_over", [False, True])
def test_buffers_freed_behind_a_launch(npu: Double, handed_over: bool) -> None:
    with kvcore.Device(backend="aclnn", workers=1) as dev:
        placed = buffers(dev)
        cache = placed["key_cache"]
        seen, first = dev.empty_host(cache.shape, "float16"), threading.Event()
        stream = dev.stream()
        if not handed_over:
            stream.call(first.wait, 60)
        plan = Noticed(kvcore.plan_scatter_pa_kv_cache(**placed))
        stream.launch(plan)
        stream.copy(seen, cache)
        assert plan.handed_over.wait(60 if handed_over else 0) == handed_over
        for buffer in placed.values():
            buffer.free()
        take_memory(dev)
        first.set()
        stream.synchronize_blocking()
        assert seen.numpy().reshape(8, 32)[[0, 5]].all()
        with pytest.raises(ParamInvalidError, match="key: expected live memory"):
            stream.launch(plan)


def test_buffers_freed_behind_a_replay(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        placed, stream = buffers(dev), dev.stream()
        plan = kvcore.plan_scatter_pa_kv_cache(**placed)
        with dev.capture(stream) as graph:
            stream.launch(plan)
        graph.replay(stream)
        cache = placed["key_cache"]
        seen = dev.empty_host(cache.shape, "float16")
        stream.copy(seen, cache)
        for buffer in placed.values():
            buffer.free()
        take_memory(dev)
        stream.synchronize_blocking()
        assert seen.numpy().reshape(8, 32)[[0, 5]].all()


def test_graphs_that_have_gone_leave_no_event(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        buffer, stream, side = dev.empty(10), dev.stream(), dev.stream()
        counts = []
        for _ in range(4):
            with dev.capture(stream) as graph:
                side.wait_stream(stream)
                side.fill(buffer, 0)
                stream.wait_stream(side)
            graph.replay(stream)
            stream.synchronize_blocking()
            del graph
            gc.collect()
            counts.append(npu.live("event"))
        assert len(set(counts)) == 1
        npu.fail("aclmdlRICaptureEnd", 1, 500000)
        with pytest.raises(KVCoreError), dev.capture(stream):
            stream.fill(buffer, 0)
        assert npu.live("event") < counts[0]


def test_a_workspace_on_a_stream_that_torch_does_not_know(fake: FakeTorch, two: Double) -> None:
    """Torch would give it to whoever is next on its own stream."""
    plan = kvcore.plan_scatter_pa_kv_cache(**{n: fake.tensor(a) for n, a in host().items()})
    made = len(fake.made)
    with kvcore.Device(backend="aclnn") as dev:
        stream = dev.stream()
        stream.launch(plan)
        stream.synchronize_blocking()
    assert len(fake.made) == made
    plan.run()
    assert len(fake.made) == made + 1


CALLS: dict[str, Callable[[kvcore.Device, dict[str, Any]], object]] = {
    "operator": lambda other, placed: kvcore.scatter_pa_kv_cache(**placed),
    "device": lambda other, placed: kvcore.Device(backend="aclnn").__enter__(),
    "allocate": lambda other, placed: other.empty(4),
    "stream": lambda other, placed: other.stream(),
    "wait": lambda other, placed: other.default_stream.synchronize_blocking(),
}


@pytest.mark.parametrize("call", CALLS)
def test_host_functions_must_not_use_any_npu(npu: Double, call: str) -> None:
    """The driver's thread would wait for itself."""
    seen: list[BaseException] = []
    with kvcore.Device(backend="aclnn") as dev, kvcore.Device(backend="aclnn") as other:
        placed = buffers(dev)
        kvcore.scatter_pa_kv_cache(**placed)

        def function() -> None:
            try:
                CALLS[call](other, placed)
            except BaseException as error:  # whatever it is
                seen.append(error)

        (stream := dev.stream()).call(function)
        stream.synchronize_blocking()
    assert len(seen) == 1
    assert isinstance(seen[0], KVCoreError)
    assert "a host function that does nothing on an NPU" in str(seen[0])


def test_an_array_of_a_left_device_that_goes_in_a_host_function(npu: Double) -> None:
    """It is freed by whoever comes by next."""
    with kvcore.Device(backend="aclnn") as left:
        box = [left.empty_host(100).numpy()]
    with kvcore.Device(backend="aclnn") as dev:
        stream = dev.stream()
        assert npu.live("host_memory") == 1
        stream.call(box.clear)
        stream.synchronize_blocking()
        dev.empty(4)
        assert npu.live("host_memory") == 0
