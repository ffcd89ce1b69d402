# SPDX-License-Identifier: Apache-2.0
"""Graphs of the real torch_npu beyond capture and replay: updated tasks, callbacks that launch."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


class Grouped:
    """A graph whose last part is a task group: ``call`` on the given arguments."""

    def __init__(self, torch: Any, call: Callable[..., Any], *arguments: Any) -> None:
        self.torch = torch
        self.call = call
        self.side = torch.npu.Stream()
        torch.npu.synchronize()
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph):
            stream = torch.npu.current_stream()
            torch.npu.graph_task_group_begin(stream)
            call(*arguments)
            self.handle = torch.npu.graph_task_group_end(stream)

    def update(self, *arguments: Any, call: Callable[..., Any] | None = None) -> None:
        npu = self.torch.npu
        self.side.wait_stream(npu.current_stream())
        with npu.stream(self.side):
            npu.graph_task_update_begin(self.side, self.handle)
            try:
                (call or self.call)(*arguments)
            finally:
                npu.graph_task_update_end(self.side)
        npu.current_stream().wait_stream(self.side)


def test_an_operator_of_torch_is_updated(npu: ModuleType, torch: Any) -> None:
    """Other tensors and another number take the place of the captured ones."""
    x, y = (torch.full((4,), float(n)).npu() for n in (1, 10))
    out = torch.zeros(4).npu()
    graphed = Grouped(torch, lambda a, n: torch.add(a, a, alpha=n, out=out), x, 1)
    for source, number, expected in ((x, 1, 2.0), (y, 1, 20.0), (y, 4, 50.0), (x, 2, 3.0)):
        graphed.update(source, number)
        assert out.cpu().tolist() != [expected] * 4
        graphed.graph.replay()
        assert out.cpu().tolist() == [expected] * 4


def test_an_operator_of_the_vendor_s_library_is_updated(npu: ModuleType, torch: Any) -> None:
    caches = [torch.zeros(2, 16, 1, 32, dtype=torch.float16).npu() for _ in range(2)]
    key = torch.ones(2, 1, 32, dtype=torch.float16).npu()
    slots = [torch.tensor(s, dtype=torch.int32).npu() for s in ([0, 1], [30, 31])]

    def scatter(to: Any) -> None:
        npu.npu_scatter_pa_kv_cache(key, key, *caches, to, cache_mode="Norm")

    graphed = Grouped(torch, scatter, slots[0])
    graphed.update(slots[1])
    graphed.graph.replay()
    rows = caches[0].cpu().view(32, 32)
    assert [n for n in range(32) if rows[n].any()] == [30, 31]


def test_a_replay_before_the_update_keeps_what_it_had(npu: ModuleType, torch: Any) -> None:
    """The exchange is in stream order, and not at the call."""
    x = torch.zeros(4).npu()
    graphed = Grouped(torch, lambda n: x.add_(n), 1)
    for _ in range(20):
        x.mul_(1)  # keeps the stream busy
    graphed.graph.replay()
    graphed.update(100)
    graphed.graph.replay()
    assert x.cpu().tolist() == [101.0] * 4


def test_a_replay_that_waits_for_its_update(npu: ModuleType, torch: Any) -> None:
    """An external event stands before the group: the replay is launched first."""
    x = torch.zeros(4).npu()
    event, side = torch.npu.ExternalEvent(), torch.npu.Stream()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        x.add_(1)
        handle = torch.npu.graph_task_group_end(stream)
    expected = 0
    for number in (5, 7, 1):
        graph.replay()
        with torch.npu.stream(side):
            torch.npu.graph_task_update_begin(side, handle)
            x.add_(number)
            torch.npu.graph_task_update_end(side)
            event.record(side)
        expected += number
        assert x.cpu().tolist() == [float(expected)] * 4


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", r"captured was aten\.add_\.Scalar\(\[4\] float32\)"),
        ("operator", r"launched is aten\.mul_\.Scalar\(\[4\] float32\)"),
        ("more", "the task group has 1 task only"),
    ],
)
def test_what_an_update_may_not_change(npu: ModuleType, torch: Any, what: str, words: str) -> None:
    """Refused, and the graph stays as it was."""
    x, longer = torch.zeros(4).npu(), torch.zeros(5).npu()
    graphed = Grouped(torch, lambda t: torch.ops.aten.add_.Scalar(t, 1), x)
    call = {
        "shape": lambda t: torch.ops.aten.add_.Scalar(longer, 2),
        "operator": lambda t: torch.ops.aten.mul_.Scalar(t, 3),
        "more": lambda t: (torch.ops.aten.add_.Scalar(t, 5), torch.ops.aten.add_.Scalar(t, 5)),
    }[what]
    with pytest.raises(RuntimeError) as found:
        graphed.update(x, call=call)
    refused = [found.value, found.value.__context__]
    assert any(re.search(words, str(error)) for error in refused), refused
    torch.npu.synchronize()
    graphed.graph.replay()
    assert x.cpu().tolist() == [1.0] * 4
    graphed.update(x)
    graphed.graph.replay()
    assert x.cpu().tolist() == [2.0] * 4


def test_an_update_that_launches_too_little(npu: ModuleType, torch: Any) -> None:
    x = torch.zeros(4).npu()
    graphed = Grouped(torch, lambda t: t.add_(1), x)
    with pytest.raises(RuntimeError, match="launched 0 of the 1 tasks"):
        graphed.update(call=lambda: None)
    graphed.graph.replay()
    assert x.cpu().tolist() == [1.0] * 4


def test_updated_tasks_are_forgotten(npu: ModuleType, torch: Any) -> None:
    from kvcore.emulator import _tasks

    x = torch.zeros(4).npu()
    graphed = Grouped(torch, lambda n: x.add_(n), 1)
    for number in range(50):
        graphed.update(number)
        graphed.graph.replay()
    torch.npu.synchronize()
    x.add_(0)
    torch.npu.synchronize()
    assert _tasks.held() <= 2


def test_a_callback_in_a_graph_launches_work(npu: ModuleType, torch: Any) -> None:
    """On a stream of its own, from the thread that runs callbacks."""
    side, main = torch.npu.Stream(), torch.npu.Stream()
    x, out = torch.ones(4).npu(), torch.zeros(4).npu()
    torch.npu.synchronize()

    def callback(given: list[Any]) -> None:
        with torch.npu.stream(side):
            given[1].add_(given[0] * 2)

    npu.npu._subscribe_report(main)
    try:
        graph = torch.npu.NPUGraph()
        with torch.npu.stream(main):
            with torch.npu.graph(graph, stream=main):
                npu.npu._launch_host_func(torch.npu.current_stream(), callback, [x, out])
            torch.npu.synchronize()
            for _ in range(3):
                graph.replay()
                torch.npu.synchronize()
        side.synchronize()
        assert out.cpu().tolist() == [6.0] * 4
    finally:
        npu.npu._unsubscribe_report(main)
