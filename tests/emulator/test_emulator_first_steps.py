# SPDX-License-Identifier: Apache-2.0
"""The real torch_npu on the machine: tensors, KV operators, streams, events, graphs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from wheel import needs_wheel


def test_tensors_there_and_back(npu: Any, torch: Any) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64):
        host = torch.arange(77).to(dtype)
        there = host.npu()
        assert there.device == torch.device("npu:0")
        assert torch.equal(there.cpu(), host)


def test_pinned_memory_and_copies_that_do_not_wait(npu: Any, torch: Any) -> None:
    host = torch.arange(4096, dtype=torch.int32).pin_memory()
    assert host.is_pinned()
    there = host.to("npu", non_blocking=True)
    back = torch.zeros_like(host).pin_memory()
    back.copy_(there, non_blocking=True)
    torch.npu.current_stream().synchronize()
    assert torch.equal(back, host)


def caches(torch: Any, blocks: int = 4) -> tuple[Any, Any]:
    return tuple(
        torch.randn(blocks, 16, 2, 16, generator=torch.Generator().manual_seed(i)).half()
        for i in (1, 2)
    )


def test_scatter(npu: Any, torch: Any) -> None:
    key, value = (torch.randn(3, 2, 16).half() for _ in range(2))
    keys, values = caches(torch)
    slots = torch.tensor([5, 20, 63], dtype=torch.int32)
    there = [x.npu() for x in (key, value, keys, values, slots)]
    npu.npu_scatter_pa_kv_cache(*there, cache_mode="Norm")
    for source, cache, result in ((key, keys, there[2]), (value, values, there[3])):
        expected = cache.clone().view(64, 2, 16)
        expected[slots.long()] = source
        assert torch.equal(result.cpu().view(64, 2, 16), expected)


def test_gather(npu: Any, torch: Any) -> None:
    keys, values = caches(torch)
    tables = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    outs = [torch.zeros(27, 2, 16, dtype=torch.float16).npu() for _ in range(2)]
    npu.npu_gather_pa_kv_cache(keys.npu(), values.npu(), tables.npu(), lengths.npu(), *outs)
    for cache, out in zip((keys, values), outs, strict=True):
        expected = torch.cat([cache[3], cache[1][:4], cache[0][:7]])
        assert torch.equal(out.cpu(), expected)


def test_streams_and_events(npu: Any, torch: Any) -> None:
    side = torch.npu.Stream()
    host = torch.full((1 << 16,), 7, dtype=torch.int32).pin_memory()
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with torch.npu.stream(side):
        begin.record()
        there = host.to("npu", non_blocking=True)
        end.record()
    torch.npu.current_stream().wait_event(end)
    back = torch.empty_like(host).pin_memory()
    back.copy_(there, non_blocking=True)
    torch.npu.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) >= 0
    assert torch.equal(back, host)
    there.record_stream(torch.npu.current_stream())


def test_a_graph_reads_its_slots_at_the_replay(npu: Any, torch: Any) -> None:
    key, value = (torch.randn(2, 2, 16).half() for _ in range(2))
    keys, values = caches(torch)
    slots = torch.tensor([1, 2], dtype=torch.int32)
    there = [x.npu() for x in (key, value, keys, values, slots)]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        npu.npu_scatter_pa_kv_cache(*there, cache_mode="Norm")
    assert torch.equal(there[2].cpu(), keys)
    expected = keys.clone().view(64, 2, 16)
    for pair in ([40, 7], [0, 63]):
        there[4].copy_(torch.tensor(pair, dtype=torch.int32))
        graph.replay()
        torch.npu.synchronize()
        expected[pair] = key
        assert torch.equal(there[2].cpu().view(64, 2, 16), expected)


def test_memory_is_counted_and_ends(npu: Any, torch: Any) -> None:
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    assert total == 1 << 30
    held = torch.empty(64 << 20, dtype=torch.int8, device="npu")
    assert free - torch.npu.mem_get_info()[0] >= 64 << 20
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 << 30, dtype=torch.int8, device="npu")
    del held
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == free


def test_a_thread_without_a_device(npu: Any, torch: Any) -> None:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(3).npu().cpu().tolist()))
    thread.start()
    thread.join()
    assert seen == [[1.0, 1.0, 1.0]]


@needs_wheel
@pytest.mark.timeout(180)
def test_swapped_memory_may_be_the_first_that_is_asked_for(program: Any) -> None:
    """Before anything has initialised the runtime in this process."""
    done = program(
        "import kvcore.emulator\n"
        "kvcore.emulator.start(memory=1 << 28)\n"
        "import torch, torch_npu\n"
        "x = torch_npu.empty_with_swapped_memory([8], dtype=torch.float32, device='npu:0')\n"
        "x.fill_(2.0)\n"
        "assert (x + 1).cpu().tolist() == [3.0] * 8\n"
        "assert kvcore.emulator.reports() == [], kvcore.emulator.reports()\n"
    )
    assert done.returncode == 0, done.stderr
