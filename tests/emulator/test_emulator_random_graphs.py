# SPDX-License-Identifier: Apache-2.0
"""Random operators in graphs: a replay draws what the same calls would draw one by one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

CALLS = {
    "rand": lambda torch, x: torch.rand(8, device="npu"),
    "normal_": lambda torch, x: x.clone().normal_(),
    "dropout": lambda torch, x: torch.nn.functional.dropout(x, 0.5),
    "randint": lambda torch, x: torch.randint(0, 1000, (8,), device="npu"),
}


@pytest.mark.parametrize("name", CALLS)
def test_replays_go_on_where_the_generator_stands(npu: ModuleType, torch: Any, name: str) -> None:
    x = torch.ones(8, device="npu")
    torch.npu.manual_seed(7)
    wanted = [CALLS[name](torch, x).cpu() for _ in range(7)]
    torch.npu.manual_seed(7)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        first, second = CALLS[name](torch, x), CALLS[name](torch, x)
    found = []
    for _ in range(2):
        graph.replay()
        found += [first.cpu(), second.cpu()]
    found.append(CALLS[name](torch, x).cpu())  # between two replays
    graph.replay()
    found += [first.cpu(), second.cpu()]
    assert [t.tolist() for t in found] == [t.tolist() for t in wanted]
    assert found[0].tolist() != found[1].tolist()


def test_a_seed_before_a_replay(npu: ModuleType, torch: Any) -> None:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        drawn = torch.rand(8, device="npu")
    found = []
    for seed in (3, 4, 3):
        torch.npu.manual_seed(seed)
        graph.replay()
        found.append(drawn.cpu().tolist())
    assert found[0] == found[2] != found[1]
    torch.npu.manual_seed(4)
    assert torch.rand(8, device="npu").cpu().tolist() == found[1]


def test_the_state_within_a_capture(npu: ModuleType, torch: Any) -> None:
    """A state that is put back, as checkpointing does: the same numbers again."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch.rand(8, device="npu")
        state = torch.npu.get_rng_state()
        first = torch.rand(8, device="npu")
        torch.npu.set_rng_state(state)
        again = torch.rand(8, device="npu")
    graph.replay()
    assert first.cpu().tolist() == again.cpu().tolist()


def test_a_generator_of_the_program_s(npu: ModuleType, torch: Any) -> None:
    own = torch.Generator(device="npu").manual_seed(5)
    wanted = torch.rand(8, device="npu", generator=own).cpu()
    graph = torch.npu.NPUGraph()
    graph.register_generator_state(own)
    with torch.npu.graph(graph):
        drawn = torch.rand(8, device="npu", generator=own)
    own.manual_seed(5)
    graph.replay()
    assert drawn.cpu().tolist() == wanted.tolist()


def test_two_graphs_on_two_streams(npu: ModuleType, torch: Any) -> None:
    torch.npu.manual_seed(9)
    wanted = [torch.rand(8, device="npu").cpu().tolist() for _ in range(2)]
    graphs, drawn = [torch.npu.NPUGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.npu.graph(graph):
            drawn.append(torch.rand(8, device="npu"))
    torch.npu.manual_seed(9)
    torch.npu.synchronize()
    for graph in graphs:
        with torch.npu.stream(torch.npu.Stream()):
            graph.replay()
    torch.npu.synchronize()
    assert [t.cpu().tolist() for t in drawn] == wanted
