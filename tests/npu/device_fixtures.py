# SPDX-License-Identifier: Apache-2.0
"""Devices over the test double: each test ends with nothing alive and no rule broken."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from double.direct import Double

import kvcore
from kvcore.npu.call import launch
from kvcore.npu.cann import library

__all__ = ["anyio_backend", "clock", "npu", "npus"]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock() -> str:
    """What the runtime's tests take as a parameter: an NPU keeps its own time."""
    return "wall"


@pytest.fixture
def npu(double: Double) -> Iterator[Double]:
    """An NPU; ``kvcore.Device(backend="aclnn")`` is one."""
    library.forget()
    yield double
    gc.collect()
    double.start()
    launch.release(None, 0)
    library.forget()
    left = [t.name for t in threading.enumerate() if t.name.startswith("kvcore-")]
    assert left == []
    assert double.live() == 0, double.live_text()


@pytest.fixture
def npus(npu: Double, monkeypatch: pytest.MonkeyPatch) -> Double:
    """Every device that the test makes is an NPU."""
    made = kvcore.Device

    def device(profile: Any = None, **options: Any) -> kvcore.Device:
        return made(profile, **{**options, "backend": "aclnn"})

    monkeypatch.setattr(kvcore, "Device", device)
    return npu
