# SPDX-License-Identifier: Apache-2.0
"""Backends: registering, choosing, refusing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import copy_context
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore._core import settings
from kvcore._core.plan import Plan
from kvcore.backends import registry
from kvcore.backends.base import Backend
from kvcore.backends.cpu import CpuBackend


class Recorder:
    """Runs plans on the host with the library's kernels and keeps a list of them."""

    name = "recorder"
    spaces: Any = frozenset({"host"})
    reason: str | None = None

    def __init__(self) -> None:
        self.ran: list[str] = []

    def why_not(self, plan: Plan | None = None) -> str | None:
        return self.reason

    def prepare(self, plan: Plan) -> Callable[[], Any]:
        def run() -> Any:
            plan.check_values()
            self.ran.append(plan.operator.name)
            return plan.run_on_cpu()

        return run


class DeviceOnly(Recorder):
    """Reaches no host memory."""

    name = "device_only"
    spaces = frozenset({"device"})


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
    """A registry of the test's own."""
    backends: dict[str, Backend] = {"cpu": registry._backends["cpu"]}
    monkeypatch.setattr(registry, "_backends", backends)
    monkeypatch.setattr(registry, "_broken", {})
    monkeypatch.setattr(registry, "_searched", True)
    monkeypatch.setattr(settings, "active", False)
    monkeypatch.delenv("KVCORE_BACKEND", raising=False)
    return backends


def call(**options: Any) -> np.ndarray:
    cache = np.zeros((1, 2, 1, 4), np.int8)
    kvcore.scatter_pa_kv_cache(np.ones((1, 1, 4), np.int8), cache, np.array([1]), **options)
    return cache


def is_written(cache: np.ndarray) -> bool:
    return cache.sum() == 4 and bool(cache[0, 1].all())


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("kind", [CpuBackend, Recorder, DeviceOnly])
def test_every_backend_has_the_contract_s_signatures(kind: type) -> None:
    for name in ("why_not", "prepare"):
        wanted = inspect.signature(getattr(Backend, name))
        assert inspect.signature(getattr(kind, name)).parameters == wanted.parameters
    assert isinstance(kind(), Backend)
    assert kind().spaces <= {"host", "device"}
    assert kind().name.isidentifier()


@pytest.mark.parametrize("name", ["scatter_pa_kv_cache", "kv_cache_update", "scatter_pa_cache",
                                  "gather_pa_kv_cache", "gather_selection_kv_cache"])  # fmt: skip
def test_a_plan_takes_what_its_operator_takes(name: str) -> None:
    if not hasattr(kvcore, name):
        pytest.skip(f"{name} is not there yet")
    one, plan = getattr(kvcore, name), getattr(kvcore, f"plan_{name}")
    seen, wanted = inspect.signature(plan).parameters, inspect.signature(one).parameters
    assert list(seen) == list(wanted)
    for parameter, its in wanted.items():
        assert seen[parameter].default == its.default, parameter
        assert seen[parameter].kind == its.kind, parameter
    for keyword in ("dtype", "soc", "backend", "num_threads"):
        assert wanted[keyword].kind is inspect.Parameter.KEYWORD_ONLY
        assert wanted[keyword].default is None


# ---------------------------------------------------------------- registering


def test_register_and_find() -> None:
    made = Recorder()
    kvcore.backends.register("recorder", made)
    kvcore.backends.register("recorder", made)  # the same again is no fault
    assert kvcore.backends.get("recorder") is made
    assert kvcore.backends.names() == ("cpu", "recorder")
    assert kvcore.backends.available() == ("cpu", "recorder")
    made.reason = "no driver"
    assert kvcore.backends.available() == ("cpu",)
    assert kvcore.backends.why_not("recorder") == "no driver"
    assert kvcore.backends.why_not("cpu") is None
    assert kvcore.backends.get("recorder") is made  # usable or not
    assert "known: cpu, recorder" in str(kvcore.backends.why_not("nothing"))


@pytest.mark.parametrize("name", ["", "two words", "1st", 5, None, b"cpu", ["a"]])
def test_names_that_are_none(name: Any) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match="name: expected an identifier"):
        kvcore.backends.register(name, Recorder())
    with pytest.raises(kvcore.ParamInvalidError, match="backend: expected one of 'cpu', got"):
        kvcore.backends.get(name)
    with pytest.raises(kvcore.ParamInvalidError, match="backend: expected one of 'cpu', got"):
        kvcore.backends.use(name).__enter__()


def test_a_name_that_is_taken() -> None:
    with pytest.raises(
        kvcore.ParamInvalidError, match="name: expected a name that is free, got 'cpu'"
    ):
        kvcore.backends.register("cpu", Recorder())


class OddSpaces(Recorder):
    spaces = ["host"]  # noqa: RUF012 (wrong on purpose)


class UnknownSpaces(Recorder):
    spaces = frozenset({"host", "moon"})


@pytest.mark.parametrize("made", [None, object(), "cpu", Recorder, OddSpaces(), UnknownSpaces()])
def test_objects_that_are_no_backend(made: Any) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^backend: expected") as caught:
        kvcore.backends.register("odd", made)
    assert caught.value.argument == "backend"
    assert kvcore.backends.names() == ("cpu",)


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Recorder()

    class Broken:
        def __init__(self) -> None:
            raise OSError("libnpu.so: not found")

    loads: dict[str, Any] = {
        "ready": made,
        "class_of_one": Recorder,
        "broken": Broken,
        "no_backend": 7,
    }

    class Point(EntryPoint):
        def load(self) -> Any:
            if self.name == "absent":
                raise ImportError("no module named 'absent'")
            return loads[self.name]

    points = [Point(n, "somewhere", "kvcore.backends") for n in (*loads, "absent", "cpu")]
    asked = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return points

    loads["cpu"] = Recorder
    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(registry, "_searched", False)
    call(backend="cpu")
    assert asked == []  # a known name needs no search
    assert kvcore.backends.get("ready") is made
    assert kvcore.backends.names() == ("cpu", "ready", "class_of_one")
    assert asked == ["kvcore.backends"]  # once
    assert isinstance(kvcore.backends.get("cpu"), CpuBackend)
    assert is_written(call(backend="class_of_one"))
    for name, words in {
        "broken": "OSError: libnpu.so: not found",
        "no_backend": "expected an object with name",
        "absent": "ImportError: no module named 'absent'",
        "cpu": "a name that is free",
    }.items():
        assert words in kvcore.backends.load_errors()[name]
        if name != "cpu":
            assert words in str(kvcore.backends.why_not(name))
            with pytest.raises(kvcore.BackendUnavailableError, match=name):
                call(backend=name)
    assert "libnpu" in kvcore.info()["backends"]["broken"]


# ---------------------------------------------------------------- choosing


def test_by_call_by_task_and_by_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = Recorder(), Recorder(), Recorder()
    for name, made in (("first", first), ("second", second), ("third", third)):
        kvcore.backends.register(name, made)
    monkeypatch.setenv("KVCORE_BACKEND", "third")
    assert is_written(call())
    with kvcore.backends.use("second") as used:
        assert used is second
        assert is_written(call())
        assert is_written(call(backend="first"))
        assert is_written(call(backend=first))
        assert is_written(call(backend="cpu"))
        with kvcore.backends.use("cpu"):
            assert is_written(call())
        assert is_written(call())
    assert is_written(call())
    assert [len(b.ran) for b in (first, second, third)] == [2, 2, 2]
    monkeypatch.setenv("KVCORE_BACKEND", "  ")
    assert is_written(call())
    assert len(third.ran) == 2


def test_use_is_per_task() -> None:
    made = Recorder()
    kvcore.backends.register("recorder", made)
    with kvcore.backends.use("recorder"):
        inside = copy_context()
    assert is_written(call())
    assert made.ran == []
    inside.run(call)
    assert len(made.ran) == 1


def test_every_operator_goes_through_the_backend() -> None:
    made = Recorder()
    plan = kvcore.plan_kv_cache_update(
        np.ones((1, 4), np.int8), 0, np.zeros((1, 1, 1, 4), np.int8), np.array([1]), np.array([1]),
        backend=made,
    )  # fmt: skip
    assert plan.backend is made
    assert made.ran == []
    assert plan.run() is plan.arrays[2]
    assert plan.run() is plan.arrays[2]
    assert made.ran == ["kv_cache_update"] * 2
    assert plan.touched()[1][0].nbytes == 4
    with kvcore.backends.use("cpu"):
        kvcore.layout.nd_to_nz(np.zeros((2, 32), np.uint8))


def test_layouts_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    kvcore.backends.register("device_only", DeviceOnly())
    monkeypatch.setenv("KVCORE_BACKEND", "device_only")
    x = np.arange(128, dtype=np.uint8).reshape(4, 32)
    np.testing.assert_array_equal(kvcore.layout.nz_to_nd(kvcore.layout.nd_to_nz(x)), x)


def test_a_backend_sees_checked_arguments_only() -> None:
    made = Recorder()
    with pytest.raises(kvcore.ParamInvalidError, match="num_threads"):
        call(backend=made, num_threads=0)
    with pytest.raises(kvcore.ParamInvalidError, match="dtype"):
        call(backend=made, dtype="float99")
    assert made.ran == []


# ---------------------------------------------------------------- refusing


def test_a_backend_that_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Recorder()
    kvcore.backends.register("recorder", made)
    made.reason = "libascendcl.so: not found"
    words = "backend 'recorder' is not available: libascendcl.so: not found"
    for options in ({"backend": "recorder"}, {"backend": made}):
        with pytest.raises(kvcore.BackendUnavailableError, match=words) as caught:
            call(**options)
        assert caught.value.argument == "backend"
    with pytest.raises(kvcore.BackendUnavailableError, match=words):
        kvcore.backends.use("recorder").__enter__()
    monkeypatch.setenv("KVCORE_BACKEND", "recorder")
    with pytest.raises(kvcore.BackendUnavailableError, match=words):
        call()
    assert made.ran == []


def test_an_override_that_cannot_reach_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DeviceOnly()
    kvcore.backends.register("device_only", made)
    words = "backend 'device_only' cannot reach host memory"
    for options in ({"backend": "device_only"}, {"backend": made}):
        with pytest.raises(kvcore.BackendUnavailableError, match=words):
            call(**options)
    monkeypatch.setenv("KVCORE_BACKEND", "device_only")
    with pytest.raises(kvcore.BackendUnavailableError, match=words):
        call()
    monkeypatch.delenv("KVCORE_BACKEND")
    with (
        kvcore.backends.use("device_only"),
        pytest.raises(kvcore.BackendUnavailableError, match=words),
    ):
        call()


def test_a_backend_that_refuses_a_plan() -> None:
    class Picky(Recorder):
        name = "picky"

        def why_not(self, plan: Plan | None = None) -> str | None:
            return None if plan is None else f"no kernel for {plan.operator.name}"

    with pytest.raises(kvcore.BackendUnavailableError, match="no kernel for scatter_pa_kv_cache"):
        call(backend=Picky())


def test_a_backend_that_breaks() -> None:
    class Breaks(Recorder):
        name = "breaks"

        def why_not(self, plan: Plan | None = None) -> str | None:
            raise OSError("driver mismatch")

    kvcore.backends.register("breaks", Breaks())
    assert kvcore.backends.available() == ("cpu",)
    assert "driver mismatch" in kvcore.info()["backends"]["breaks"]
    with pytest.raises(kvcore.BackendUnavailableError, match="OSError: driver mismatch"):
        call(backend="breaks")


@pytest.mark.parametrize("text", ["nothing", "CPU", "cpu,aclnn"])
def test_an_unknown_name_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KVCORE_BACKEND", text)
    with pytest.raises(kvcore.ParamInvalidError, match="backend: expected one of 'cpu', got"):
        call()


class DevicePlan:
    """A plan whose arrays live where the test says."""

    def __init__(self, *on_device: bool) -> None:
        self.on_device = on_device

    def places(self) -> tuple[list[str], bool]:
        here = [f"array {i}" for i, there in enumerate(self.on_device) if not there]
        return here, any(self.on_device)


def test_arrays_on_a_device() -> None:
    with pytest.raises(kvcore.BackendUnavailableError, match="'aclnn' is not available"):
        registry._choose(DevicePlan(True, True), None, True)  # type: ignore[arg-type]
    for asked in (None, "cpu"):
        with pytest.raises(kvcore.ParamInvalidError, match=r"backend: .* a mixture"):
            registry._choose(DevicePlan(True, False), asked, True)  # type: ignore[arg-type]
    with pytest.raises(kvcore.BackendUnavailableError, match="'cpu' cannot reach device memory"):
        registry._choose(DevicePlan(True, True), "cpu", True)  # type: ignore[arg-type]
    npu = DeviceOnly()
    kvcore.backends.register("aclnn", npu)
    chosen, run = registry._choose(DevicePlan(True, True), None, True)  # type: ignore[arg-type]
    assert chosen is npu
    assert callable(run)
