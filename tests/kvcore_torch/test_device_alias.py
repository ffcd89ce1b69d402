# SPDX-License-Identifier: Apache-2.0
"""The two sides that device_alias keeps apart: what crosses is copied, what stays is not."""

from __future__ import annotations

import copy
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvcore
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
import kvcore.torch  # noqa: E402
from kvcore.torch import device_alias  # noqa: E402
from kvcore.torch.device_alias import is_on_npu  # noqa: E402


@pytest.fixture
def ns() -> Iterator[Any]:
    found = types.ModuleType("torch_npu")
    with kvcore.torch.install(found, device_alias=True):
        yield found


def shares(a: Any, b: Any) -> bool:
    """Whether a change of one is a change of the other."""
    before = b.clone()
    a += 1
    changed = not torch.equal(b, before)
    a -= 1
    return changed


NPU = ["npu", "npu:0", torch.device]
TO_DEVICE: dict[str, Callable[[Any, Any], Any]] = {
    "to": lambda x, d: x.to(d),
    "to with a dtype": lambda x, d: x.to(d, x.dtype),
    "to by keyword": lambda x, d: x.to(device=d, non_blocking=True),
    "to another": lambda x, d: x.to(torch.empty(1, device=d, dtype=x.dtype)),
    "as_tensor": lambda x, d: torch.as_tensor(x, device=d),
    "asarray": lambda x, d: torch.asarray(x, device=d),
}
TO_HOST: dict[str, Callable[[Any], Any]] = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to a device": lambda x: x.to(torch.device("cpu")),
    "to by keyword": lambda x: x.to(device="cpu", dtype=x.dtype),
    "to another": lambda x: x.to(torch.empty(1)),
    "as_tensor": lambda x: torch.as_tensor(x, device="cpu"),
}


@pytest.mark.parametrize("how", TO_DEVICE)
@pytest.mark.parametrize("device", NPU, ids=["npu", "npu:0", "torch.device"])
def test_to_the_device(ns: Any, how: str, device: Any) -> None:
    device = torch.device("npu:0") if device is torch.device else device
    host = torch.arange(4.0)
    there = TO_DEVICE[how](host, device)
    assert torch.equal(there, host)
    assert (there.dtype, there.device.type) == (host.dtype, "cpu")
    assert not shares(there, host)
    assert not shares(host, there)
    assert (is_on_npu(there), is_on_npu(host)) == (True, False)
    again = TO_DEVICE[how](there, device)
    assert again.data_ptr() == there.data_ptr()
    view = TO_DEVICE[how](there[1:], device)
    assert view.data_ptr() == there[1:].data_ptr()


@pytest.mark.parametrize("how", TO_HOST)
def test_from_the_device(ns: Any, how: str) -> None:
    there = torch.arange(4.0, device="npu")
    host = TO_HOST[how](there)
    assert torch.equal(there, host)
    assert not shares(there, host)
    assert not shares(host, there)
    assert not is_on_npu(host)
    assert TO_HOST[how](host).data_ptr() == host.data_ptr()
    assert not shares(there, TO_HOST[how](there[1:]).new_tensor([0.0]))
    snapshot = TO_HOST[how](there[1:])
    there += 1
    assert snapshot.tolist() == [1.0, 2.0, 3.0]


def test_strides_and_gradients_cross(ns: Any) -> None:
    host = torch.arange(12.0).view(3, 4).t().requires_grad_()
    there = host.to("npu")
    assert there.stride() == host.stride()
    there.sum().backward()
    assert torch.equal(host.grad, torch.ones(4, 3))


MADE: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda x: torch.zeros(3, device="npu"),
    "tensor": lambda x: torch.tensor([1.0], device=torch.device("npu:0")),
    "empty_like of the host's": lambda x: torch.empty_like(torch.zeros(3), device="npu"),
    "new_zeros": lambda x: x.new_zeros(3),
    "zeros_like": lambda x: torch.zeros_like(x),
    "clone": lambda x: x.clone(),
    "sum": lambda x: x + torch.ones(4),
    "a half": lambda x: x.half(),
    "cat": lambda x: torch.cat([x, x]),
    "split": lambda x: torch.stack(x.split(2)),
    "one of two": lambda x: x.sort()[1],
    "a view": lambda x: x[1:].view(-1, 1).t().detach(),
    "deepcopy": copy.deepcopy,
    "parameter": lambda x: torch.nn.Parameter(x),
    "of numpy's": lambda x: torch.as_tensor(np.ones(3), device="npu"),
}
LEFT: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda x: torch.zeros(3),
    "on the cpu": lambda x: torch.zeros_like(x, device="cpu"),
    "copied into": lambda x: torch.zeros(4).copy_(x),
    "added to": lambda x: torch.zeros(4).add_(x),
    "written out": lambda x: torch.add(x, x, out=torch.zeros(4)),
    "of numpy's": lambda x: torch.from_numpy(x.numpy()),
    "of a list": lambda x: torch.tensor(x.tolist()),
}


@pytest.mark.parametrize("how", MADE)
def test_what_is_on_the_device(ns: Any, how: str) -> None:
    made = MADE[how](torch.arange(4.0, device="npu"))
    assert is_on_npu(made)
    assert made.to("npu").data_ptr() == made.data_ptr()
    assert made.cpu().data_ptr() != made.data_ptr()


@pytest.mark.parametrize("how", LEFT)
def test_what_is_on_the_host(ns: Any, how: str) -> None:
    made = LEFT[how](torch.arange(4.0, device="npu"))
    assert not is_on_npu(made)
    assert made.cpu().data_ptr() == made.data_ptr()
    assert made.to("npu").data_ptr() != made.data_ptr()


def test_numpys_memory_is_copied_to_the_device(ns: Any) -> None:
    array = np.zeros(3)
    there = torch.as_tensor(array, device="npu")
    shared = torch.as_tensor(array, device="cpu")
    array += 1
    assert there.tolist() == [0, 0, 0]
    assert shared.tolist() == [1, 1, 1]


def test_a_module_moves(ns: Any) -> None:
    module = torch.nn.Linear(2, 2)
    weight = module.weight.data
    for device in ("npu", torch.device("npu:0")):
        assert module.to(device) is module
        assert is_on_npu(module.weight)
        assert module.weight.data_ptr() != weight.data_ptr()
        there = module.weight.data_ptr()
        assert module.to(device, torch.float32).weight.data_ptr() == there
        assert not is_on_npu(module.cpu().weight)
        assert module.weight.data_ptr() != there
    assert is_on_npu(torch.nn.Linear(2, 2, device="npu").bias)


def test_the_default_device(ns: Any) -> None:
    with torch.device("npu"):
        assert is_on_npu(torch.zeros(2))
        assert not is_on_npu(torch.zeros(2, device="cpu"))
    assert not is_on_npu(torch.zeros(2))
    torch.set_default_device("npu:0")
    try:
        assert is_on_npu(torch.tensor([1]))
    finally:
        torch.set_default_device(None)
    assert not is_on_npu(torch.tensor([1]))


def test_the_vendors_operators(ns: Any) -> None:
    """What they make is on the device, and so is what they are given back."""
    cache = ns.empty_with_swapped_memory((2, 4, 1, 16), dtype=torch.float16)
    assert is_on_npu(cache.zero_())
    assert is_on_npu(ns.empty_with_format((2, 2), device="npu", acl_format=29))
    assert not is_on_npu(ns.empty_with_format((2, 2), device="cpu"))
    assert is_on_npu(ns.npu_format_cast(cache, 29))
    key, slots = torch.ones(1, 1, 16).half().to("npu"), torch.tensor([5]).to("npu")
    snapshot = cache.cpu()
    ns._npu_reshape_and_cache_siso(key, cache, slots)
    assert not snapshot.any()
    assert cache.cpu()[1, 1].eq(1).all()
    table, lengths = torch.tensor([[0, 1]]).to("npu"), torch.tensor([8]).to("npu")
    loaded = ns.npu_paged_cache_load(cache, cache, table, lengths)
    assert all(is_on_npu(t) for t in loaded)
    made = ns.npu_scatter_nd_update(cache, slots[:, None] * 0, cache[:1])
    assert is_on_npu(made)


def test_other_devices_are_left_alone(ns: Any) -> None:
    there = torch.zeros(2, device="npu")
    assert there.to("meta").device.type == "meta"
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert there.to(torch.float16).dtype == torch.float16
    sparse = torch.eye(2, device="npu").to_sparse()
    assert sparse.cpu().to_dense().tolist() == [[1, 0], [0, 1]]
    with pytest.raises(RuntimeError):
        there.to("nowhere")


def test_without_the_alias_there_is_a_name_but_no_device() -> None:
    with kvcore.torch.install(types.ModuleType("torch_npu"), device_alias=True):
        failed: list[BaseException] = []

        def elsewhere() -> None:
            try:
                torch.zeros(2, device="npu")
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert torch.device("npu:0").type == "npu"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^device: expected 'npu' in the thread of an inst"):
            torch.zeros(2, device="npu")
    assert len(failed) == 1
    assert not torch.npu.is_available()
    with kvcore.torch.install(types.ModuleType("torch_npu")):
        pass  # a name that was given is in nobody's way


def test_a_name_that_another_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_alias, "_get_privateuse1_backend_name", lambda: "other")
    ns = types.ModuleType("torch_npu")
    with pytest.raises(
        kvcore.ParamInvalidError,
        match=r"^device_alias: expected a process whose spare backend has no name or 'npu', got '",
    ):
        kvcore.torch.install(ns, device_alias=True)
    assert not hasattr(ns, "npu")
    with kvcore.torch.install(ns):  # which needs no name
        pass


def test_torch_goes_on_as_before() -> None:
    """The name stays, and nothing else of torch takes it for a device."""
    with kvcore.torch.install(types.ModuleType("torch_npu"), device_alias=True):
        torch.zeros(2, device="npu")
    assert not torch.accelerator.is_available()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(3)
    seeded = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), seeded)
    # The compiler asks every device that has a name for its streams.
    double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
