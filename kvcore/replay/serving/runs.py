# SPDX-License-Identifier: Apache-2.0
"""A run: the steps between two events of a schedule, which repeat one another.

Between two events (an arrival, an end, the last chunk of a prompt, a preemption, an abort) the
batch stays the same.  Each step then writes one more token of each request that decodes and one
more whole chunk of the oldest prompt.  New blocks are taken at block boundaries, in the order in
which single steps would take them.  So a strategy can sum such steps, and the scheduler commits
them together.
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

#: The longest run, so that progress is shown often and memory stays bounded.
MOST_STEPS = 256


@dataclass(frozen=True, slots=True)
class Run:
    """A planned step, and how often it can be repeated.

    count:    number of steps, the planned one included.
    new:      (step, place among the decoding requests) of each block that is needed, in order;
              those of the planned step are taken already.
    used:     int64 [count] blocks that are held in each step.
    until_ms: when the next request arrives: no step but the first begins then or later.
    awaits_blocks: whether the head of the queue has arrived and the pool lacks blocks for it.
    """

    step: Step
    count: int
    new: list[tuple[int, int]]
    used: NDArray[np.int64]
    until_ms: float
    awaits_blocks: bool


def run_of(scheduler: Scheduler, step: Step, most: int, now_ms: float | None) -> Run:
    """The run that begins with a step that was planned and not committed.

    most: steps until an event that the scheduler does not know of, such as an abort; at least 1.
    """
    count = min(most, MOST_STEPS, _steps_of_chunk(scheduler, step))
    until_ms, awaits_blocks = math.inf, False
    if count > 1 and scheduler.has_room and not step.prefill:
        arrives = scheduler.next_arrival_ms
        if arrives is not None and now_ms is not None and arrives > now_ms:
            until_ms = arrives
        elif arrives is not None:
            # Until a request leaves, free blocks only become fewer, so a head that does not fit now
            # does not fit later in the run.
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
