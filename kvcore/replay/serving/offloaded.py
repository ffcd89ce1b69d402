# SPDX-License-Identifier: Apache-2.0
"""Serve a trace with the full cache on the host of a modelled device.

Two strategies share what is here: schedule, accepted drafts, aborts, ids, bytes and the compute
time of a step are the same in both.  They differ in who is real:

`OffloadedInFull`   every request and layer: rows are planned, served, installed and written by the
                    decode engine on the model clock (`in_full`).
`OffloadedSampled`  a seeded sample of requests and layers, without a clock: the others are
                    estimated (`sampled`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.blocks.pool import BlockPool
from kvcore.offload.decode.result import StepResult
from kvcore.offload.decode.write_policy import make_write_policy
from kvcore.replay.clock.compute_time import ComputeTime
from kvcore.replay.clock.step_clock import StepClock
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.report.offloaded import OffloadReport, OffloadTotals, Timeline
from kvcore.replay.report.report import Mismatch, Outcome
from kvcore.replay.serving.fit import device_bytes, fit
from kvcore.replay.serving.real_decode import RealDecode
from kvcore.replay.serving.samples import sample_positions
from kvcore.replay.serving.scheduler import Running, Scheduler, Step
from kvcore.replay.serving.strategy import Strategy, Timings
from kvcore.replay.traces.reader import TraceRequest

__all__ = ["Decoding", "Offloaded"]

MAX_ARRIVAL_MS = 1e9  # eleven days: what a stream waits at one time


class Decoding:
    """A request that runs, as an offloaded replay sees it.

    real:       its rows are moved by the decode engine; admitted: which has it now.
    age:        steps since it was admitted last.
    place:      of the sampled strategy's places, -1 for none; own_table: its blocks there.
    substitute: it is real until the first request of the sample decodes.
    """

    __slots__ = (
        "abort_at", "admitted", "age", "draw", "own_table", "place", "real", "substitute",
    )  # fmt: skip

    def __init__(self, request: TraceRequest, options: OffloadOptions) -> None:
        self.age = 0
        self.real = self.admitted = False
        self.substitute = False
        self.place = -1
        self.own_table: NDArray[np.int64] | None = None
        self.draw = np.random.default_rng([0x6465, options.seed, request.index])
        # Drawn even when nobody is aborted, so that the drafts that follow are the same.
        aborted, where = self.draw.random(2)
        self.abort_at = request.total_tokens + 1
        if aborted < options.abort_share and request.output_length > 1:
            self.abort_at = request.input_length + 1 + int(where * (request.output_length - 1))

    def stands(self, tokens: int, accept: float) -> int:
        """How many of the tokens a step writes will stand: drafts, up to the first rejected."""
        count = 1
        while count < tokens and self.draw.random() < accept:
            count += 1
        return count


class Offloaded(Strategy[OffloadReport]):
    """What the two strategies have in common.

    totals, timeline: sums over the steps, and the steps over the model's time.
    real:             what the decode engine serves, a sample or all.
    Raises ParamInvalidError for what cannot be served, DeviceOutOfMemoryError for caches that do
    not fit; before any work.
    """

    def __init__(self, model: ModelProfile, options: OffloadOptions) -> None:
        if not isinstance(options, OffloadOptions):
            fail("options", "OffloadOptions", type(options).__name__)
        self.model, self.options = model, options
        self.profile, self.pool_entries = fit(model, options)
        self._write_policy = make_write_policy(options.write_policy)
        self._compute = ComputeTime(model, options.drafts)
        self.verify_samples = options.verify_samples // 2  # the others are of rows as served
        self.times = Timings()
        self.totals, self.timeline = OffloadTotals(), Timeline()
        self._decoding: dict[int, Decoding] = {}
        self._verify_draw = np.random.default_rng([0x7666, options.seed])
        self._closed = False

    def begin(self, requests: Sequence[TraceRequest]) -> Scheduler:
        """Take blocks, caches and a device for the requests."""
        if not requests:
            fail("requests", "at least one", "none")
        options = self.options
        last = max(request.timestamp_ms for request in requests)
        if options.arrivals == "time" and last > MAX_ARRIVAL_MS:
            fail("timestamp", f"at most {MAX_ARRIVAL_MS:.0e} ms with arrivals by time", last)
        self._check_memory()  # before there is a pool of as many blocks
        self._scheduler = Scheduler(
            requests,
            BlockPool(options.host_blocks),
            block_size=options.block_size,
            max_batch=options.batch,
            chunk_tokens=options.chunk,
            drafts=options.drafts,
            before_preempt=self._preempted,
        )
        self.real = self._take(requests)
        lanes = sum(n > 0 for n in self.model.shape.row_bytes)
        self.clock = StepClock(self.model, self.profile, self.model.groups, lanes=lanes)
        return self._scheduler

    # -- what the two do in their own way ---------------------------------------------------

    def _check_memory(self) -> None:
        """Raise DeviceOutOfMemoryError for host blocks that this machine cannot hold."""

    @abstractmethod
    def _take(self, requests: Sequence[TraceRequest]) -> RealDecode:
        """Caches, device and engine for what is real."""

    @property
    @abstractmethod
    def now_us(self) -> float:
        """The model's time."""

    @abstractmethod
    def _wait(self, us: float) -> None:
        """Let the device do nothing for so long."""

    @abstractmethod
    def _prefill(self, step: Step, count: int, us: float | None) -> None:
        """Compute ``count`` prompt tokens of the step in ``us``; None: another device did."""

    @abstractmethod
    def _layer_us(self, compute_us: float) -> float:
        """Compute time that the engine is to launch for each layer."""

    @abstractmethod
    def _rows(
        self,
        who: Sequence[Running],
        states: Sequence[Decoding],
        contexts: NDArray[np.int64],
        tokens: NDArray[np.int64],
        result: StepResult | None,
    ) -> NDArray[np.float64]:
        """[groups, (hits, misses, recent)] rows of the batch."""

    @abstractmethod
    def _step_us(self, result: StepResult | None, us: float) -> float:
        """How long a step took; ``us`` by the arithmetic of `StepClock`."""

    @abstractmethod
    def _traced(self, us: float, batch: int, misses: float) -> None:
        """A step that decodes has ended now."""

    @abstractmethod
    def save_trace(self, path: str) -> int:
        """Write the spans for Perfetto; returns how many did not fit ``max_trace_events``."""

    # -- a step -----------------------------------------------------------------------------

    @property
    def now_ms(self) -> float | None:
        """The model's time where requests arrive by time; None: all are there at once."""
        return self.now_us / 1e3 if self.options.arrivals == "time" else None

    def idle_until(self, ms: float) -> None:
        """Let the device wait until the next request arrives."""
        us = max(0.0, ms * 1e3 - self.now_us) + 1.0
        self.totals.idle_us += us
        self._wait(us)

    def admitted(self, running: Running) -> None:
        """A request begins, or goes on after a preemption."""
        state = self._decoding.get(running.request.index)
        if state is None:
            state = Decoding(running.request, self.options)
            self._decoding[running.request.index] = state
        state.age = 0
        self._make_real(running, state)

    @abstractmethod
    def _make_real(self, running: Running, state: Decoding) -> None:
        """Decide whether a request that was just admitted is real."""

    def serve(self, step: Step) -> list[int]:
        """Prefill and decode what the step says; returns how many tokens of each stand."""
        if step.prefill:
            rate, totals = self.options.prefill_tokens_per_s, self.totals
            count = sum(part[2] for part in step.prefill)
            nbytes = count * self.model.row_bytes * self.model.layers
            us = None
            if rate is None:
                totals.received_bytes += nbytes
            else:
                us = count / rate * 1e6
                totals.prefill_us += us
                totals.prefill_bytes += nbytes
            self._prefill(step, count, us)
        accepted = self._decode(step) if step.decode else []
        self.totals.peak_host_blocks = self._scheduler.pool.peak_used
        return accepted

    def _table_of(self, running: Running) -> NDArray[np.int64]:
        own = self._decoding[running.request.index].own_table
        return own if own is not None else self._scheduler.tables[running.row]

    def _decode(self, step: Step) -> list[int]:
        who, options, model = step.decode, self.options, self.model
        states = [self._decoding[running.request.index] for running in who]
        stands = [
            state.stands(tokens, options.accept)
            for state, tokens in zip(states, step.tokens, strict=True)
        ]
        contexts = np.array([running.written for running in who], np.int64)
        tokens = np.array(step.tokens, np.int64)
        compute = self._compute.of(contexts)
        compute_us = compute.us
        result = self._real_step(who, states, step.tokens, stands, compute_us)
        rows = self._rows(who, states, contexts, tokens, result)
        written = int(tokens.sum())
        pieces = self._write_policy.pieces(written, len(who))
        times = self.clock.step(rows, written, written, pieces, compute_us / model.layers)
        us = self._step_us(result, times.us)
        sizes = np.array([len(group) for group in model.groups], np.float64)
        moved = rows.T @ sizes
        totals = self.totals
        totals.add_step(
            us, times, len(who), sum(stands), written, tuple(moved.tolist()),
            model.row_bytes, model.layers, compute_us,
        )  # fmt: skip
        for part_us in compute.assumed:
            totals.assumed_compute_us += part_us
        if result is not None:
            totals.real_rows += result.rows
        held = len(who) * device_bytes(model, options, self.pool_entries, 0)
        held += int(contexts.sum()) * model.token_index_bytes
        totals.peak_device_bytes = max(totals.peak_device_bytes, held)
        asked = float(moved[0] + moved[1])
        self.timeline.add(
            self.now_us, us, float(moved[0]) / asked if asked else 1.0, len(who),
            self._scheduler.pool.used,
        )  # fmt: skip
        self._traced(us, len(who), float(moved[1]))
        for state in states:
            state.age += 1
        return stands

    def _real_step(
        self,
        who: Sequence[Running],
        states: Sequence[Decoding],
        tokens: Sequence[int],
        stands: Sequence[int],
        compute_us: float,
    ) -> StepResult | None:
        names: list[int] = []
        writes: dict[int, int] = {}
        stay: dict[int, int] = {}
        engine = self.real.engine
        for running, state, count, stand in zip(who, states, tokens, stands, strict=True):
            if not state.real:
                continue
            index = running.request.index
            if not state.admitted:
                state.admitted = True
                engine.admit(index, self._table_of(running), running.written)
            names.append(index)
            writes[index], stay[index] = count, stand
        if not names:
            return None
        self.real.layer_us = self._layer_us(compute_us)
        return self.real.step(names, writes, stay)

    # -- leaving ----------------------------------------------------------------------------

    def is_aborted(self, running: Running) -> bool:
        """Whether the request has come to where it is aborted."""
        state = self._decoding.get(running.request.index)
        return state is not None and running.written >= state.abort_at

    def _preempted(self, running: Running) -> None:
        """Before its blocks are given back: what it wrote must be on the host."""
        state = self._decoding[running.request.index]
        if state.admitted:
            state.admitted = False
            self.real.engine.preempt_blocking(running.request.index)
        self._give_place_back(state)

    def leaving(self, running: Running, *, finished: bool) -> None:
        """Let the engine end what it does for the request."""
        if self._decoding[running.request.index].admitted:
            engine = self.real.engine
            leave = engine.evict_blocking if finished else engine.abort_blocking
            leave(running.request.index)

    def left(self, running: Running, *, finished: bool) -> None:
        """Forget the request."""
        state = self._decoding.pop(running.request.index)
        self.real.rows.drop(running.request.index)
        self._give_place_back(state)

    def _give_place_back(self, state: Decoding) -> None:
        """The request's place among the real ones, if it has one, is another's now."""

    def verify(self, running: Running, count: int) -> None:
        """Compare rows on the host with what they must be, of a request that is real."""
        if self._decoding[running.request.index].real:
            draw = self._verify_draw
            positions = sample_positions(draw, running, count)
            self.real.verify(running.request, self._table_of(running), positions, draw)

    def close(self) -> None:
        """Give memory and threads back."""
        if not self._closed:
            self._closed = True
            self._last_look()
            self.real.close()

    def _last_look(self) -> None:
        """The device is about to be left: note what it alone can say."""

    # -- reporting --------------------------------------------------------------------------

    @property
    def verified(self) -> int:  # type: ignore[override]
        """Samples compared so far."""
        return self.real.verified

    @property
    def mismatches(self) -> list[Mismatch]:  # type: ignore[override]
        """Rows of them that were wrong."""
        return self.real.mismatches

    def report(self, outcome: Outcome) -> OffloadReport:
        """The figures so far."""
        if not self._closed:
            self.totals.end_us = self.now_us
        return OffloadReport(
            **outcome.fields(),
            model=self.model,
            device=self.profile,
            options=self.options,
            pool_entries=self.pool_entries,
            host_capacity=self._scheduler.pool.capacity,
            totals=self.totals,
            timeline=self.timeline,
            elapsed_ns=self.times.elapsed_ns,
        )
