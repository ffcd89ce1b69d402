# SPDX-License-Identifier: Apache-2.0
"""Starting the machine: what is refused, and in which words."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from wheel import needs_wheel

import kvcore
from kvcore.emulator import environment, starting

Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"soc": "A5"}, "soc: expected one of A2, A3, 950, got 'A5'"),
        ({"soc": 3}, "soc: expected one of A2, A3, 950, got 3"),
        ({"devices": 0}, "devices: expected an int from 1 to 16, got 0"),
        ({"devices": True}, "devices: expected an int from 1 to 16, got True"),
        ({"devices": "2"}, "devices: expected an int from 1 to 16, got '2'"),
        ({"memory": 1}, "memory: expected bytes of a device, .*, got 1"),
        ({"memory": 1 << 50}, "memory: expected bytes of a device"),
        ({"memory": 1.5e9}, "memory: expected bytes of a device"),
        ({"check": "loud"}, "check: expected one of off, report, raise, got 'loud'"),
    ],
)
def test_arguments(arguments: dict[str, Any], said: str) -> None:
    before = kvcore.emulator.running()
    with pytest.raises(kvcore.ParamInvalidError, match=said):
        kvcore.emulator.start(**arguments)
    assert kvcore.emulator.running() is before


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_running", None)


def test_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(monkeypatch)
    monkeypatch.setattr(
        starting.installed, "wheels", lambda: starting.installed.Wheels("2.13.0", None, "", "cpu")
    )
    with pytest.raises(
        kvcore.BackendUnavailableError, match=r"torch_npu is not installed in .*pip"
    ):
        kvcore.emulator.start()


def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(monkeypatch)
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(kvcore.BackendUnavailableError, match="needs Linux, as torch_npu does"):
        kvcore.emulator.start()


def test_libraries_that_were_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(monkeypatch)
    monkeypatch.setattr(starting.installed, "missing_libraries", lambda: ["lib64/libx.so"])
    with pytest.raises(kvcore.BackendUnavailableError, match=r"lib64/libx.so was not built"):
        kvcore.emulator.start()


@needs_wheel
def test_a_second_start() -> None:
    with pytest.raises(kvcore.BackendUnavailableError, match="runs already in this process"):
        kvcore.emulator.start()


@needs_wheel
def test_a_start_after_torch_npu(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(monkeypatch)
    with pytest.raises(kvcore.BackendUnavailableError, match="before torch_npu is imported"):
        kvcore.emulator.start()


@needs_wheel
def test_what_runs(torch: Any) -> None:
    here = kvcore.emulator.running()
    assert here is not None
    assert (here.soc, here.devices, here.memory) == ("A3", 1, 1 << 30)
    assert torch.npu.get_device_name() == here.product == "Ascend910_9391"


@needs_wheel
def test_started_by_the_environment(program: Program) -> None:
    """As a child of `kvcore emulate` is; the same start() in its code changes nothing."""
    text = """
import torch
import kvcore.emulator
here = kvcore.emulator.running()
assert here.from_environment and here.soc == "A2" and here.memory == 1 << 28
assert kvcore.emulator.start("A2", memory=1 << 28) is here
print(torch.ones(3).npu().cpu().tolist(), torch.npu.get_device_name())
try:
    kvcore.emulator.start("A3")
except kvcore.BackendUnavailableError as error:
    print(error)
"""
    wanted: dict[str, str] = {}
    environment.apply(environment.Settings("A2", memory=1 << 28), wanted)
    done = program(text, **wanted)
    assert "[1.0, 1.0, 1.0] Ascend910B3" in done.stdout, done.stderr
    assert "started by the environment" in done.stdout


@needs_wheel
def test_the_environment_says_nothing_and_nothing_starts(program: Program) -> None:
    done = program(
        "import torch, kvcore.emulator; print(kvcore.emulator.running())",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.stdout == "None\n"


@needs_wheel
def test_the_first_operators_import_no_compiler(program: Program) -> None:
    """Those to which zeros are wrong are asked of their meta kernels, and give what they must."""
    done = program(
        """
import sys
import kvcore.emulator
kvcore.emulator.start(memory=1 << 28)
import torch
x = torch.arange(1, 7).npu()
y = (x + 1).sum() * torch.eye(2).npu().mm(torch.ones(2, 3).npu())
assert y.cpu().tolist() == [[27.0] * 3] * 2
assert "torch._dynamo" not in sys.modules
state = torch.get_rng_state()
assert (x // x).cpu().tolist() == [1] * 6
positive = torch.tensor([[4.0, 0.0], [0.0, 9.0]])
assert torch.linalg.cholesky(positive.npu()).cpu().tolist() == [[2.0, 0.0], [0.0, 3.0]]
out = torch.empty(0, device="npu")
assert torch.index_select(positive.npu(), 1, torch.tensor([1]).npu(), out=out) is out
assert out.cpu().tolist() == [[0.0], [9.0]]
torch.rand(3, device="npu")
assert torch.equal(torch.get_rng_state(), state)
try:
    torch.ones(3).npu() + torch.ones(4).npu()
except RuntimeError as error:
    assert "broadcast" in str(error) or "size of tensor" in str(error), error
else:
    raise AssertionError("shapes that do not fit")
print("well")
"""
    )
    assert done.stdout.strip() == "well", done.stderr
