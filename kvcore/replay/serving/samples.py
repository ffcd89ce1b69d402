# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a request are read back when it has finished."""

from __future__ import annotations

import numpy as np

from kvcore.replay.serving.scheduler import Running

__all__ = ["sample_positions"]


def sample_positions(draw: np.random.Generator, running: Running, count: int) -> list[int]:
    """Positions of a request to verify.

    Half anywhere; a quarter where decode wrote and a quarter in what was found in the cache, since
    these are short or rare, and where sharing goes wrong.
    """
    total, prompt = running.request.total_tokens, running.request.input_length
    everywhere = (0, total)
    ranges = [everywhere, (prompt, total), everywhere, (0, running.prefix_hit)]
    return [
        int(draw.integers(low, high) if low < high else draw.integers(total))
        for low, high in (ranges[i % 4] for i in range(count))
    ]
