# SPDX-License-Identifier: Apache-2.0
"""Tokens a second by batch, with and without offload: from which batch on offload is ahead.

A run says what a step of one request is on average: its context, the tokens that it writes and
those that stand, and the rows that it is served from the pool and from the host.  A batch of such
requests is priced by the arithmetic that the run itself is priced by, so the curve passes close to
the run at the run's own mean batch.  Prompts are not in it: it is of decoding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcore.offload.decode.write_policy import make_write_policy
from kvcore.replay.clock.compute_time import ComputeTime
from kvcore.replay.clock.in_order import InOrderClock
from kvcore.replay.clock.step_clock import StepClock
from kvcore.replay.serving.fit import device_blocks, held_bytes, weight_bytes

if TYPE_CHECKING:
    from kvcore.replay.report.offloaded import OffloadReport
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["MOST", "BatchCurve", "break_even", "largest_batch", "mean_context"]

MOST = 4096
#: Steps on a fresh time line until one follows another as in a long run.
SETTLED = 3


def mean_context(requests: Sequence[TraceRequest]) -> float:
    """Tokens in the cache of a request, on average over all steps that decode."""
    steps = sum(r.output_length for r in requests)
    held = sum(r.output_length * (r.input_length + r.output_length / 2) for r in requests)
    return held / steps if steps else 0.0


class BatchCurve:
    """Tokens a second of decoding, by batch, of requests like those of a run.

    report:  of a run that has decoded.
    context: tokens that a request has on average.
    """

    def __init__(self, report: OffloadReport, context: float) -> None:
        totals, model, options = report.totals, report.model, report.options
        self._report, self._context = report, round(context)
        each = max(1, totals.request_steps)
        self._written, self._accepted = totals.written / each, totals.accepted / each
        self._groups = model.groups or (tuple(range(model.layers)),)
        rows = np.array((totals.hits, totals.misses, totals.recent)) / each / model.layers
        self._in_order = report.deployment.serve == "in order"
        if self._in_order and model.topk:
            # Each query is served its own rows; what several want is read once.
            wanted = self._written * min(self._context + self._written, model.topk)
            rows[:] = max(0.0, wanted - rows[1]) if rows.any() else 0.0, rows[1], 0.0
        self._rows = rows
        self._plan_us = report.deployment.own("plan_group") * len(model.groups)
        self._compute = ComputeTime(report.deployment, options.drafts)
        self._pieces = make_write_policy(options.write_policy).pieces
        self._lanes = sum(n > 0 for n in model.shape.row_bytes)

    def tokens_per_s(self, batch: int) -> float:
        """Of a batch that decodes and does nothing else."""
        report = self._report
        clock: StepClock | InOrderClock = (
            InOrderClock(report.deployment, lanes=self._lanes)
            if self._in_order
            else StepClock(report.model, report.device, self._groups, lanes=self._lanes)
        )
        rows = np.tile(self._rows * batch, (len(self._groups), 1))
        compute_us = self._compute.of(np.full(batch, self._context, np.int64)).us
        if not self._in_order and not report.on_device:
            compute_us += self._plan_us
        written = batch * self._written
        sent = 0.0 if report.on_device else written
        pieces = self._pieces(round(written), batch) if sent else 0
        us = 0.0
        for _ in range(SETTLED):
            us = clock.step(rows, written, sent, pieces, compute_us / report.model.layers).us
        return batch * self._accepted / us * 1e6

    def points(self, most: int) -> list[tuple[int, float]]:
        """(batch, tokens a second) at powers of two up to ``most``, and there."""
        batches = [b for b in (2**n for n in range(13)) if b < most]
        return [(batch, self.tokens_per_s(batch)) for batch in (*batches, most)]


def largest_batch(report: OffloadReport, requests: Sequence[TraceRequest]) -> int:
    """Requests of the mean size that fit the device at a time, at most 4,096."""
    model, options = report.model, report.options
    if report.on_device:
        tokens = sum(r.total_tokens for r in requests) / len(requests)
        held = -(-int(tokens) // options.block_size)
        fits = device_blocks(model, options, report.device) // max(1, held)
    else:
        room = report.device.capacity_bytes - (weight_bytes(model, options) or 0)
        tokens = round(mean_context(requests))
        each = held_bytes(report.deployment, options, report.pool_entries, 1, tokens)
        fits = room // max(1, each)
    return max(1, min(MOST, int(fits)))


def break_even(rate_of: Callable[[int], float], wanted: float, most: int) -> int | None:
    """The least batch up to ``most`` at which ``rate_of`` reaches ``wanted``; None: at none.

    The rate grows with the batch.
    """
    if rate_of(most) < wanted:
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if rate_of(middle) < wanted:
            low = middle
        else:
            high = middle
    return high
