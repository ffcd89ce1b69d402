# SPDX-License-Identifier: Apache-2.0
"""What install puts where, what it refuses, and that uninstall takes all of it back."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import kvcore
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
import kvcore.torch  # noqa: E402

ON_NS = {
    "npu_scatter_pa_kv_cache",
    "npu_scatter_pa_kv_cache_functional",
    "npu_scatter_pa_cache",
    "npu_gather_pa_kv_cache",
    "npu_gather_pa_kv_cache_functional",
    "npu_scatter_nd_update",
    "npu_scatter_nd_update_",
    "_npu_reshape_and_cache",
    "_npu_reshape_and_cache_siso",
    "npu_paged_cache_load",
    "npu_gather_selection_kv_cache",
    "npu_gather_selection_kv_cache_functional",
    "npu_format_cast",
    "npu_format_cast_",
    "get_npu_format",
    "Format",
    "empty_with_format",
    "empty_with_swapped_memory",
    "npu_kv_rmsnorm_rope_cache",
    "npu_kv_rmsnorm_rope_cache_v2",
    "atb",
    "npu",
}
UNDER_OPS = {
    "npu": {
        "npu_scatter_pa_kv_cache",
        "npu_scatter_pa_kv_cache_functional",
        "npu_scatter_pa_cache",
        "npu_gather_pa_kv_cache",
        "npu_gather_pa_kv_cache_functional",
        "npu_scatter_nd_update",
        "npu_scatter_nd_update_",
    },
    "atb": {"_npu_reshape_and_cache", "_npu_reshape_and_cache_siso", "npu_paged_cache_load"},
    "custom": {"npu_gather_selection_kv_cache", "npu_gather_selection_kv_cache_functional"},
    "_C_ascend": {"swap_blocks_batch"},
}
ON_NPU = {
    "Stream",
    "Event",
    "ExternalEvent",
    "stream",
    "current_stream",
    "default_stream",
    "set_stream",
    "synchronize",
    "is_current_stream_capturing",
}


def public(module: Any) -> set[str]:
    return {name for name in vars(module) if not name.startswith("__")}


def registered() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {n for n in names if n.partition("::")[0] in UNDER_OPS}


def test_names(torch_npu: Any) -> None:
    assert public(torch_npu) == ON_NS
    assert public(torch_npu.npu) == ON_NPU
    assert public(torch_npu.atb) == UNDER_OPS["atb"]
    for space, names in UNDER_OPS.items():
        for name in names:
            assert hasattr(getattr(torch.ops, space), name), f"torch.ops.{space}.{name}"


def test_uninstall_takes_everything_back() -> None:
    ns = types.SimpleNamespace(mine=1)
    handle = kvcore.torch.install(ns)
    ns.npu_format_cast = "mine too"
    handle.uninstall()
    handle.uninstall()
    assert vars(ns) == {"mine": 1, "npu_format_cast": "mine too"}
    assert registered() == set()
    for space, names in UNDER_OPS.items():
        assert not [n for n in names if hasattr(getattr(torch.ops, space), n)]
    assert "uninstalled" in repr(handle)


def test_install_again_after_uninstall() -> None:
    for _ in range(3):
        ns = types.ModuleType("torch_npu")
        with kvcore.torch.install(ns) as handle:
            assert repr(handle) == "<kvcore.torch installation on torch_npu>"
            cache = torch.zeros(2, 4, 1, 8)
            ns._npu_reshape_and_cache_siso(torch.ones(1, 1, 8), cache, torch.tensor([3]))
            assert cache[0, 3].sum() == 8
        assert public(ns) == set()


def test_a_kept_name_is_dead_after_uninstall() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.torch.install(ns):
        kept = ns._npu_reshape_and_cache_siso
        overload = kept.default
        stream = ns.npu.Stream
    for dead in (kept, overload):
        with pytest.raises(kvcore.ParamInvalidError, match="one that was uninstalled"):
            dead(torch.ones(1, 1, 8), torch.zeros(2, 4, 1, 8), torch.tensor([3]))
    with pytest.raises(kvcore.StreamError, match="an installed namespace"):
        stream()


def test_installing_twice(torch_npu: Any) -> None:
    for other in (torch_npu, types.ModuleType("another")):
        with pytest.raises(
            kvcore.ParamInvalidError,
            match=r"^ns: expected no installation before this one \(uninstall\(\) it first\), "
            r"got kvcore\.torch installed on torch_npu$",
        ):
            kvcore.torch.install(other)
    assert public(torch_npu) == ON_NS


def test_names_that_are_taken_on_the_namespace() -> None:
    ns = types.SimpleNamespace(npu_format_cast=len, atb=1)
    with pytest.raises(
        kvcore.ParamInvalidError, match=r"a namespace without these names .*got atb, npu_format"
    ):
        kvcore.torch.install(ns)
    assert vars(ns) == {"npu_format_cast": len, "atb": 1}
    assert registered() == set()


@pytest.fixture
def taken(request: pytest.FixtureRequest) -> Iterator[str]:
    space, name = request.param.split("::")
    library = torch.library.Library(space, "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    yield request.param
    library._destroy()


@pytest.mark.parametrize(
    "taken",
    ["npu::anything", "atb::npu_paged_cache_load", "_C_ascend::swap_blocks_batch"],
    indirect=True,
)
def test_operators_that_are_there(taken: str) -> None:
    before = registered()
    with pytest.raises(kvcore.ParamInvalidError, match=re.escape(f"got {taken}")):
        kvcore.torch.install(types.ModuleType("torch_npu"))
    assert registered() == before == {taken}


@pytest.mark.parametrize("taken", ["custom::of_somebody_else"], indirect=True)
def test_other_operators_of_a_shared_namespace_are_fine(taken: str) -> None:
    with kvcore.torch.install(types.ModuleType("torch_npu")):
        assert hasattr(torch.ops.custom, "npu_gather_selection_kv_cache")
    assert registered() == {taken}


def test_over_a_real_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("torch_npu")
    real.__file__ = "/site-packages/torch_npu/__init__.py"
    monkeypatch.setitem(sys.modules, "torch_npu", real)
    with pytest.raises(
        kvcore.ParamInvalidError, match=r"got torch_npu loaded from /site-packages/torch_npu/"
    ):
        kvcore.torch.install(real)


def test_the_stand_in_may_be_what_import_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    ns = types.ModuleType("torch_npu")
    monkeypatch.setitem(sys.modules, "torch_npu", ns)
    with kvcore.torch.install(ns):
        import torch_npu

        assert torch_npu.npu_scatter_pa_kv_cache is torch.ops.npu.npu_scatter_pa_kv_cache

        # How libraries ask whether there is a torch_npu.
        assert importlib.util.find_spec("torch_npu") is torch_npu.__spec__ is not None
    assert ns.__spec__ is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ns": None}, "ns: expected an object that takes attributes"),
        ({"ns": 3}, "ns: expected an object that takes attributes"),
        ({"ns": int}, "ns: expected an object that takes attributes"),
        ({"soc": "A4"}, "soc: expected one of 'A2', 'A3', '950'"),
        ({"soc": 950}, "soc: expected one of"),
        ({"device": "npu"}, "device: expected an open kvcore.Device or None, got str"),
        ({"record": 1}, "record: expected a path, a kvcore.torch.Recording or None, got int"),
        ({"device_alias": "yes"}, "device_alias: expected True or False, got 'yes'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    given = {"ns": types.ModuleType("torch_npu"), **arguments}
    with pytest.raises(kvcore.ParamInvalidError, match=r"^" + re.escape(message)):
        kvcore.torch.install(**given)
    assert registered() == set()


def test_an_exception_inside_uninstalls_too() -> None:
    ns = types.ModuleType("torch_npu")
    handle = kvcore.torch.install(ns)
    with pytest.raises(ZeroDivisionError), handle:
        print(1 / len(ns.npu.current_stream().raw.name[:0]))
    assert public(ns) == set()
    assert registered() == set()


# ---------------------------------------------------------------- soc, device names
def test_soc_holds_for_every_call() -> None:
    ns = types.ModuleType("torch_npu")
    key, cache, where = torch.ones(1, 1, 8), torch.zeros(2, 4, 1, 8), torch.tensor([3]).int()
    with kvcore.torch.install(ns, soc="A3"):
        for operator in (
            ns._npu_reshape_and_cache_siso,
            torch.ops.atb._npu_reshape_and_cache_siso,
        ):
            with pytest.raises(kvcore.ParamInvalidError, match="on A3"):
                operator(key, cache, where)
            operator(key.half(), cache.half(), where)
        # Not one of the KV-cache operators: no rules are known for it.
        ns.npu_scatter_nd_update_(cache.view(8, 8), where.view(1, 1), key.view(1, 8))
    with (
        kvcore.torch.install(ns),
        kvcore.use_soc("A3"),
        pytest.raises(kvcore.ParamInvalidError, match="on A3"),
    ):
        ns._npu_reshape_and_cache_siso(key, cache, where)


@pytest.mark.parametrize("how", ["install", "use_soc", "KVCORE_SOC"])
def test_key_only_on_the_950_is_scatter_pa_cache(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATB hands it on to that operator there: fp32 is fine, PA_NZ and a value of None are not."""
    ns = types.ModuleType("torch_npu")
    key, cache, where = torch.ones(1, 1, 8), torch.zeros(2, 4, 1, 8), torch.tensor([3]).int()
    if how == "KVCORE_SOC":
        monkeypatch.setenv("KVCORE_SOC", "950")
    with (
        kvcore.use_soc("950" if how == "use_soc" else None),
        kvcore.torch.install(ns, soc="950" if how == "install" else None),
    ):
        ns._npu_reshape_and_cache_siso(key, cache, where)
        assert cache[0, 3].eq(1).all()
        assert cache.sum() == 8
        with pytest.raises(kvcore.ParamInvalidError, match=r"^slot_indices: expected"):
            ns._npu_reshape_and_cache_siso(key, cache, where.short())
        nz = ns.npu_format_cast(torch.zeros(2, 1, 4, 8), 29)
        with pytest.raises(kvcore.ParamInvalidError, match="on 950"):
            ns._npu_reshape_and_cache_siso(key, nz, where)
        with pytest.raises(kvcore.ParamInvalidError, match="on 950"):
            ns.npu_scatter_pa_kv_cache(key, None, cache, None, where, cache_mode="Norm")


def test_device_alias() -> None:
    ns = types.ModuleType("torch_npu")
    with pytest.raises(RuntimeError):
        torch.zeros(2, device="npu")
    with kvcore.torch.install(ns, device_alias=True):
        assert torch.zeros(2, device="npu").device.type == "cpu"
        assert torch.tensor([1, 2], device="npu:0").device.type == "cpu"
        assert torch.arange(3, device="npu").device.type == "cpu"
        assert torch.empty_like(torch.zeros(2), device="npu").device.type == "cpu"
        assert torch.zeros(2).to("npu", torch.float16).dtype == torch.float16
        assert torch.zeros(2, device="meta").device.type == "meta"
    with pytest.raises(RuntimeError):
        torch.zeros(2, device="npu")


def test_without_the_alias_the_caller_passes_a_device(torch_npu: Any) -> None:
    with pytest.raises(RuntimeError):
        torch.zeros(2, device="npu")


def test_swapped_memory(torch_npu: Any) -> None:
    made = torch_npu.empty_with_swapped_memory((2, 3), dtype=torch.int8, device="npu:0")
    assert (made.shape, made.dtype) == ((2, 3), torch.int8)
    made = torch_npu.empty_with_swapped_memory(torch.Size([4]), device=torch.device("cpu"))
    assert made.dtype == torch.float32
    with pytest.raises(kvcore.ParamInvalidError, match=r"^device: expected 'npu', 'cpu' or None"):
        torch_npu.empty_with_swapped_memory((2,), device="cuda")


@pytest.mark.parametrize("name", ["npu_kv_rmsnorm_rope_cache", "npu_kv_rmsnorm_rope_cache_v2"])
def test_what_is_not_planned_says_so(torch_npu: Any, name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{name} is not planned: it computes"):
        getattr(torch_npu, name)(torch.zeros(1), epsilon=1e-5)


# ---------------------------------------------------------------- imports
def test_the_runtime_is_loaded_when_streams_are_used() -> None:
    program = """
import sys, types, kvcore.torch
ns = types.ModuleType("torch_npu")
handle = kvcore.torch.install(ns)
print(*sys.modules)
ns.npu.current_stream()
print(*sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    installed, used = (set(line.split()) for line in done.stdout.splitlines())
    assert not installed & {"kvcore.runtime", "anyio", "trio"}
    assert "kvcore.runtime" in used


def test_without_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
try:
    import kvcore.torch
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == ("kvcore.torch needs torch; install it with: pip install 'torch>=2.6'\n")
