# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzer with random faults."""

from __future__ import annotations

from double.direct import Double
from fuzz_npu import fuzz
from npu_fixtures import a3 as a3


def test_random_faults_leave_nothing_behind(a3: Double) -> None:
    ends = fuzz(a3, 600, seed=7)
    assert ends["right"] > 50
    assert sum(ends.values()) - ends["right"] > 50
