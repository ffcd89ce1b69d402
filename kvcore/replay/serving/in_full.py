# SPDX-License-Identifier: Apache-2.0
"""Offload in full: every request and layer is real, on the model clock of the decode engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore.offload.decode.result import StepResult
from kvcore.replay.serving.offloaded import Decoding, Offloaded
from kvcore.replay.serving.real_decode import RealDecode, check_host_memory
from kvcore.replay.serving.scheduler import Running, Step
from kvcore.replay.traces.reader import TraceRequest

__all__ = ["OffloadedInFull"]


class OffloadedInFull(Offloaded):
    """Rows are planned, served, installed and written; a step takes what the device's clock says.

    The block tables are the scheduler's own, so blocks are shared, copied and given back with their
    bytes.
    """

    def _check_memory(self) -> None:
        model, options = self.model, self.options
        check_host_memory(model, options, model.layers, options.host_blocks)

    def _take(self, requests: Sequence[TraceRequest]) -> RealDecode:
        model = self.model
        return RealDecode(
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
        )

    @property
    def now_us(self) -> float:
        """The time of the device's clock."""
        return self.real.device.now

    def _wait(self, us: float) -> None:
        compute = self.real.engine.streams["compute"]
        compute.compute(us, "idle")
        compute.synchronize_blocking()

    def _make_real(self, running: Running, state: Decoding) -> None:
        self.real.rows.add(running.request)
        state.real = True

    def copy_block(self, source: int, target: int) -> int:
        """Copy a block of every layer on the host; returns the bytes."""
        return self.real.copy_block(source, target)

    def _prefill(self, step: Step, count: int, us: float | None) -> None:
        for running, first, tokens in step.prefill:
            if us is None:
                self.real.place(running.request, self._table_of(running), first, tokens)
            else:
                table = self._scheduler.tables[running.row]
                self.real.prefill(running.request, table, first, tokens, us * tokens / count)
        if us is not None:
            self.real.order_prompts()
        if not step.decode:
            self.real.engine.streams["compute"].synchronize_blocking()

    def _layer_us(self, compute_us: float) -> float:
        return compute_us / self.model.layers

    def _rows(
        self,
        who: Sequence[Running],
        states: Sequence[Decoding],
        contexts: NDArray[np.int64],
        tokens: NDArray[np.int64],
        result: StepResult | None,
    ) -> NDArray[np.float64]:
        assert result is not None
        rows = np.zeros((len(self.model.groups), 3))
        for part in result.requests.values():
            rows += np.array((part.hits, part.misses, part.recent), np.float64).T
        return rows

    def _step_us(self, result: StepResult | None, us: float) -> float:
        return us if result is None else result.us

    def _traced(self, us: float, batch: int, misses: float) -> None:
        pass  # the device's trace has every operation

    def verify(self, running: Running, count: int) -> None:
        """Compare rows on the host, once what is on its way there has come."""
        if self.options.prefill_tokens_per_s is not None:
            self.real.device.synchronize_blocking()
        super().verify(running, count)

    def _last_look(self) -> None:
        self.totals.end_us = self.real.device.now
        self.totals.busy = self.real.device.busy

    def save_trace(self, path: str) -> int:
        """Write every operation of every stream for Perfetto; returns how many did not fit."""
        self.real.device.trace.save(path)
        return self.real.device.trace.dropped_events
