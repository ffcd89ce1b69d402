# SPDX-License-Identifier: Apache-2.0
"""The emulated machine under the real torch_npu, in this process, where the wheel is installed.

torch must not be imported before the machine runs, so this file starts it while tests are
collected.  Everything else needs no wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from wheel import WHY_NOT

import kvcore.emulator

if WHY_NOT is None and kvcore.emulator.running() is None:
    kvcore.emulator.start(memory=1 << 30)


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    """torch with the real torch_npu on the machine."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with warnings.catch_warnings():
        # Sources of the vendor have escapes that warn where they are compiled for the first time.
        warnings.simplefilter("ignore")
        import torch
        import torch_npu

    assert torch_npu.npu.device_count() == 1
    return torch


@pytest.fixture
def npu(torch: ModuleType) -> Iterator[ModuleType]:
    """torch_npu; the test ends with no new report."""
    import torch_npu

    before = kvcore.emulator.reports()
    yield torch_npu
    torch.npu.synchronize()
    assert kvcore.emulator.reports() == before


Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def program() -> Program:
    """Runs a text in a fresh process of this Python, with variables added to the environment."""

    def run(text: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ASCEND_", "KVCORE_EMULATE"))
        }
        return subprocess.run(
            [sys.executable, *options, "-c", text],
            env={**clean, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=170,
        )

    return run
