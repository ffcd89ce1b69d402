# SPDX-License-Identifier: Apache-2.0
"""A step and those that repeat it: what lies between two events of a schedule.

Between an arrival, an end, the last chunk of a prompt, a preemption and an abort the batch is the
same.  Each step then writes one more token of each request that decodes and one more whole chunk of
the oldest prompt.  New blocks are taken at block boundaries, in the order in which step after step
would take them.  So a strategy can sum such steps, and the scheduler commits them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvcore.replay.serving.scheduler import Scheduler, Step

__all__ = ["MOST_STEPS", "Run", "run_of"]

#: So that progress moves and memory is bounded.
MOST_STEPS = 256


@dataclass(frozen=True, slots=True)
class Run:
    """A planned step, and how often it can be done.

    count:    steps, the planned one among them.
    new:      (step, place among those that decode) where a block is needed, in order; those of the
              planned step are taken already.
    used:     int64 [count] blocks that are held in each step.
    until_ms: no step but the first begins at that time or later: somebody arrives.
    awaits_blocks: the head of the queue is there, and the pool has no blocks for it.
    """

    step: Step
    count: int
    new: list[tuple[int, int]]
    used: NDArray[np.int64]
    until_ms: float
    awaits_blocks: bool


def run_of(scheduler: Scheduler, step: Step, most: int, now_ms: float | None) -> Run:
    """The run that a step begins, which was planned and is not committed.

    most: steps until something happens that the scheduler does not know of, at least 1.
    """
    count = min(most, MOST_STEPS, _steps_of_chunk(scheduler, step))
    until_ms, awaits_blocks = math.inf, False
    if count > 1 and scheduler.has_room and not step.prefill:
        arrives = scheduler.next_arrival_ms
        if arrives is not None and now_ms is not None and arrives > now_ms:
            until_ms = arrives
        elif arrives is not None:
            # Blocks only become fewer before somebody leaves: who does not fit now will not.
            awaits_blocks = not scheduler.head_fits()
            count = count if awaits_blocks else 1
    count = min([count, *(r.request.total_tokens - r.written for r in step.decode)])
    new: list[tuple[int, int]] = []
    if count > 1:
        size = scheduler.block_size
        for place, running in enumerate(step.decode):
            first = len(running.blocks) * size - running.written
            new += ((n, place) for n in range(first, count, size))
        new.sort()
        if len(new) > scheduler.pool.free:
            count = new[scheduler.pool.free][0]  # that step preempts
            new = [one for one in new if one[0] < count]
    used = np.full(count, scheduler.pool.used)
    for n, _ in new:
        used[n:] += 1
    return Run(step, count, new, used, until_ms, awaits_blocks)


def _steps_of_chunk(scheduler: Scheduler, step: Step) -> int:
    """How many steps compute as many prompt tokens of the same request as this one."""
    if not step.decode or scheduler.drafts:
        return 1
    if not step.prefill:
        return MOST_STEPS
    running, _, tokens = step.prefill[0]
    return running.missing // tokens if tokens == scheduler.chunk_tokens else 1
