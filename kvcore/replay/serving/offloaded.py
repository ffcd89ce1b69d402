# SPDX-License-Identifier: Apache-2.0
"""Serve a trace with the full cache on the host: one schedule, two fidelities.

Each step the scheduler says who is admitted, prefilled and decoded, over the host's pool of
blocks.  What a step misses and how long it takes is found in one of two ways:

``full``     every request and layer is real: rows are planned, served, installed and written by
             the decode engine on the model clock.
``sampled``  a seeded sample of requests and layers is real, without a clock.  The others take
             what the sample missed (`MissTable`), and `StepClock` adds up what a step takes.
             Until the first request of the sample decodes, the first ones admitted are real in
             its place: they teach what nobody else has yet, and count for themselves alone.

Schedule, accepted drafts, aborts, ids and bytes are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.blocks.pool import BlockPool
from kvcore.offload.decode.result import StepResult
from kvcore.replay.clock.step_clock import StepClock
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.report.offloaded import OffloadReport, OffloadTotals, Timeline
from kvcore.replay.report.step_trace import StepTrace
from kvcore.replay.serving.miss_table import MissTable
from kvcore.replay.serving.progress import Progress, sample_positions
from kvcore.replay.serving.real_decode import RealDecode, check_host_memory
from kvcore.replay.serving.scheduler import Running, Scheduler, Step
from kvcore.replay.traces.reader import TraceRequest, check_requests

__all__ = ["OffloadReplay"]

REAL_PLACES = 4
MAX_ARRIVAL_MS = 1e9  # eleven days: what a stream waits at one time


class _Decoding:
    """A request that decodes: for how many steps, what it draws, where it is aborted."""

    __slots__ = (
        "abort_at", "admitted", "age", "draw", "own_table", "place", "real", "substitute",
    )  # fmt: skip

    def __init__(self, request: TraceRequest, options: OffloadOptions) -> None:
        self.age = 0
        self.real = self.admitted = False  # admitted: to the engine
        self.substitute = False  # real until the first request of the sample decodes
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


class OffloadReplay(Progress):
    """A trace, a model with a top-k, and where its cache is.

    Raises ParamInvalidError for what cannot be served, DeviceOutOfMemoryError for caches that do
    not fit; before any work.
    """

    def __init__(
        self, requests: Sequence[TraceRequest], model: ModelProfile, options: OffloadOptions
    ) -> None:
        if not isinstance(options, OffloadOptions):
            fail("options", "OffloadOptions", type(options).__name__)
        requests = check_requests(requests)
        self.model, self.options = model, options
        self.profile, self.pool_entries = options.check(model)
        if not requests:
            fail("requests", "at least one", "none")
        last = max(request.timestamp_ms for request in requests)
        if options.arrivals == "time" and last > MAX_ARRIVAL_MS:
            fail("timestamp", f"at most {MAX_ARRIVAL_MS:.0e} ms with arrivals by time", last)
        full = options.fidelity == "full"
        if full:  # before the books of as many blocks
            check_host_memory(model, options, model.layers, options.host_blocks)
        self._num_requests = len(requests)
        self._total_tokens = sum(request.total_tokens for request in requests)
        self.scheduler = Scheduler(
            requests,
            BlockPool(options.host_blocks),
            block_size=options.block_size,
            max_batch=options.batch,
            chunk_tokens=options.chunk,
            drafts=options.drafts,
            before_preempt=self._preempted,
        )
        longest = max(request.total_tokens for request in requests)
        self._places = self.scheduler.tables.shape[1]
        self._sample = set(_spread(requests, options)) if not full else set()
        layers, groups = _real_layers(model, options)
        self._free_places = list(range(min(REAL_PLACES, options.batch, len(requests)) - 1, -1, -1))
        self.real = RealDecode(
            model,
            options,
            self.profile,
            self.pool_entries,
            layers=layers,
            groups=groups,
            blocks=options.host_blocks if full else len(self._free_places) * self._places,
            places=min(options.batch, len(requests)) if full else len(self._free_places),
            max_tokens=longest + 1,
            timed=full,
        )
        self.clock = StepClock(
            model, self.profile, model.groups, lanes=sum(n > 0 for n in model.shape.row_bytes)
        )
        self._table = MissTable()
        self._decoding: dict[int, _Decoding] = {}
        self._finished = 0
        self._verify_draw = np.random.default_rng([0x7666, options.seed])
        self.totals = OffloadTotals()
        self.timeline = Timeline()
        self._trace = StepTrace(options.max_trace_events) if not full else None
        self._elapsed_ns = 0
        self._closed = False

    # -- a run ----------------------------------------------------------------------------

    def run(
        self,
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[OffloadReplay], None] | None = None,
    ) -> OffloadReport:
        """Step until all requests have left, or ``stop()`` is true between two steps."""
        begin = perf_counter_ns()
        interrupted = False
        try:
            while self.step():
                if progress is not None:
                    progress(self)
                if stop():
                    interrupted = self._left < self._num_requests
                    break
        finally:
            self.close()
            self._elapsed_ns += perf_counter_ns() - begin
        return self.report(interrupted=interrupted)

    def close(self) -> None:
        """Give memory and threads back."""
        if not self._closed:
            self._closed = True
            if self.options.fidelity == "full":
                self.totals.end_us = self.real.device.now
                self.totals.busy = self.real.device.busy
            self.real.close()

    def save_trace(self, path: str) -> int:
        """Write the spans for Perfetto; returns how many did not fit ``max_trace_events``.

        ``full``: every operation of every stream.  ``sampled``: a span a step.
        """
        if self._trace is None:
            self.real.device.trace.save(path)
            return self.real.device.trace.dropped_events
        self._trace.save(path, f"{self.model.name} on {self.profile.name}, sampled")
        return self._trace.dropped

    def step(self) -> bool:
        """One step; False when nothing is left to do."""
        now = self.now_us / 1e3 if self.options.arrivals == "time" else None
        step = self.scheduler.plan(now)
        if step is None:
            return False
        if now is not None and not self.scheduler.running and not step.preempted:
            self._idle_until(self.scheduler.next_arrival_ms or now)
            return True
        for running in step.admitted:
            self._admitted(running)
        for source, target in step.copies:
            self.totals.copied_bytes += self._copy(source, target)
        self._prefill(step)
        accepted = self._decode(step)
        finished = self.scheduler.commit(step, accepted)
        self.totals.peak_host_blocks = self.scheduler.pool.peak_used
        for running in finished:
            self._leave(running, "finished")
        for running in [r for r in self.scheduler.running if self._is_aborted(r)]:
            self._leave(running, "aborted")
        return True

    @property
    def now_us(self) -> float:
        """The model's time."""
        return self.real.device.now if self.options.fidelity == "full" else self.clock.now

    def _idle_until(self, ms: float) -> None:
        us = max(0.0, ms * 1e3 - self.now_us) + 1.0
        self.totals.idle_us += us
        if self.options.fidelity == "full":
            compute = self.real.engine.streams["compute"]
            compute.compute(us, "idle")
            compute.synchronize_blocking()
        else:
            self.clock.advance(us)

    # -- admission and prompts --------------------------------------------------------------

    def _admitted(self, running: Running) -> None:
        request = running.request
        state = self._decoding.get(request.index)
        if state is None:
            state = self._decoding[request.index] = _Decoding(request, self.options)
        state.age = 0
        full = self.options.fidelity == "full"
        if full:
            self.real.rows.add(request)
            state.real = True
            return
        sampled = request.index in self._sample
        if sampled and not self._free_places:
            self._dismiss_substitutes(1)
        if (sampled or not self._table.samples) and self._free_places:
            state.real, state.place = True, self._free_places.pop()
            state.substitute = not sampled
            first = state.place * self._places
            state.own_table = np.arange(first, first + self._places)
            # Whoever computed the prefix, its bytes are here now.
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

    def _table_of(self, running: Running) -> NDArray[np.int64]:
        own = self._decoding[running.request.index].own_table
        return own if own is not None else self.scheduler.tables[running.row]

    def _copy(self, source: int, target: int) -> int:
        if self.options.fidelity == "full":
            return self.real.copy_block(source, target)
        return self.options.block_size * self.model.row_bytes * self.model.layers

    def _prefill(self, step: Step) -> None:
        if not step.prefill:
            return
        rate, totals = self.options.prefill_tokens_per_s, self.totals
        count = sum(part[2] for part in step.prefill)
        us = count / rate * 1e6 if rate is not None else 0.0
        totals.prefill_us += us
        nbytes = count * self.model.row_bytes * self.model.layers
        if rate is not None:
            totals.prefill_bytes += nbytes
        else:
            totals.received_bytes += nbytes
        full = self.options.fidelity == "full"
        for running, first, tokens in step.prefill:
            state = self._decoding[running.request.index]
            if full and rate is not None:
                table = self.scheduler.tables[running.row]
                self.real.prefill(running.request, table, first, tokens, us * tokens / count)
            elif state.real:
                self.real.place(running.request, self._table_of(running), first, tokens)
        if full and rate is not None:
            self.real.order_prompts()
        elif not full:
            self.clock.advance(us)
            if self._trace is not None and us:
                self._trace.add("prefill", self.now_us, us, prompt_tokens=count)

    # -- decode -----------------------------------------------------------------------------

    def _decode(self, step: Step) -> list[int]:
        full = self.options.fidelity == "full"
        who = step.decode
        if not who:
            if full and step.prefill:
                self.real.engine.streams["compute"].synchronize_blocking()
            return []
        states = [self._decoding[running.request.index] for running in who]
        stands = [
            state.stands(tokens, self.options.accept)
            for state, tokens in zip(states, step.tokens, strict=True)
        ]
        contexts = np.array([running.written for running in who], np.int64)
        tokens = np.array(step.tokens, np.int64)
        compute_us = self._compute_us(contexts)
        result = self._real_step(who, states, step.tokens, stands, compute_us)
        rows = self._rows_by_group(who, states, contexts, tokens, result)
        written = int(tokens.sum())
        times = self.clock.step(
            rows, written,
            *self._sent(written, len(who)), compute_us / self.model.layers,
        )  # fmt: skip
        us = result.us if full and result is not None else times.us
        sizes = np.array([len(group) for group in self.model.groups], np.float64)
        moved = rows.T @ sizes
        totals = self.totals
        totals.add_step(
            us, times, len(who), sum(stands), written, tuple(moved.tolist()),
            self.model.row_bytes, self.model.layers, compute_us,
        )  # fmt: skip
        if result is not None:
            totals.real_rows += result.rows
        held = len(who) * self.options.device_bytes(self.model, self.pool_entries, 0)
        held += int(contexts.sum()) * self.model.token_index_bytes
        totals.peak_device_bytes = max(totals.peak_device_bytes, held)
        asked = float(moved[0] + moved[1])
        self.timeline.add(
            self.now_us, us, float(moved[0]) / asked if asked else 1.0, len(who),
            self.scheduler.pool.used,
        )  # fmt: skip
        if self._trace is not None and self.options.max_trace_events:
            self._trace.add(
                "decode step", self.now_us, us, batch=len(who),
                misses=round(float(moved[1])), host_blocks=self.scheduler.pool.used,
            )  # fmt: skip
        for state in states:
            state.age += 1
        return stands

    def _sent(self, written: int, batch: int) -> tuple[float, float]:
        """Tokens whose rows go to the host in a step, and in how many pieces: a request one."""
        if self.options.write_policy == "write_through":
            return written, batch
        # The same rows in the end, a hundred at a time.
        return written, max(1.0, written / 100)

    def _compute_us(self, contexts: NDArray[np.int64]) -> float:
        model = self.model
        drafts = int(_number(model, "step_drafts"))
        scale = (1 + self.options.drafts) / (1 + drafts)
        attended = float(np.minimum(contexts, model.topk).sum())
        parts = {
            "step_fixed": 1.0,
            "step_request": len(contexts) * scale,
            "step_attended": attended * scale,
            "step_indexed": float(contexts.sum()) * scale,
        }
        total = 0.0
        for key, times in parts.items():
            us = _number(model, key) * times
            total += us
            if model[key].basis == "assumed":
                self.totals.assumed_compute_us += us
        return total

    def _real_step(
        self,
        who: Sequence[Running],
        states: Sequence[_Decoding],
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
        full = self.options.fidelity == "full"
        self.real.layer_us = compute_us / self.model.layers if full else 0.0
        return self.real.step(names, writes, stay)

    def _rows_by_group(
        self,
        who: Sequence[Running],
        states: Sequence[_Decoding],
        contexts: NDArray[np.int64],
        tokens: NDArray[np.int64],
        result: StepResult | None,
    ) -> NDArray[np.float64]:
        """[groups, (hits, misses, recent)] rows of the batch."""
        rows = np.zeros((len(self.model.groups), 3))
        if self.options.fidelity == "full":
            assert result is not None
            for part in result.requests.values():
                rows += np.array((part.hits, part.misses, part.recent), np.float64).T
            return rows
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
        rows += shares.sum(axis=0)
        return rows

    # -- leaving ----------------------------------------------------------------------------

    def _is_aborted(self, running: Running) -> bool:
        state = self._decoding.get(running.request.index)
        return state is not None and running.written >= state.abort_at

    def _preempted(self, running: Running) -> None:
        """Before its blocks are given back: what it wrote must be on the host."""
        state = self._decoding[running.request.index]
        if state.admitted:
            state.admitted = False
            self.real.engine.preempt_blocking(running.request.index)
        self._give_place_back(state)

    def _leave(self, running: Running, how: str) -> None:
        request = running.request
        state = self._decoding[request.index]
        if state.admitted:
            engine = self.real.engine
            leave = engine.evict_blocking if how == "finished" else engine.abort_blocking
            leave(request.index)
        if how == "finished":
            share, before = (
                (self.options.verify_samples // 2) * done // self._num_requests
                for done in (self._finished + 1, self._finished)
            )
            if state.real and share > before:
                self._verify(running, share - before)
            self._finished += 1
        else:
            self.totals.aborted += 1
        del self._decoding[request.index]
        self.real.rows.drop(request.index)
        self._give_place_back(state)
        self.scheduler.retire(running)

    def _give_place_back(self, state: _Decoding) -> None:
        if state.place >= 0:
            self._free_places.append(state.place)
            state.place, state.real, state.own_table = -1, False, None
            state.substitute = False

    def _verify(self, running: Running, count: int) -> None:
        request, draw = running.request, self._verify_draw
        if self.options.fidelity == "full" and self.options.prefill_tokens_per_s is not None:
            self.real.device.synchronize_blocking()
        positions = sample_positions(draw, running, count)
        self.real.verify(request, self._table_of(running), positions, draw)

    # -- telling ----------------------------------------------------------------------------

    @property
    def _left(self) -> int:
        return self._finished + self.totals.aborted

    @property
    def finished_requests(self) -> int:
        """Requests that have left, of `total_requests`."""
        return self._left

    def report(self, *, interrupted: bool = False) -> OffloadReport:
        """The figures so far."""
        if self.options.fidelity != "full" or not self._closed:
            self.totals.end_us = self.now_us
        return OffloadReport(
            model=self.model,
            device=self.profile,
            options=self.options,
            pool_entries=self.pool_entries,
            total_requests=self._num_requests,
            finished_requests=self._finished,
            total_tokens=self._total_tokens,
            counters=self.scheduler.counters,
            host_capacity=self.scheduler.pool.capacity,
            totals=self.totals,
            timeline=self.timeline,
            verified_samples=self.real.verified,
            mismatches=tuple(self.real.mismatches),
            elapsed_ns=self._elapsed_ns,
            interrupted=interrupted,
        )


def _number(model: ModelProfile, key: str) -> float:
    value = model[key].value
    assert isinstance(value, int | float)
    return value


def _spread(requests: Sequence[TraceRequest], options: OffloadOptions) -> list[int]:
    """Requests of all lengths, evenly; where the first one lies is drawn."""
    count = min(options.sample_requests, len(requests))
    draw = np.random.default_rng([0x7361, options.seed])
    ordered = sorted(requests, key=lambda request: (request.total_tokens, request.index))
    places = ((np.arange(count) + draw.random(count)) * len(requests) / count).astype(np.int64)
    return [ordered[place].index for place in places.tolist()]


def _real_layers(
    model: ModelProfile, options: OffloadOptions
) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """The layers that are real, and those of each group: all, or one of each of some groups."""
    if options.fidelity == "full":
        return list(range(model.layers)), dict(enumerate(model.groups))
    draw = np.random.default_rng([0x6C61, options.seed])
    count = min(options.sample_layers, len(model.groups))
    chosen = sorted(draw.choice(len(model.groups), count, replace=False).tolist())
    groups: dict[int, tuple[int, ...]] = {}
    for group in chosen:
        layers = model.groups[group]
        groups[group] = (layers[int(draw.integers(len(layers)))],)
    return [layer for group in groups.values() for layer in group], groups
