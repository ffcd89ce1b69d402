# SPDX-License-Identifier: Apache-2.0
"""What the machine remembers does not grow with a program that goes on doing the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


def capture(torch: Any, x: Any, *, replays: int) -> None:
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.mul(2)
    for _ in range(replays):
        graph.replay()
    torch.npu.synchronize()


def record_and_wait(torch: Any) -> None:
    event, side = torch.npu.Event(), torch.npu.Stream()
    event.record()
    side.wait_event(event)
    torch.npu.current_stream().wait_stream(side)


WORK: dict[str, Callable[[Any, Any, Any], object]] = {
    "copied to the host": lambda t, x, host: x.cpu(),
    "copied to pinned memory": lambda t, x, host: host.copy_(x, non_blocking=True),
    "copied to the device": lambda t, x, host: x.copy_(host, non_blocking=True),
    "pinned anew": lambda t, x, host: t.zeros(64).pin_memory(),
    "cast": lambda t, x, host: x.to(t.float16),
    "indexed": lambda t, x, host: x.index_select(0, t.tensor([1, 2]).npu()),
    "with gaps": lambda t, x, host: x.view(8, 8)[:, ::2].add_(1),
    "waited for": lambda t, x, host: x.nonzero(),
    "ordered": lambda t, x, host: record_and_wait(t),
    "captured": lambda t, x, host: capture(t, x, replays=0),
    "replayed": lambda t, x, host: capture(t, x, replays=2),
    "other numbers": lambda t, x, host: x.add(float(t.rand(()))),
}


@pytest.mark.parametrize("name", WORK)
def test_the_same_work_again_remembers_no_more(npu: ModuleType, torch: Any, name: str) -> None:
    from kvcore.emulator import _tasks, checking

    x, host = torch.ones(64).npu(), torch.ones(64).pin_memory()

    def remembered() -> dict[str, int]:
        for _ in range(40):  # streams are 32, handed out in turn
            WORK[name](torch, x, host)
        torch.npu.synchronize()
        gc.collect()
        checking.settle()
        assert checking.races is not None
        return {**checking.races.tables(), "held": _tasks.held()}

    first = remembered()
    assert remembered() == first
    assert first["held"] == 0
