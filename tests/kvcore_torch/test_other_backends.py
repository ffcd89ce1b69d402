# SPDX-License-Identifier: Apache-2.0
"""torch's operators on a backend that returns arrays of its own."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.backends import registry
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
import kvcore.torch  # noqa: E402


class OwnMemory:
    """Runs plans on the host, and returns what it makes as ``kind`` makes it."""

    name = "own_memory"
    spaces = frozenset({"host"})

    def __init__(self, kind: Callable[[Any], Any]) -> None:
        self.kind = kind
        self.runs = 0

    def why_not(self, plan: Any = None) -> str | None:
        return None

    def prepare(self, plan: Any) -> Callable[[], Any]:
        def run() -> Any:
            self.runs += 1
            return self.kind(plan.run_on_cpu())

        return run


class OnlyDlpack:
    """An array that nothing but DLPack reads."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


KINDS = {"numpy": np.asarray, "torch": torch.from_numpy, "DLPack": OnlyDlpack}


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = OwnMemory(KINDS[request.param])
    monkeypatch.setattr(registry, "_backends", {"cpu": registry._backends["cpu"]})
    kvcore.backends.register(made.name, made)
    return made


def selection() -> dict[str, Any]:
    return {
        "selection_k_rope": torch.zeros(4, 2, 4).half(),
        "selection_kv_cache": torch.zeros(4, 2, 8).half(),
        "selection_kv_block_table": torch.arange(4).int().view(1, 4),
        "selection_kv_block_status": torch.full((1, 1, 1, 5), -1).int(),
        "selection_topk_indices": torch.tensor([[[[4, 1, 0, 3]]]]).int(),
        "full_k_rope": torch.randn(6, 2, 4).half(),
        "full_kv_cache": torch.randn(6, 2, 8).half(),
        "full_kv_block_table": torch.arange(6).int().view(1, 6),
        "full_kv_actual_seq": torch.tensor([11]).int(),
        "full_q_actual_seq": torch.tensor([1]).int(),
        "selection_topk_block_size": 2,
    }


def check(given: dict[str, Any], lengths: Any) -> None:
    assert isinstance(lengths, torch.Tensor)
    assert (lengths.dtype, lengths.tolist()) == (torch.int32, [8])
    ids = given["selection_kv_block_status"][0, 0, 0, :4].tolist()  # of each place
    assert sorted(ids) == [0, 1, 3, 4]
    assert torch.equal(given["selection_kv_cache"], given["full_kv_cache"][ids])


def test_torch_ops(backend: Any) -> None:
    given = selection()
    with kvcore.backends.use(backend.name):
        check(given, torch.ops.kvcore.gather_selection_kv_cache(**given))
        found = torch.ops.kvcore.gather_selection_kv_cache_functional(**selection())
    assert found[0].tolist() == [8]
    assert backend.runs == 2


def test_an_installed_namespace(backend: Any) -> None:
    ns, given = types.ModuleType("torch_npu"), selection()
    with kvcore.torch.install(ns), kvcore.backends.use(backend.name):
        check(given, ns.npu_gather_selection_kv_cache(**given))
    assert backend.runs == 1


def test_a_graph(backend: Any) -> None:
    ns, given = types.ModuleType("torch_npu"), selection()
    with kvcore.Device() as device, kvcore.torch.install(ns, device=device):
        stream = ns.npu.Stream()
        with (
            ns.npu.stream(stream),
            device.capture(stream.raw) as graph,
            kvcore.backends.use(backend.name),
        ):
            lengths = ns.npu_gather_selection_kv_cache(**given)
        graph.replay(stream.raw)
        stream.synchronize()
        check(given, lengths)
    assert backend.runs == 1
