# SPDX-License-Identifier: Apache-2.0
"""Serve a trace with the full cache on the host of a modelled device.

The strategies share what is here: schedule, accepted drafts, aborts, ids, bytes and the compute
time of a step are the same in all of them.  They differ in which requests are real:

`OffloadedInFull`   every request and layer: rows are planned, served, installed and written by the
                    decode engine on the model clock (`in_full`).
`OffloadedSampled`  a seeded sample of requests and layers, without a clock: the others are
                    estimated (`sampled`).
`OnDevice`          none: the baseline without offload (`on_device`).
`Tiered`            none: the same, with slower tiers for the blocks of prompts (`tiered`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.blocks.pool import BlockPool
from kvcore.offload.decode.result import StepResult
from kvcore.offload.decode.write_policy import make_write_policy
from kvcore.replay.clock.compute_time import ComputeTime
from kvcore.replay.clock.in_order import InOrderClock
from kvcore.replay.clock.prefill_time import PrefillTime
from kvcore.replay.clock.step_clock import StepClock
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.metrics.latency import Latencies, Progress, Slo
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.report.offloaded import OffloadReport
from kvcore.replay.report.report import Mismatch, Outcome
from kvcore.replay.report.totals import OffloadTotals, Timeline
from kvcore.replay.serving.decoding import Decoding
from kvcore.replay.serving.fit import deployment_of, fit, held_bytes, ids_of
from kvcore.replay.serving.interval import Interval
from kvcore.replay.serving.real_decode import RealDecode
from kvcore.replay.serving.scheduler import Running, Scheduler, Step
from kvcore.replay.serving.strategy import Strategy, Timings
from kvcore.replay.traces.made_ids import MadeIds
from kvcore.replay.traces.reader import TraceRequest
from kvcore.replay.traces.recorded_ids import RecordedIds
from kvcore.runtime.profile import DeviceProfile

__all__ = ["Offloaded", "StepLoad"]

ALL_TOKENS = 2**62
MAX_ARRIVAL_MS = 1e9  # eleven days: the longest single wait of a stream


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A step that decodes, with all that its price depends on.

    who:        the requests.
    contexts:   int64 [batch] tokens that each request has.
    tokens:     int64 [batch] tokens that each writes.
    stands:     how many of these are accepted.
    compute_us: compute time of the whole step.
    """

    who: Sequence[Running]
    contexts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    stands: Sequence[int]
    compute_us: float


class Offloaded(Strategy[OffloadReport]):
    """What the strategies have in common.

    totals, timeline: sums over the steps, and the steps over the model's time.
    real:             the requests that the decode engine serves, a sample or all.
    groups:           groups of layers that move the same rows.
    ids:              source of the ids that a step selects; None: the default generator.
    sends_to_host:    whether rows go to the host at all.
    loads:            whether blocks of a prompt come from elsewhere (`_load`).
    Raises ParamInvalidError for what cannot be served, DeviceOutOfMemoryError for caches that do
    not fit; before any work.
    """

    model: ModelProfile
    options: OffloadOptions
    profile: DeviceProfile
    pool_entries: int
    totals: OffloadTotals
    timeline: Timeline

    real: RealDecode
    sends_to_host = True
    loads = False

    def __init__(self, model: ModelProfile | Deployment, options: OffloadOptions) -> None:
        if not isinstance(options, OffloadOptions):
            fail("options", "OffloadOptions", type(options).__name__)
        self.profile, self.pool_entries = fit(model, options)
        self.deployment: Deployment = deployment_of(model, options)
        self.ids: MadeIds | RecordedIds | None = ids_of(self.deployment, options)
        self.model, self.options = self.deployment.model, options
        self._write_policy = make_write_policy(options.write_policy)
        self._compute = ComputeTime(self.deployment, options.drafts)
        self._prompts = PrefillTime(self.model, options.prefill_tokens_per_s or math.inf)
        self._in_order = self.deployment.serve == "in order"
        #: Added to the compute time of a step whose rows are read ahead.
        self._plan_us = self.deployment.own("plan_group") * len(self.model.groups)
        # A model without a top-k has no groups: all of its layers are alike.
        self.groups: tuple[tuple[int, ...], ...] = self.model.groups or (
            tuple(range(self.model.layers)),
        )
        self.verify_samples: int = options.verify_samples // 2  # the others are of rows as served
        self.times: Timings = Timings()
        self.totals, self.timeline = OffloadTotals(), Timeline()
        self._decoding: dict[int, Decoding] = {}
        self.latencies: Latencies = Latencies(
            None if options.slo is None else Slo.parse(options.slo)
        )
        self._verify_draw = np.random.default_rng([0x7666, options.seed])
        self._closed = False

    def begin(self, requests: Sequence[TraceRequest]) -> Scheduler:
        """Take blocks, caches and a device for the requests."""
        if not requests:
            fail("requests", "at least one", "none")
        options = self.options
        last = max(request.timestamp_ms for request in requests)
        if options.arrivals == "time" and last > MAX_ARRIVAL_MS:
            expected = (
                f"milliseconds from the start of the trace, at most {MAX_ARRIVAL_MS:.0e} with"
                " arrivals by time (of times since 1970: less the first one)"
            )
            fail("timestamp", expected, last)
        self._check_memory()  # before there is a pool of as many blocks
        self._scheduler = Scheduler(
            requests,
            self._pool(),
            block_size=options.block_size,
            max_batch=options.batch,
            # Another device's prompts come whole: none of them waits for a chunk's turn here.
            chunk_tokens=options.chunk if options.prefill_tokens_per_s is not None else ALL_TOKENS,
            drafts=options.drafts,
            before_preempt=self._preempted,
            load=self._load if self.loads else None,
        )
        self._take(requests)
        lanes = sum(n > 0 for n in self.model.shape.row_bytes)
        self.clock: StepClock | InOrderClock = (
            InOrderClock(self.deployment, lanes=lanes)
            if self._in_order
            else StepClock(self.model, self.profile, self.groups, lanes=lanes)
        )
        return self._scheduler

    # -- what each strategy does in its own way -----------------------------------------------

    def _num_blocks(self) -> int:
        """Blocks of the pool that the requests share."""
        return self.options.host_blocks

    def _pool(self) -> BlockPool:
        """The pool that the requests share."""
        return BlockPool(self._num_blocks())

    def _load(self, running: Running, found: int) -> bool:
        """Whether blocks of a request are loaded from elsewhere, besides the ``found`` ones."""
        raise NotImplementedError

    def _held(self, load: StepLoad) -> int:
        """Bytes of device memory in a step, weights not counted."""
        tokens = int(load.contexts.sum())
        return held_bytes(self.deployment, self.options, self.pool_entries, len(load.who), tokens)

    def _check_memory(self) -> None:
        """Raise DeviceOutOfMemoryError for host blocks that this machine cannot hold."""

    @abstractmethod
    def _take(self, requests: Sequence[TraceRequest]) -> None:
        """Take caches, device and engine for what is real: ``real``."""

    @property
    @abstractmethod
    def now_us(self) -> float:
        """The model's time."""

    @abstractmethod
    def _wait(self, us: float) -> None:
        """Let the device do nothing for ``us`` microseconds."""

    @abstractmethod
    def _prefill(self, step: Step, count: int, us: float | None) -> None:
        """Compute the step's ``count`` prompt tokens in ``us``; None: another device did."""

    @abstractmethod
    def _move(
        self, load: StepLoad, states: Sequence[Decoding]
    ) -> tuple[NDArray[np.float64], StepResult | None]:
        """[groups, (hits, misses, recent)] rows of the batch, and the engine's step, if any."""

    @abstractmethod
    def _step_us(self, result: StepResult | None, us: float) -> float:
        """Microseconds that a step took; ``us`` is the time by the arithmetic of the clock."""

    @abstractmethod
    def _traced(self, us: float, batch: int, misses: float) -> None:
        """Trace a step that decodes and has ended now."""

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
            request, now = running.request, self.now_us
            arrived = request.timestamp_ms * 1e3 if self.options.arrivals == "time" else 0.0
            state.progress = Progress(request.output_length, arrived, now)
            self._decoding[request.index] = state
        state.age = 0

    def serve(self, step: Step) -> list[int]:
        """Prefill and decode what the step says; returns the number of accepted tokens of each."""
        if step.prefill:
            rate, totals = self.options.prefill_tokens_per_s, self.totals
            count = sum(part[2] for part in step.prefill)
            nbytes = count * self.model.row_bytes * self.model.layers
            us = None
            if rate is None:
                totals.received_bytes += nbytes
            else:
                us = self._prompts.of((start, tokens) for _, start, tokens in step.prefill)
                totals.prefill_us += us
                totals.prefill_bytes += nbytes if self.sends_to_host else 0
            self._prefill(step, count, us)
        accepted = self._decode(step) if step.decode else []
        self._feel(step, accepted)
        self.totals.peak_host_blocks = self._scheduler.pool.peak_used
        return accepted

    def _feel(self, step: Step, accepted: Sequence[int]) -> None:
        """Note which output tokens were produced by the end of the step."""
        now, felt = self.now_us, self.latencies
        for running, start, count in step.prefill:
            if start + count >= running.known:
                felt.first(self._decoding[running.request.index].progress, now)
        for running, stand in zip(step.decode, accepted, strict=True):
            request = running.request
            written = running.written + stand - request.input_length
            felt.more(self._decoding[request.index].progress, now, written)

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
        load = StepLoad(who, contexts, tokens, stands, compute.us)
        rows, result = self._move(load, states)
        times = self.clock.step(*self._clocked(rows, load))
        us = self._step_us(result, times.us)
        written = int(tokens.sum())
        sizes = np.array([len(group) for group in self.groups], np.float64)
        moved = rows.T @ sizes
        totals = self.totals
        wanted = tokens * np.minimum(contexts + tokens, model.topk)
        totals.wanted += float(wanted.sum()) * model.layers
        totals.add_step(
            us, times, len(who), sum(stands), written, tuple(moved.tolist()),
            model.row_bytes, model.layers, load.compute_us, sends=self.sends_to_host,
        )  # fmt: skip
        for part_us in compute.assumed:
            totals.assumed_compute_us += part_us
        if result is not None:
            totals.real_rows += result.rows
        totals.peak_device_bytes = max(totals.peak_device_bytes, self._held(load))
        asked = float(moved[0] + moved[1])
        self.timeline.add(
            self.now_us, us, float(moved[0]) / asked if asked else 1.0, len(who),
            self._scheduler.pool.used,
        )  # fmt: skip
        self._traced(us, len(who), float(moved[1]))
        for state in states:
            state.age += 1
        return stands

    def _clocked(
        self, rows: NDArray[np.float64], load: StepLoad
    ) -> tuple[NDArray[np.float64], float, float, float, float]:
        """The arguments of `StepClock.step` for a step."""
        written = int(load.tokens.sum())
        pieces = self._write_policy.pieces(written, len(load.who))
        if self._in_order:
            # Each query of a request is served its rows; a row that several want is read once.
            topk = self.model.topk
            wanted = float((load.tokens * np.minimum(load.contexts + load.tokens, topk)).sum())
            rows = rows.copy()
            rows[:, 0], rows[:, 2] = np.maximum(0.0, wanted - rows[:, 1]), 0.0
        return rows, written, written, pieces, self._layer_us(load)

    def _layer_us(self, load: StepLoad) -> float:
        """Microseconds that a layer computes; planning is part of it where rows are read ahead."""
        us = load.compute_us if self._in_order else load.compute_us + self._plan_us
        return us / self.model.layers

    # -- leaving ----------------------------------------------------------------------------

    def is_aborted(self, running: Running) -> bool:
        """Whether the request has reached the token at which it is aborted."""
        state = self._decoding.get(running.request.index)
        return state is not None and running.written >= state.abort_at

    def _preempted(self, running: Running) -> None:
        """Called before its blocks are given back: what it wrote must be on the host by then."""

    def left(self, running: Running, *, finished: bool) -> None:
        """Forget the request."""
        state = self._decoding.pop(running.request.index)
        self.latencies.leave(state.progress, finished=finished)

    def close(self) -> None:
        """Give memory and threads back."""
        if not self._closed:
            self._closed = True
            self._last_look()
            self.real.close()

    def _last_look(self) -> None:
        """Note the figures that only the open device has; it is closed next."""

    # -- reporting --------------------------------------------------------------------------

    @property
    def verified(self) -> int:  # type: ignore[override]
        """The number of samples compared so far."""
        return self.real.verified

    @property
    def mismatches(self) -> list[Mismatch]:  # type: ignore[override]
        """Rows of these samples that were wrong."""
        return self.real.mismatches

    @property
    def interval(self) -> Interval | None:
        """The 95% intervals of the figures; None where nothing was estimated."""
        return None

    def _ids_report(self) -> dict[str, Any] | None:
        """Where the ids came from, and the share of the selections that each served."""
        rows = self.real.rows
        served = rows.recorded + rows.made
        made = MadeIds() if self.ids is None else self.ids
        return {
            **made.to_dict(),
            "recorded_share": rows.recorded / served if served else 0.0,
            "made_share": rows.made / served if served else 0.0,
        }

    def report(self, outcome: Outcome) -> OffloadReport:
        """The figures so far."""
        if not self._closed:
            self.totals.end_us = self.now_us
        return OffloadReport(
            **outcome.fields(),
            model=self.model,
            device=self.profile,
            deployment=self.deployment,
            beyond=self._compute.beyond,
            ids=self._ids_report(),
            options=self.options,
            pool_entries=self.pool_entries,
            host_capacity=self._scheduler.pool.capacity,
            totals=self.totals,
            timeline=self.timeline,
            interval=self.interval,
            latencies=self.latencies,
            elapsed_ns=self.times.elapsed_ns,
        )
