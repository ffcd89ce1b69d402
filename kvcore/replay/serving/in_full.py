# SPDX-License-Identifier: Apache-2.0
"""Offload in full: every request and layer is real, on the model clock of the decode engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore.offload.decode.result import StepResult
from kvcore.replay.serving.decoding import Decoding
from kvcore.replay.serving.offloaded import Offloaded, StepLoad
from kvcore.replay.serving.real_decode import RealDecode, check_host_memory
from kvcore.replay.serving.samples import sample_positions
from kvcore.replay.serving.scheduler import Running, Step
from kvcore.replay.traces.reader import TraceRequest

__all__ = ["OffloadedInFull"]


class OffloadedInFull(Offloaded):
    """Rows are planned, served, installed and written; a step takes what the device's clock says.

    The block tables are the scheduler's own, so blocks are shared, copied and given back together
    with their bytes.
    """

    def _check_memory(self) -> None:
        model, options = self.model, self.options
        check_host_memory(model, options, model.layers, options.host_blocks)

    def _take(self, requests: Sequence[TraceRequest]) -> None:
        model = self.model
        self.real: RealDecode = RealDecode(
            model,
            self.options,
            self.profile,
            self.pool_entries,
            layers=range(model.layers),
            groups=dict(enumerate(model.groups)),
            blocks=self.options.host_blocks,
            places=min(self.options.batch, len(requests)),
            max_tokens=max(request.total_tokens for request in requests) + 1,
            timed=True,
            ids=self.ids,
        )

    @property
    def now_us(self) -> float:
        """The time of the device's clock; of `clock` where the deployment serves in order."""
        return self.clock.now if self._in_order else self.real.device.now

    def _wait(self, us: float) -> None:
        if self._in_order:
            self.clock.advance(us)
        compute = self.real.engine.streams["compute"]
        compute.compute(us, "idle")
        compute.synchronize_blocking()

    def admitted(self, running: Running) -> None:
        """A request begins, or goes on after a preemption."""
        super().admitted(running)
        self.real.rows.add(running.request)

    def copy_block(self, source: int, target: int) -> int:
        """Copy a block of every layer on the host; returns the bytes."""
        return self.real.copy_block(source, target)

    def _prefill(self, step: Step, count: int, us: float | None) -> None:
        for running, first, tokens in step.prefill:
            if us is None:
                self.real.place(running.request, self._scheduler.tables[running.row], first, tokens)
            else:
                table = self._scheduler.tables[running.row]
                self.real.prefill(running.request, table, first, tokens, us * tokens / count)
        if us is not None:
            self.real.order_prompts()
            if self._in_order:
                self.clock.advance(us)
        if not step.decode:
            self.real.engine.streams["compute"].synchronize_blocking()

    def _move(
        self, load: StepLoad, states: Sequence[Decoding]
    ) -> tuple[NDArray[np.float64], StepResult]:
        writes: dict[int, int] = {}
        stay: dict[int, int] = {}
        for place, (running, state) in enumerate(zip(load.who, states, strict=True)):
            index = running.request.index
            if not state.admitted:
                state.admitted = True
                table = self._scheduler.tables[running.row]
                self.real.engine.admit(index, table, running.written)
            writes[index], stay[index] = int(load.tokens[place]), load.stands[place]
        self.real.layer_us = self._layer_us(load)
        result = self.real.step(list(writes), writes, stay)
        rows = np.zeros((len(self.model.groups), 3))
        for part in result.requests.values():
            rows += np.array((part.hits, part.misses, part.recent), np.float64).T
        return rows, result

    def _step_us(self, result: StepResult | None, us: float) -> float:
        return us if result is None or self._in_order else result.us

    def _traced(self, us: float, batch: int, misses: float) -> None:
        pass  # the device's trace holds every operation

    # -- leaving ----------------------------------------------------------------------------

    def _preempted(self, running: Running) -> None:
        state = self._decoding[running.request.index]
        if state.admitted:
            state.admitted = False
            self.real.engine.preempt_blocking(running.request.index)

    def leaving(self, running: Running, *, finished: bool) -> None:
        """End the engine's work for the request."""
        if self._decoding[running.request.index].admitted:
            engine = self.real.engine
            leave = engine.evict_blocking if finished else engine.abort_blocking
            leave(running.request.index)

    def left(self, running: Running, *, finished: bool) -> None:
        """Forget the request."""
        super().left(running, finished=finished)
        self.real.rows.drop(running.request.index)

    def verify(self, running: Running, count: int) -> None:
        """Compare rows on the host, once all copies to it have arrived."""
        if self.options.prefill_tokens_per_s is not None:
            self.real.device.synchronize_blocking()
        draw = self._verify_draw
        positions = sample_positions(draw, running, count)
        table = self._scheduler.tables[running.row]
        self.real.verify(running.request, table, positions, draw)

    def _last_look(self) -> None:
        self.totals.end_us = self.now_us
        self.totals.busy = self.real.device.busy

    def save_trace(self, path: str) -> int:
        """Write every operation of every stream for Perfetto; returns how many did not fit."""
        self.real.device.trace.save(path)
        return self.real.device.trace.dropped_events
