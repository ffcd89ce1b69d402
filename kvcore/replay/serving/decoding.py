# SPDX-License-Identifier: Apache-2.0
"""What an offloaded replay draws for a request: which drafts stand, and where it is aborted.

A function of the seed and of the request alone, not of the other requests.
"""

from __future__ import annotations

import numpy as np

from kvcore.replay.metrics.latency import Progress
from kvcore.replay.options import OffloadOptions
from kvcore.replay.traces.reader import TraceRequest

__all__ = ["Decoding"]


class Decoding:
    """A request that runs, as an offloaded replay sees it.

    admitted: the decode engine has it now.
    age:      steps since it was admitted last.
    progress: of its output; the replay sets it when the request is admitted first.
    abort_at: tokens at which it is aborted; more than it will have when it is not.
    """

    __slots__ = ("abort_at", "admitted", "age", "draw", "progress")

    progress: Progress

    def __init__(self, request: TraceRequest, options: OffloadOptions) -> None:
        self.age: int = 0
        self.admitted: bool = False
        self.draw: np.random.Generator = np.random.default_rng(
            [0x6465, options.seed, request.index]
        )
        # Drawn even when nobody is aborted, so that the drafts that follow are the same.
        aborted, where = self.draw.random(2)
        self.abort_at: int = request.total_tokens + 1
        if aborted < options.abort_share and request.output_length > 1:
            self.abort_at = request.input_length + 1 + int(where * (request.output_length - 1))

    def stands(self, tokens: int, accept: float) -> int:
        """How many of the tokens a step writes will stand: drafts, up to the first rejected."""
        count = 1
        while count < tokens and self.draw.random() < accept:
            count += 1
        return count
