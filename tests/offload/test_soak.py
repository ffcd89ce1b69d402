# SPDX-License-Identifier: Apache-2.0
"""The soak of the pools and caches, short; ``python tests/offload/soak.py`` is the whole one."""

from __future__ import annotations

import pytest

from offload.soak import soak


@pytest.mark.parametrize("seed", [1, 2])
def test_random_operations(seed: int) -> None:
    told = soak(8000, seed)
    assert sum(count for _, count, _ in told) == 8000
