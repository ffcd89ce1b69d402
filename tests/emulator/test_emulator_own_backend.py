# SPDX-License-Identifier: Apache-2.0
"""kvcore's own aclnn backend on the tensors of the real torch_npu: calls, plans, graphs, faults."""

from __future__ import annotations

import importlib
import threading
from types import ModuleType
from typing import Any

import anyio
import pytest

import kvcore
from kvcore.emulator import running
from kvcore.errors import KVCoreError

SOC = "A3"


class Case:
    """One scatter of two tokens into two caches of four blocks of 16 rows."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        generator = torch.Generator().manual_seed(5)
        self.key, self.value = (
            torch.randn(2, 2, 32, generator=generator).half().npu() for _ in range(2)
        )
        self.caches = [torch.zeros(4, 16, 2, 32, dtype=torch.float16).npu() for _ in range(2)]
        self.slots = torch.zeros(2, dtype=torch.int32).npu()

    def at(self, *slots: int) -> None:
        """Empty caches, and other slots."""
        for cache in self.caches:
            cache.zero_()
        self.slots.copy_(self.torch.tensor(slots, dtype=self.torch.int32))

    def arguments(self) -> tuple[Any, ...]:
        return self.key, self.caches[0], self.slots, self.value, self.caches[1]

    def plan(self) -> Any:
        return kvcore.plan_scatter_pa_kv_cache(*self.arguments())

    def check(self, *slots: int) -> None:
        """The tokens are at these slots and everything else is zero."""
        for source, cache in zip((self.key, self.value), self.caches, strict=True):
            expected = self.torch.zeros(64, 2, 32, dtype=self.torch.float16)
            expected[list(slots)] = source.cpu()
            assert self.torch.equal(cache.cpu().view(64, 2, 32), expected)


@pytest.fixture
def case(npu: ModuleType, torch: Any) -> Case:
    machine = running()
    assert machine is not None
    assert machine.soc == SOC
    return Case(torch)


@pytest.mark.parametrize("way", ["call", "plan", "torch.ops"])
def test_a_direct_call(case: Case, torch: Any, way: str) -> None:
    case.at(3, 40)
    if way == "call":
        kvcore.scatter_pa_kv_cache(*case.arguments())
    elif way == "plan":
        plan = case.plan()
        plan.run()
        case.check(3, 40)
        case.at(0, 63)
        plan.run()
        case.check(0, 63)
        return
    else:
        importlib.import_module("kvcore.torch")

        torch.ops.kvcore.scatter_pa_kv_cache(*case.arguments())
    case.check(3, 40)


@pytest.mark.parametrize("way", ["call", "plan"])
def test_inside_a_graph_of_torch(case: Case, torch: Any, way: str) -> None:
    """Captured, not run; each replay reads the slots as they are then."""
    case.at(3, 40)
    plan = case.plan()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        if way == "call":
            kvcore.scatter_pa_kv_cache(*case.arguments())
        else:
            plan.run()
    assert not any(cache.cpu().any() for cache in case.caches)
    for slots in ((7, 9), (63, 0)):
        case.at(*slots)
        graph.replay()
        case.check(*slots)


def test_a_side_stream(case: Case, torch: Any) -> None:
    """The work goes to torch's current stream, behind what is there."""
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        case.at(5, 6)
        case.plan().run()
        doubled = [cache * 2 for cache in case.caches]
    torch.npu.current_stream().wait_stream(side)
    case.check(5, 6)
    for cache, result in zip(case.caches, doubled, strict=True):
        assert torch.equal(result.cpu(), cache.cpu() * 2)


def test_a_thread_without_a_device(case: Case) -> None:
    case.at(8, 1)
    case.torch.npu.synchronize()
    thread = threading.Thread(target=lambda: case.plan().run())
    thread.start()
    thread.join()
    case.torch.npu.synchronize()
    case.check(8, 1)


def test_a_bad_slot_fails_the_stream_and_the_next_call_works(case: Case, torch: Any) -> None:
    case.at(3, 64)
    with pytest.raises((RuntimeError, KVCoreError), match="507035"):  # noqa: PT012
        kvcore.scatter_pa_kv_cache(*case.arguments())
        torch.npu.synchronize()
    case.at(3, 4)
    kvcore.scatter_pa_kv_cache(*case.arguments())
    case.check(3, 4)


def test_what_the_device_refuses(case: Case, torch: Any) -> None:
    """Wrong heads: an error in kvcore's words, and nothing is written."""
    case.at(3, 4)
    key = torch.zeros(2, 3, 32, dtype=torch.float16).npu()
    with pytest.raises(KVCoreError, match="key"):
        kvcore.scatter_pa_kv_cache(key, *case.arguments()[1:])
    assert not any(cache.cpu().any() for cache in case.caches)


async def test_plans_on_a_device_of_kvcore(case: Case, torch: Any) -> None:
    """Launched, and captured by kvcore's own capture with slots changed before each replay."""
    case.at(3, 40)
    plan = case.plan()
    torch.npu.synchronize()
    async with kvcore.Device(SOC, backend="aclnn") as device:
        stream = device.stream("work")
        stream.launch(plan)
        await stream.synchronize()
        case.check(3, 40)
        with device.capture(stream) as graph:
            stream.launch(plan)
        for slots in ((7, 9), (63, 0)):
            case.at(*slots)
            torch.npu.synchronize()
            graph.replay(stream)
            await stream.synchronize()
            case.check(*slots)


async def test_a_captured_plan_keeps_its_tensors(case: Case, torch: Any) -> None:
    """What the caller let go of is not handed out again while a graph still writes it."""
    case.at(3, 40)
    torch.npu.synchronize()
    caches = case.caches
    async with kvcore.Device(SOC, backend="aclnn") as device:
        stream = device.stream("work")
        with device.capture(stream) as graph:
            stream.launch(case.plan())
        case.caches = []
        del caches
        others = [torch.zeros(4, 16, 2, 32, dtype=torch.float16).npu() for _ in range(4)]
        torch.npu.synchronize()
        graph.replay(stream)
        await stream.synchronize()
        assert not any(other.cpu().any() for other in others)


async def test_a_bad_slot_in_a_replay(case: Case, torch: Any) -> None:
    case.at(3, 40)
    torch.npu.synchronize()
    async with kvcore.Device(SOC, backend="aclnn") as device:
        stream = device.stream("work")
        with device.capture(stream) as graph:
            stream.launch(case.plan())
        case.at(3, 64)
        torch.npu.synchronize()
        graph.replay(stream)
        with pytest.raises(KVCoreError, match="507035"):
            await stream.synchronize()
        case.at(3, 4)
        torch.npu.synchronize()
        graph.replay(stream)
        with anyio.fail_after(60):
            await stream.synchronize()
        case.check(3, 4)


async def test_memory_of_the_host_is_not_captured(case: Case, torch: Any) -> None:
    """Pageable memory, which the device cannot capture; a tensor of the device is no such thing."""
    async with kvcore.Device(SOC, backend="aclnn") as device:
        stream = device.stream("work")
        buffer = device.empty((4,), "float32")
        with (
            pytest.raises(kvcore.CaptureError, match="pageable"),
            device.capture(stream),
        ):
            stream.copy(buffer, torch.zeros(4).numpy())
