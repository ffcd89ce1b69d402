# SPDX-License-Identifier: Apache-2.0
"""A replay that moves no rows itself: `StepClock` adds up what its steps take."""

from __future__ import annotations

from kvcore.offload.decode.result import StepResult
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.report.step_trace import StepTrace
from kvcore.replay.serving.offloaded import Offloaded
from kvcore.replay.serving.scheduler import Running, Step

__all__ = ["Accounted"]


class Accounted(Offloaded):
    """Every request, block and step is accounted for, none of their bytes are there."""

    how: str

    def __init__(self, model: ModelProfile | Deployment, options: OffloadOptions) -> None:
        super().__init__(model, options)
        self._trace = StepTrace(options.max_trace_events)

    @property
    def now_us(self) -> float:
        """The time of the steps' arithmetic."""
        return self.clock.now

    def _wait(self, us: float) -> None:
        self.clock.advance(us)

    def copy_block(self, source: int, target: int) -> int:
        """Account for a block that is copied; returns the bytes."""
        return self.options.block_size * self.model.row_bytes * self.model.layers

    def _prefill(self, step: Step, count: int, us: float | None) -> None:
        self.clock.advance(us or 0.0)
        if us:
            self._trace.add("prefill", self.now_us, us, prompt_tokens=count)

    def _step_us(self, result: StepResult | None, us: float) -> float:
        return us

    def _traced(self, us: float, batch: int, misses: float) -> None:
        if self.options.max_trace_events:
            self._trace.add(
                "decode step", self.now_us, us, batch=batch,
                misses=round(misses), host_blocks=self._scheduler.pool.used,
            )  # fmt: skip

    def verify(self, running: Running, count: int) -> None:
        """Nothing: there are no bytes of the request."""

    def _last_look(self) -> None:
        self.totals.end_us = self.clock.now

    def save_trace(self, path: str) -> int:
        """Write a span a step for Perfetto; returns how many did not fit."""
        self._trace.save(path, f"{self.model.name} on {self.profile.name}, {self.how}")
        return self._trace.dropped
