# SPDX-License-Identifier: Apache-2.0
"""What an offloaded replay draws for a request: accepted drafts, and where it is aborted.

The draws are a function of the seed and of the request alone, not of the other requests.
"""

from __future__ import annotations

import numpy as np

from kvcore.replay.metrics.latency import Progress
from kvcore.replay.options import OffloadOptions
from kvcore.replay.traces.reader import TraceRequest

__all__ = ["Decoding"]


class Decoding:
    """The state of a running request in an offloaded replay.

    admitted: whether the decode engine has it now.
    age:      steps since it was admitted last.
    progress: progress of its output, set by the replay when the request is first admitted.
    abort_at: tokens at which it is aborted; more than it can have when it is not.
    """

    __slots__ = ("abort_at", "admitted", "age", "draw", "progress")

    progress: Progress

    def __init__(self, request: TraceRequest, options: OffloadOptions) -> None:
        self.age: int = 0
        self.admitted: bool = False
        self.draw: np.random.Generator = np.random.default_rng(
            [0x6465, options.seed, request.index]
        )
        # Drawn even when no request is aborted, so that the draws for drafts stay the same.
        aborted, where = self.draw.random(2)
        self.abort_at: int = request.total_tokens + 1
        if aborted < options.abort_share and request.output_length > 1:
            self.abort_at = request.input_length + 1 + int(where * (request.output_length - 1))

    def stands(self, tokens: int, accept: float) -> int:
        """How many of a step's tokens are accepted: the first, and drafts to the first rejected."""
        count = 1
        while count < tokens and self.draw.random() < accept:
            count += 1
        return count
