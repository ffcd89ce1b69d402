# SPDX-License-Identifier: Apache-2.0
"""Calls that run later: in a graph, or behind an event.  What is the device's is read then.

Each operator is called on one set of contents, which is replaced before the call may run; what it
leaves has to be what the same call leaves that is made on the second set and runs at once.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvcore
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
import kvcore.torch  # noqa: E402

Arguments = dict[str, Any]
NZ = (3, 2, 8, 16)


def numbers(*shape: int, seed: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def slots(seed: int) -> Any:
    return torch.tensor([[1, 7, 12], [9, 2, 3]][seed]).int()


def scatter(seed: int) -> Arguments:
    tokens = numbers(2, 3, 2, 16, seed=seed)
    caches = numbers(2, *NZ, seed=seed + 5)
    return {
        "key": tokens[0],
        "value": tokens[1],
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": slots(seed),
    }


def reshape(seed: int) -> Arguments:
    found = scatter(seed)
    found["slot_indices"] = found.pop("slot_mapping")
    found["key_cache"] = found["key_cache"].view(3, 8, 2, 16)
    found["value_cache"] = found["value_cache"].view(3, 8, 2, 16)
    return found


def key_only(seed: int) -> Arguments:
    return {k: v for k, v in reshape(seed).items() if not k.startswith("value")}


def scatter_cache(seed: int) -> Arguments:
    found = key_only(seed)
    return {
        "key": found["key"],
        "slot_mapping": found["slot_indices"],
        "key_cache": found["key_cache"],
    }


def load(seed: int) -> Arguments:
    caches = numbers(2, 3, 8, 2, 16, seed=seed)
    return {
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": torch.tensor([[[0, 2], [1, 0]], [[2, 1], [0, 1]]][seed]).int(),
        "context_lens": torch.tensor([[3, 9], [10, 2]][seed]).int(),
    }


def load_into(seed: int) -> Arguments:
    out = numbers(2, 12, 2, 16, seed=seed + 9)
    return {**load(seed), "key": out[0], "value": out[1]}


def gather(seed: int) -> Arguments:
    found = load_into(seed)
    found["block_tables"] = found.pop("block_table")
    found["seq_lens"] = found.pop("context_lens")
    return found


def rows(seed: int) -> Arguments:
    """Indices of two axes in two more, updates that no reshape can flatten without a copy."""
    indices = torch.tensor([[[1, 0], [2, 3]], [[0, 1], [3, -1]]])
    return {
        "self": numbers(4, 4, 2, 3, seed=seed),
        "indices": (indices if seed else indices.flip(0, 1)).transpose(0, 1),
        "updates": numbers(2, 2, 3, 2, seed=seed + 3).permute(1, 0, 3, 2),
    }


def selection(seed: int) -> Arguments:
    """Two requests of two steps: lengths the first time, running totals the second."""
    full = numbers(12, 2, 12, seed=seed)
    ids = torch.tensor([[4, 1, 0, 3], [2, 5, 1, 0]][seed]).int()
    return {
        "selection_k_rope": torch.zeros(16, 2, 4).half(),
        "selection_kv_cache": torch.zeros(16, 2, 8).half(),
        "selection_kv_block_table": torch.arange(16).int().view(4, 4),
        "selection_kv_block_status": torch.full((2, 2, 1, 5), -1).int(),
        "selection_topk_indices": ids.expand(2, 2, 1, 4).contiguous(),
        "full_k_rope": full[..., :4].contiguous(),
        "full_kv_cache": full[..., 4:].contiguous(),
        "full_kv_block_table": torch.arange(12).int().view(2, 6),
        "full_kv_actual_seq": torch.tensor([11, 12 - seed]).int(),
        "full_q_actual_seq": torch.tensor([[1, 2], [2, 4]][seed]).int(),
    }


OPERATORS: dict[str, Callable[[int], Arguments]] = {
    "npu_scatter_pa_kv_cache": scatter,
    "npu_scatter_pa_kv_cache_functional": scatter,
    "npu_scatter_pa_cache": scatter_cache,
    "npu_gather_pa_kv_cache": gather,
    "npu_gather_pa_kv_cache_functional": gather,
    "npu_scatter_nd_update_": rows,
    "npu_scatter_nd_update": rows,
    "_npu_reshape_and_cache": reshape,
    "_npu_reshape_and_cache_siso": key_only,
    "npu_paged_cache_load": load,
    "npu_paged_cache_load.out": load_into,
    "npu_gather_selection_kv_cache": selection,
    "npu_gather_selection_kv_cache_functional": selection,
}


def call(ns: Any, name: str, given: Arguments) -> tuple[Any, ...]:
    more = {"selection_topk_block_size": 2} if "selection" in name else {}
    result = getattr(ns, name.partition(".")[0])(**given, **more)
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def copies(given: Arguments) -> Arguments:
    """Clones with the strides of the originals."""
    made = {}
    for name, tensor in given.items():
        made[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        made[name].copy_(tensor)
    return made


def replace(given: Arguments, by: Arguments) -> None:
    for name, tensor in given.items():
        tensor.copy_(by[name])


def check(given: Arguments, left: tuple[Any, ...], want: Arguments, wanted: Any) -> None:
    assert len(left) == len(wanted)
    for name in given:
        assert torch.equal(given[name], want[name]), name
    for i, (one, other) in enumerate(zip(left, wanted, strict=True)):
        assert torch.equal(one, other), i


@pytest.fixture
def installed() -> Iterator[tuple[Any, Any]]:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device() as device, kvcore.torch.install(ns, device=device):
        yield ns, device


def test_every_operator_is_here(installed: Any) -> None:
    from kvcore.torch.vendor import OPERATORS as known

    names = {operator.name for operator in known}
    names |= {f"{operator.name}_functional" for operator in known if operator.twin}
    assert {name.partition(".")[0] for name in OPERATORS} == names


@pytest.mark.parametrize("name", OPERATORS)
def test_a_graph_reads_at_each_replay(installed: Any, name: str) -> None:
    ns, device = installed
    stream, make = ns.npu.Stream(), OPERATORS[name]
    given = copies(make(0))
    with ns.npu.stream(stream), device.capture(stream.raw) as graph:
        returned = call(ns, name, given)
    for seed in (1, 0, 1):
        want = copies(make(seed))
        wanted = call(ns, name, want)
        replace(given, make(seed))
        graph.replay(stream.raw)
        stream.synchronize()
        check(given, returned, want, wanted)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_call_behind_an_event_reads_when_it_runs(installed: Any, name: str) -> None:
    ns, _ = installed
    stream, recorder, event = ns.npu.Stream(), ns.npu.Stream(), ns.npu.ExternalEvent()
    make = OPERATORS[name]
    want, given = copies(make(1)), copies(make(0))
    wanted = call(ns, name, want)
    with ns.npu.stream(stream):
        event.wait(stream)
        returned = call(ns, name, given)
    replace(given, make(1))
    event.record(recorder)
    ns.npu.synchronize()
    check(given, returned, want, wanted)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_call_made_now_comes_behind_what_its_stream_has(installed: Any, name: str) -> None:
    ns, _ = installed
    stream, make = ns.npu.Stream(), OPERATORS[name]
    want, given = copies(make(1)), copies(make(0))
    wanted = call(ns, name, want)
    stream.raw.call(replace, given, make(1))
    with ns.npu.stream(stream):
        returned = call(ns, name, given)
    check(given, returned, want, wanted)


def test_lengths_that_are_wrong_when_it_runs(installed: Any) -> None:
    """The error names the argument as the operator does."""
    ns, device = installed
    stream, given = ns.npu.Stream(), copies(load(0))
    with ns.npu.stream(stream), device.capture(stream.raw) as graph:
        ns.npu_paged_cache_load(**given)
    given["block_table"][0, 0] = 3
    graph.replay(stream.raw)
    with pytest.raises(kvcore.StreamError) as caught:
        stream.synchronize()
    cause = caught.value.__cause__
    assert isinstance(cause, kvcore.ParamInvalidError)
    assert str(cause).startswith("block_table[0, 0]: expected")


def test_what_a_copy_reads_is_checked_for_races() -> None:
    """A form that leaves its arguments alone reads all of them."""
    ns = types.ModuleType("torch_npu")
    with kvcore.Device(race_check="raise") as device, kvcore.torch.install(ns, device=device):
        first, second = ns.npu.Stream(), ns.npu.Stream()
        target = torch.zeros(4, 2)
        with ns.npu.stream(first):
            ns.npu_scatter_nd_update_(target, torch.tensor([[3]]), torch.ones(1, 2))
        for ordered in (True, False):
            if ordered:
                second.wait_stream(first)
            with ns.npu.stream(second):
                ns.npu_scatter_nd_update(target, torch.tensor([[0]]), torch.ones(1, 2))
            if ordered:
                device.synchronize_blocking()
                with ns.npu.stream(first):
                    ns.npu_scatter_nd_update_(target, torch.tensor([[2]]), torch.ones(1, 2))
        with pytest.raises(kvcore.RaceError, match="npu_scatter_nd_update at test_postponed"):
            device.synchronize_blocking()
