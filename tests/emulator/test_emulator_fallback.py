# SPDX-License-Identifier: Apache-2.0
"""Operators that are torch's own: right numbers, in stream order, captured, errors at the wait."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest


def same(npu_result: Any, cpu_result: Any, torch: Any) -> None:
    if isinstance(cpu_result, tuple | list):
        assert len(npu_result) == len(cpu_result)
        for a, b in zip(npu_result, cpu_result, strict=True):
            same(a, b, torch)
    elif isinstance(cpu_result, torch.Tensor):
        assert npu_result.device.type == "npu"
        assert npu_result.dtype == cpu_result.dtype
        assert npu_result.shape == cpu_result.shape
        torch.testing.assert_close(npu_result.cpu(), cpu_result, rtol=0, atol=0, equal_nan=True)
    else:
        assert npu_result == cpu_result


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda t, x: x + 1,
    "add alpha": lambda t, x: x.add(x, alpha=3),
    "compare": lambda t, x: x > 0.5,
    "where": lambda t, x: t.where(x > 0, x, -x),
    "sum": lambda t, x: x.sum(),
    "sum of an axis": lambda t, x: x.sum(-1, keepdim=True),
    "softmax": lambda t, x: x.softmax(-1),
    "matmul": lambda t, x: x @ x.transpose(-1, -2),
    "strided": lambda t, x: x[:, ::2, 1:].relu(),
    "transposed": lambda t, x: x.transpose(0, 2) * 2,
    "cat": lambda t, x: t.cat([x, x[:1]]),
    "stack": lambda t, x: t.stack([x, x], 1),
    "topk": lambda t, x: x.topk(2),
    "sort": lambda t, x: x.sort(stable=True),
    "cumsum": lambda t, x: x.cumsum(1),
    "index": lambda t, x: x[t.tensor([1, 0, 1]), 2],
    "mask": lambda t, x: x.masked_fill(x < 0, 7.0),
    "layer norm": lambda t, x: t.nn.functional.layer_norm(x, x.shape[-1:]),
    "gelu": lambda t, x: t.nn.functional.gelu(x),
    "cast": lambda t, x: (x * 100).to(t.int8),
    "half": lambda t, x: x.half() @ x.half().transpose(-1, -2),
    "bfloat16": lambda t, x: x.bfloat16() + 1,
    "split": lambda t, x: [part + 0 for part in x.split(2, 1)],
    "any": lambda t, x: (x > 3).any(),
    "equal": lambda t, x: t.equal(x, x),
    "nonzero": lambda t, x: (x > 0).nonzero(),
    "masked select": lambda t, x: x.masked_select(x > 0),
    "unique": lambda t, x: x.round().unique(),
    "item": lambda t, x: x[0, 1, 2].item(),
    "empty": lambda t, x: x[:0] + 1,
    "pad": lambda t, x: t.nn.functional.pad(x, (1, 2)),
    "repeat": lambda t, x: x.repeat(2, 1, 1),
    "conv": lambda t, x: t.nn.functional.conv1d(x, x[:, :, :2].contiguous()),
    "attention": lambda t, x: t.nn.functional.scaled_dot_product_attention(x, x, x),
    "std": lambda t, x: x.std(dim=1),
    "min and where": lambda t, x: x.min(dim=-1),
    "foreach": lambda t, x: t._foreach_add([x, x * 2], 1.5),
    "complex": lambda t, x: (t.complex(x, x) * 2).abs(),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers(npu: Any, torch: Any, name: str) -> None:
    host = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(7))
    call = CALLS[name]
    same(call(torch, host.npu()), call(torch, host), torch)


@pytest.mark.parametrize(
    "call",
    [
        lambda t, x: x.add_(1),
        lambda t, x: x[1:].mul_(3),
        lambda t, x: x.zero_(),
        lambda t, x: x.fill_(2.5),
        lambda t, x: x.copy_(x.flip(0)),
        lambda t, x: x.index_add_(0, t.tensor([1], device=x.device), x[:1].clone()),
        lambda t, x: x.__setitem__((0, slice(None, None, 2)), 5.0),
        lambda t, x: x.scatter_(2, x.argmax(-1, keepdim=True), 9.0),
        lambda t, x: t.add(x, 1, out=x),
        lambda t, x: t._foreach_mul_([x[0], x[1]], 2.0),
    ],
)
def test_written_in_place(npu: Any, torch: Any, call: Callable[[Any, Any], Any]) -> None:
    """And nothing around it: the tensor lies in the middle of a larger one."""
    host = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(7))
    there = host.npu()
    call(torch, there[1:3])
    call(torch, host[1:3])
    same(there, host, torch)


def test_out_is_resized(npu: Any, torch: Any) -> None:
    x = torch.arange(6.0).npu()
    out = torch.empty(0, device="npu")
    assert torch.mul(x, 2, out=out) is out
    same(out, torch.arange(6.0) * 2, torch)


def test_factories(npu: Any, torch: Any) -> None:
    for make in (
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.ones(4, dtype=torch.int32, device=d),
        lambda d: torch.full((2, 2), 1.5, device=d),
        lambda d: torch.arange(2, 20, 3, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.tril_indices(3, 3, device=d),
    ):
        same(make("npu"), make("cpu"), torch)


def test_equal_numbers_of_other_types_are_other_calls(npu: Any, torch: Any) -> None:
    """True, 1 and 1.0 are one key of a table, and three types to torch."""
    mask, whole = torch.tensor([True, False]), torch.tensor([1, 2])
    for number in (True, 1, 1.0, True):
        for host in (mask, whole):
            same(host.npu() + number, host + number, torch)
    for end in (3, 3.0, 3):
        same(torch.arange(end, device="npu"), torch.arange(end), torch)
    x = torch.arange(16.0).view(1, 1, 4, 4)
    for factor in (2.0, 1.5):
        grown = torch.nn.functional.interpolate(x.npu(), scale_factor=factor)
        same(grown, torch.nn.functional.interpolate(x, scale_factor=factor), torch)


def test_the_same_memory_under_another_shape(npu: Any, torch: Any) -> None:
    """A freed block comes back with other sizes and types: the kernel sees what is there now."""
    shapes: list[tuple[Any, Callable[[Any], Any]]] = [
        (torch.arange(12.0), lambda x: x.view(3, 4)),
        (torch.arange(12.0), lambda x: x.view(4, 3).t()),
        (torch.arange(12, dtype=torch.int32), lambda x: x),
        (torch.arange(24, dtype=torch.float16), lambda x: x[::2]),
    ]
    for host, seen in 3 * shapes:
        there, here = host.npu(), host.clone()
        same(seen(there) + 1, seen(here) + 1, torch)
        seen(there).mul_(2)
        seen(here).mul_(2)
        same(there, here, torch)
        del there


def test_tensors_made_in_inference_mode_are_written_outside_of_it(npu: Any, torch: Any) -> None:
    x = torch.zeros(4, device="npu")
    with torch.inference_mode():
        y = x + 1
    x.add_(1)
    x.add_(y)
    assert x.cpu().tolist() == [2.0] * 4


def test_gradients(npu: Any, torch: Any) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    x = torch.randn(5, 4)
    model(x).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.npu()
    model(x.npu()).square().sum().backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), grad)


# ---------------------------------------------------------------- order
def test_work_is_done_in_stream_order(npu: Any, torch: Any) -> None:
    """An operator between two copies reads what the first wrote, before the second writes."""
    pinned = [torch.full((8,), float(i)).pin_memory() for i in range(20)]
    there = torch.zeros(8, device="npu")
    sums = []
    for host in pinned:
        there.copy_(host, non_blocking=True)
        sums.append(there.sum())
    assert [s.item() for s in sums] == [8.0 * i for i in range(20)]


def test_two_streams_and_an_event(npu: Any, torch: Any) -> None:
    side = torch.npu.Stream()
    x = torch.ones(64, device="npu")
    for _ in range(50):
        x.mul_(1.01)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 2
    torch.npu.current_stream().wait_stream(side)
    z = y + 1
    y.record_stream(torch.npu.current_stream())
    assert z[0].item() == pytest.approx(2 * math.pow(1.01, 50) + 1, rel=1e-5)


def test_captured_and_replayed(npu: Any, torch: Any) -> None:
    x = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = (x + 1) * 2
        x.add_(y)
    assert x.cpu().tolist() == [0.0] * 4
    expected = 0.0
    for _ in range(3):
        graph.replay()
        expected += (expected + 1) * 2
        assert x.cpu().tolist() == [expected] * 4


def test_indices_are_captured_and_masks_are_not(npu: Any, torch: Any) -> None:
    x, index = torch.arange(6.0).npu(), torch.tensor([4, 0]).npu()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x[index]
    for places in ([4, 0], [1, 5]):
        index.copy_(torch.tensor(places))
        graph.replay()
        assert y.cpu().tolist() == [float(p) for p in places]
    another = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="depends on data"), torch.npu.graph(another):
        x[x > 2]
    torch.npu.synchronize()
    same(x[x > 2], torch.arange(3.0, 6.0), torch)


def test_what_a_dropped_graph_held_is_forgotten(npu: Any, torch: Any) -> None:
    from kvcore.emulator import _tasks

    x = torch.zeros(4, device="npu")
    for _ in range(3):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            x.add_(1)
        graph.replay()
        torch.npu.synchronize()
        del graph
    gc.collect()
    x.add_(1)
    torch.npu.synchronize()
    assert _tasks.held() == 0


@pytest.mark.parametrize("call", [lambda t, x: x.nonzero(), lambda t, x: t.equal(x, x)])
def test_outputs_that_depend_on_data_are_not_captured(
    npu: Any, torch: Any, call: Callable[[Any, Any], Any]
) -> None:
    x = torch.ones(4, device="npu")
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="depends on data"), torch.npu.graph(graph):
        call(torch, x)
    assert (x + 1).sum().item() == 8


# ---------------------------------------------------------------- faults
def test_a_fault_is_found_at_the_next_wait(npu: Any, torch: Any) -> None:
    x = torch.ones(4, device="npu")
    bad = x.index_select(0, torch.tensor([9], device="npu"))
    assert bad.shape == (1,)
    with pytest.raises(RuntimeError, match=r"aten.index_select.default \(.*fallback.py:\d+\)"):
        torch.npu.synchronize()
    assert (x + 1).sum().item() == 8


def test_wrong_shapes_are_refused_at_the_call(npu: Any, torch: Any) -> None:
    with pytest.raises(RuntimeError, match="broadcast"):
        torch.ones(3, device="npu") + torch.ones(4, device="npu")


def test_tensors_of_two_devices(npu: Any, torch: Any) -> None:
    x = torch.ones(3, device="npu")
    for call in (lambda: x + torch.ones(3), lambda: torch.cat([x, torch.ones(1)])):
        with pytest.raises(RuntimeError, match="on the same device"):
            call()
    # What torch allows: a number's tensor, indices of the host, copies.
    assert (x + torch.tensor(2.0)).sum().item() == 9
    assert x[torch.tensor([0, 2])].sum().item() == 2
    x[torch.tensor([1])] = 4.0
    assert x.copy_(torch.zeros(3)).sum().item() == 0


# ---------------------------------------------------------------- random numbers
def test_random_numbers_repeat(npu: Any, torch: Any) -> None:
    def draw() -> list[Any]:
        made = [torch.randn(5, device="npu"), torch.rand(5, device="npu")]
        made += [torch.randperm(6, device="npu"), torch.empty(3, device="npu").bernoulli_(0.5)]
        dropped = torch.nn.functional.dropout(torch.ones(64, device="npu"), 0.5)
        return [x.cpu() for x in [*made, dropped, torch.randint(0, 9, (4,), device="npu")]]

    state = torch.get_rng_state()
    torch.npu.manual_seed(11)
    first, second = draw(), draw()
    torch.npu.manual_seed(11)
    again = draw()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert set(first[4].tolist()) == {0.0, 2.0}
    # The host's own generator is left alone.
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_of_the_device(npu: Any, torch: Any) -> None:
    a, b = (torch.Generator("npu").manual_seed(3) for _ in range(2))
    x, y = (torch.rand(4, generator=g, device="npu").cpu() for g in (a, b))
    assert torch.equal(x, y)
    assert not torch.equal(x, torch.rand(4, generator=a, device="npu").cpu())
