# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: python -m pytest bench --benchmark-only.

A benchmark measures one function of a case; functions of one case share a group, so that the
table shows them side by side.  Ratios from interleaved runs: kvcore bench.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread_for_torch() -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
