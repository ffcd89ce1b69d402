# SPDX-License-Identifier: Apache-2.0
"""What every replay tells while it runs, and which tokens it draws to verify."""

from __future__ import annotations

import numpy as np

from kvcore.replay.serving.scheduler import Running, Scheduler

__all__ = ["Progress", "sample_positions"]


class Progress:
    """How far a replay is, for whoever shows it."""

    scheduler: Scheduler
    _num_requests: int
    _total_tokens: int

    @property
    def seen_tokens(self) -> int:
        """Tokens of the trace that are, or were, in the cache, of `total_tokens`."""
        return self.scheduler.counters.seen_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of the trace: prompts and outputs."""
        return self._total_tokens

    @property
    def total_requests(self) -> int:
        """Requests of the trace."""
        return self._num_requests


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
