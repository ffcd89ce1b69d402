# SPDX-License-Identifier: Apache-2.0
"""Offload sampled: some requests and layers are real, the others are estimated by them.

A seeded sample of requests and layers is served by the decode engine, without a clock.  The others
take what the sample missed (`MissTable`), and `StepClock` adds up what a step takes.

Until the first request of the sample decodes, the first ones admitted are real in its place: they
teach what nobody else has yet, and count for themselves alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore.offload.decode.result import StepResult
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.report.step_trace import StepTrace
from kvcore.replay.serving.miss_table import MissTable
from kvcore.replay.serving.offloaded import Decoding, Offloaded
from kvcore.replay.serving.real_decode import RealDecode
from kvcore.replay.serving.scheduler import Running, Step
from kvcore.replay.traces.reader import TraceRequest

__all__ = ["OffloadedSampled"]

REAL_PLACES = 4


class OffloadedSampled(Offloaded):
    """Up to four requests at a time are real, each with blocks of its own."""

    def __init__(self, model: ModelProfile, options: OffloadOptions) -> None:
        super().__init__(model, options)
        self._table = MissTable()
        self._trace = StepTrace(options.max_trace_events)

    def _take(self, requests: Sequence[TraceRequest]) -> RealDecode:
        places = min(REAL_PLACES, self.options.batch, len(requests))
        self._free_places = list(range(places - 1, -1, -1))
        self._blocks = self._scheduler.tables.shape[1]  # of a place
        self._sample = set(_spread(requests, self.options))
        groups = _real_groups(self.model, self.options)
        return RealDecode(
            self.model,
            self.options,
            self.profile,
            self.pool_entries,
            layers=[layer for group in groups.values() for layer in group],
            groups=groups,
            blocks=places * self._blocks,
            places=places,
            max_tokens=max(request.total_tokens for request in requests) + 1,
            timed=False,
        )

    @property
    def now_us(self) -> float:
        """The time of the steps' arithmetic."""
        return self.clock.now

    def _wait(self, us: float) -> None:
        self.clock.advance(us)

    # -- who is real ------------------------------------------------------------------------

    def _make_real(self, running: Running, state: Decoding) -> None:
        request = running.request
        sampled = request.index in self._sample
        if sampled and not self._free_places:
            self._dismiss_substitutes(1)
        if (sampled or not self._table.samples) and self._free_places:
            state.real, state.place = True, self._free_places.pop()
            state.substitute = not sampled
            first = state.place * self._blocks
            state.own_table = np.arange(first, first + self._blocks)
            # The request that computed the prefix may not be real: its bytes are put here now.
            self.real.place(request, state.own_table, 0, running.written)

    def _dismiss_substitutes(self, count: int) -> None:
        """Let so many requests that only stood in for the sample go on without bytes."""
        of = [(index, state) for index, state in self._decoding.items() if state.substitute]
        for index, state in of[:count]:
            if state.admitted:
                self.real.engine.abort_blocking(index)
                state.admitted = False
            self.real.rows.drop(index)
            self._give_place_back(state)

    def _give_place_back(self, state: Decoding) -> None:
        if state.place >= 0:
            self._free_places.append(state.place)
            state.place, state.real, state.own_table = -1, False, None
            state.substitute = False

    # -- a step -----------------------------------------------------------------------------

    def copy_block(self, source: int, target: int) -> int:
        """Account for a block that is copied on the host; returns the bytes."""
        return self.options.block_size * self.model.row_bytes * self.model.layers

    def _prefill(self, step: Step, count: int, us: float | None) -> None:
        for running, first, tokens in step.prefill:
            if self._decoding[running.request.index].real:
                self.real.place(running.request, self._table_of(running), first, tokens)
        self.clock.advance(us or 0.0)
        if us:
            self._trace.add("prefill", self.now_us, us, prompt_tokens=count)

    def _layer_us(self, compute_us: float) -> float:
        return 0.0

    def _rows(
        self,
        who: Sequence[Running],
        states: Sequence[Decoding],
        contexts: NDArray[np.int64],
        tokens: NDArray[np.int64],
        result: StepResult | None,
    ) -> NDArray[np.float64]:
        ages = np.array([state.age for state in states], np.int64)
        wanted = tokens * np.minimum(contexts + tokens, self.model.topk)
        # What is real teaches first: the others of the very step are to know of it.
        found: dict[int, NDArray[np.float64]] = {}
        for place, running in enumerate(who if result is not None else ()):
            assert result is not None
            own = result.requests.get(running.request.index)
            if own is None:
                continue
            mean = np.array((own.hits, own.misses, own.recent), np.float64).mean(axis=1)
            found[place] = mean
            self._table.learn(
                int(contexts[place]), int(ages[place]), int(wanted[place]), tuple(mean),
                substitute=states[place].substitute,
            )  # fmt: skip
        shares = self._table.shares(contexts, ages) * wanted[:, None]
        for place, mean in found.items():
            shares[place] = mean  # its own, and no more than that
        if self._table.samples:
            self._dismiss_substitutes(REAL_PLACES)
        rows = np.zeros((len(self.model.groups), 3))
        rows += shares.sum(axis=0)
        return rows

    def _step_us(self, result: StepResult | None, us: float) -> float:
        return us

    def _traced(self, us: float, batch: int, misses: float) -> None:
        if self.options.max_trace_events:
            self._trace.add(
                "decode step", self.now_us, us, batch=batch,
                misses=round(misses), host_blocks=self._scheduler.pool.used,
            )  # fmt: skip

    def _last_look(self) -> None:
        self.totals.end_us = self.clock.now

    def save_trace(self, path: str) -> int:
        """Write a span a step for Perfetto; returns how many did not fit."""
        self._trace.save(path, f"{self.model.name} on {self.profile.name}, sampled")
        return self._trace.dropped


def _spread(requests: Sequence[TraceRequest], options: OffloadOptions) -> list[int]:
    """Requests of all lengths, evenly; where the first one lies is drawn."""
    count = min(options.sample_requests, len(requests))
    draw = np.random.default_rng([0x7361, options.seed])
    ordered = sorted(requests, key=lambda request: (request.total_tokens, request.index))
    places = ((np.arange(count) + draw.random(count)) * len(requests) / count).astype(np.int64)
    return [ordered[place].index for place in places.tolist()]


def _real_groups(model: ModelProfile, options: OffloadOptions) -> dict[int, tuple[int, ...]]:
    """One layer of each of some groups, by the number of the group."""
    draw = np.random.default_rng([0x6C61, options.seed])
    count = min(options.sample_layers, len(model.groups))
    chosen = sorted(draw.choice(len(model.groups), count, replace=False).tolist())
    groups: dict[int, tuple[int, ...]] = {}
    for group in chosen:
        layers = model.groups[group]
        groups[group] = (layers[int(draw.integers(len(layers)))],)
    return groups
