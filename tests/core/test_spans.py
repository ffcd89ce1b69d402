# SPDX-License-Identifier: Apache-2.0
"""Byte ranges: merged, ascending, whatever order and distance the pieces come in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore._core import overlap, spans


def covered(starts: list[int], nbytes: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start in sorted(starts):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], start + nbytes))
        else:
            found.append((start, start + nbytes))
    return found


@given(st.lists(st.integers(0, 400), max_size=80), st.integers(1, 9))
def test_any_order(starts: list[int], nbytes: int) -> None:
    ranges = spans.merge(np.array(starts, np.int64), nbytes)
    assert ranges.dtype == np.int64
    assert ranges.shape[1:] == (2,)
    assert [tuple(r) for r in ranges.tolist()] == covered(starts, nbytes)


@pytest.mark.parametrize("reach", [1 << 12, 1 << 33, 1 << 46, (1 << 63) - 100])
@pytest.mark.parametrize("count", [33, 2048, 5000])
def test_long_and_far(count: int, reach: int) -> None:
    starts = np.random.default_rng(count).integers(1, reach, count)
    found = [tuple(r) for r in spans.merge(starts, 8).tolist()]
    assert found == covered(starts.tolist(), 8)
    assert spans.merge(starts[::-3], 8).tolist() == overlap.merge(starts[::-3], 8).tolist()
