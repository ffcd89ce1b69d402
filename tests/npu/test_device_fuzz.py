# SPDX-License-Identifier: Apache-2.0
"""A short run of the runtime's fuzzer with random faults."""

from __future__ import annotations

from device_fixtures import npu
from double.direct import Double
from fuzz_device import fuzz

__all__ = ["npu"]


def test_random_programs_with_random_faults(npu: Double) -> None:
    ends = fuzz(npu, 1200, seed=3)
    assert ends["rows right"] > 500
    assert ends["StreamError"] > 20
