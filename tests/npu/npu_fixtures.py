# SPDX-License-Identifier: Apache-2.0
"""The package's own CANN over the test double, fresh for each test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from double.direct import Double

from kvcore.npu.call import launch
from kvcore.npu.cann import library
from npu import MACHINES

__all__ = ["a3", "clean", "machine"]


@pytest.fixture(params=list(MACHINES))
def machine(request: pytest.FixtureRequest, double: Double) -> Iterator[str]:
    """Each SoC in turn: its name in kvcore's table."""
    yield from _running(double, request.param)


@pytest.fixture
def a3(double: Double) -> Iterator[Double]:
    """An A3."""
    for _ in _running(double, "A3"):
        yield double


def _running(double: Double, soc: str) -> Iterator[str]:
    double.soc(MACHINES[soc])
    library.forget()
    yield soc
    cann = library.current()
    cann.set_device(0)
    cann.aclrtSynchronizeDevice()
    launch.release(None, 0)
    library.forget()
    assert double.live() == 0, double.live_text()


@pytest.fixture
def clean(double: Double) -> Iterator[Double]:
    """An A3 for a test that breaks rules: nothing of it is left to the next."""
    double.soc(MACHINES["A3"])
    library.forget()
    launch.memory._pools.clear()
    yield double
    gc.collect()
    double.violations()
    double.reset()
    double.start()
    launch.memory._pools.clear()
    library.forget()
