# SPDX-License-Identifier: Apache-2.0
"""Serve a request trace into real paged caches, and check what they hold.

Each step asks the scheduler what to do, works out the slots of all its tokens from the block
tables, makes their bytes layer by layer, and writes them with the operator that a server on the
hardware would call.  When a request is finished, and before its blocks are given back, rows of
it are read through its block table and compared with what their bytes must be.

Writer and reader share nothing but the block table: slots, the operator and the fast form of
the bytes on one side; block, row, the layout's definition and the plain form on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.blocks.pool import BlockPool
from kvcore.offload.checks import check_integer
from kvcore.replay.models.profile import ModelShape
from kvcore.replay.report.resident import Mismatch, ReplayReport, Timings
from kvcore.replay.serving.caches import LAYOUTS, PagedCaches
from kvcore.replay.serving.progress import Progress, sample_positions
from kvcore.replay.serving.scheduler import Running, Scheduler, Step
from kvcore.replay.traces.content import TokenRows, content_words, expected_row, token_words
from kvcore.replay.traces.reader import HASH_BLOCK_TOKENS, TraceRequest, check_requests

__all__ = ["Replay", "slot_mapping"]

#: Takes the arguments of ``kvcore.scatter_pa_kv_cache``.
Write = Callable[..., None]

_LANES = ("key", "value")
MAX_STEP_TOKENS = 2**20  # rows of one step are made at a time


def slot_mapping(
    tables: NDArray[np.int64], rows: NDArray[np.int64], positions: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """[tokens] the slot of each token: block * size + row, the block from the block table.

    tables:    [requests, places] block of each place.
    rows:      [tokens] whose token it is.
    positions: [tokens] its position in the request.
    size:      tokens of a block.
    """
    place, row = np.divmod(positions, size)
    return tables[rows, place] * size + row


class Replay(Progress):
    """A trace, a scheduler and the caches it writes.

    requests:       served in this order.
    shape:          what a token's cache entry is.
    num_blocks, block_size, layout: the caches (of every layer).
    max_batch:      requests that run at a time; chunk_tokens: prompt tokens of a step.
    seed:           of the tokens' bytes and of the samples.
    verify_samples: rows to check, spread evenly over the requests.
    num_threads:    passed to the operator.
    write:          stands in for ``kvcore.scatter_pa_kv_cache``.
    on_finished:    called with each finished request while it still holds its blocks.
    Raises ParamInvalidError for a trace that cannot be served; DeviceOutOfMemoryError for
    caches that do not fit.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        shape: ModelShape,
        *,
        num_blocks: int,
        block_size: int = 128,
        layout: str = "Norm",
        max_batch: int = 32,
        chunk_tokens: int = 2048,
        seed: int = 0,
        verify_samples: int = 1000,
        num_threads: int | None = None,
        write: Write | None = None,
        on_finished: Callable[[Running], None] | None = None,
    ) -> None:
        requests = check_requests(requests)
        for name, value in (("max_batch", max_batch), ("chunk_tokens", chunk_tokens)):
            check_integer(name, value, 1)
            if value > MAX_STEP_TOKENS:
                fail(name, f"at most {MAX_STEP_TOKENS}", value)
        self.shape, self.seed = shape, check_integer("seed", seed, 0, 2**64 - 1)
        self._verify_samples = check_integer("verify_samples", verify_samples, 0)
        # First, since this is what refuses more blocks than the machine can have.
        self.caches = PagedCaches(shape, num_blocks, block_size, layout)
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            requests,
            self.pool,
            block_size=block_size,
            max_batch=max_batch,
            chunk_tokens=chunk_tokens,
        )
        self._rows = TokenRows(shape.num_layers, *shape.row_bytes, max_batch + chunk_tokens, seed)
        longest = max((len(request.hash_ids) for request in requests), default=0)
        # [batch row, 512-token block] content of the prompt; what is generated comes last.
        num_rows = len(self.scheduler.tables)
        self._content = np.zeros((num_rows, longest + 1), np.uint64)
        self._prompt = np.zeros((2, num_rows), np.int64)  # tokens, blocks
        self._write = write if write is not None else _operator()
        cache_mode, scatter_mode = LAYOUTS[layout]
        self._modes: dict[str, Any] = {
            "cache_mode": cache_mode,
            "scatter_mode": scatter_mode,
            "dtype": shape.dtype,
            "num_threads": num_threads,
        }
        if shape.value_head_size:
            self._modes["value_dtype"] = shape.dtype
        self._on_finished = on_finished
        self._num_requests = len(requests)
        self._total_tokens = sum(request.total_tokens for request in requests)
        self._finished = 0
        self._copied_bytes = 0
        self._verified = 0
        self._mismatches: list[Mismatch] = []
        self._times = Timings()
        self._sampler = np.random.default_rng([0x7665, seed])

    # -- a step ---------------------------------------------------------------------------

    def step(self) -> bool:
        """Plan, write and check one step; False when there is nothing left to do."""
        times = self._times
        begin = perf_counter_ns()
        step = self.scheduler.plan()
        if step is None:
            return False
        for running in step.admitted:
            self._place_content(running)
        for source, target in step.copies:
            self._copied_bytes += self.caches.copy_block(source, target)
        rows, positions = _tokens(step)
        slots = slot_mapping(self.scheduler.tables, rows, positions, self.caches.block_size)
        words = token_words(self._content_of(rows, positions), positions)
        times.schedule_ns += perf_counter_ns() - begin
        if len(slots):
            self._write_layers(words, slots)
        begin = perf_counter_ns()
        finished = self.scheduler.commit(step)
        times.schedule_ns += perf_counter_ns() - begin
        for running in finished:
            begin = perf_counter_ns()
            self._verify(running)
            times.verify_ns += perf_counter_ns() - begin
            if self._on_finished is not None:
                self._on_finished(running)
            self.scheduler.retire(running)
            self._finished += 1
        return True

    def run(
        self,
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[Replay], None] | None = None,
    ) -> ReplayReport:
        """Step until all requests have finished, or ``stop()`` is true between two steps.

        progress: called after each step.
        """
        begin = perf_counter_ns()
        interrupted = False
        while self.step():
            if progress is not None:
                progress(self)
            if stop():
                interrupted = self._finished < self._num_requests
                break
        self._times.elapsed_ns += perf_counter_ns() - begin
        return self.report(interrupted=interrupted)

    # -- writing --------------------------------------------------------------------------

    def _place_content(self, running: Running) -> None:
        request = running.request
        words = content_words(request, self.seed)
        self._content[running.row, : len(words)] = words
        self._prompt[:, running.row] = request.input_length, len(request.hash_ids)

    def _content_of(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        tokens, blocks = self._prompt[:, rows]
        block = np.where(positions < tokens, positions // HASH_BLOCK_TOKENS, blocks)
        return self._content[rows, block]

    def _write_layers(self, words: NDArray[np.uint64], slots: NDArray[np.int64]) -> None:
        shape, caches, times = self.shape, self.caches, self._times
        heads, (key_size, value_size) = shape.num_heads, shape.stored_head_sizes
        for layer in range(shape.num_layers):
            begin = perf_counter_ns()
            key, value = self._rows.fill(layer, words)
            made = perf_counter_ns()
            self._write(
                key.view(shape.raw).reshape(-1, heads, key_size),
                caches.keys[layer],
                slots,
                value.view(shape.raw).reshape(-1, heads, value_size) if value_size else None,
                caches.values[layer],
                **self._modes,
            )
            times.scatter_ns += perf_counter_ns() - made
            times.generate_ns += made - begin

    # -- checking -------------------------------------------------------------------------

    def _verify(self, running: Running) -> None:
        # Request number i of n takes its share of the samples, so that they come out even.
        share, before = (
            self._verify_samples * done // self._num_requests
            for done in (self._finished + 1, self._finished)
        )
        for position in sample_positions(self._sampler, running, share - before):
            layer = int(self._sampler.integers(self.shape.num_layers))
            place, row = divmod(position, self.caches.block_size)
            block = int(self.scheduler.tables[running.row, place])
            for lane, row_bytes in enumerate(self.shape.row_bytes):
                if not row_bytes:
                    continue
                expected = expected_row(
                    running.request, position, layer, lane, row_bytes, self.seed
                )
                if self.caches.read_row(layer, lane, block, row) != expected:
                    self._mismatches.append(
                        Mismatch(running.request.index, position, layer, _LANES[lane], block, row)
                    )
            self._verified += 1

    # -- telling --------------------------------------------------------------------------

    @property
    def finished_requests(self) -> int:
        """Requests that have finished, of `total_requests`."""
        return self._finished

    def report(self, *, interrupted: bool = False) -> ReplayReport:
        """The figures so far."""
        return ReplayReport(
            shape=self.shape,
            layout=self.caches.layout,
            block_size=self.caches.block_size,
            cache_bytes=self.caches.num_bytes,
            total_requests=self._num_requests,
            finished_requests=self._finished,
            total_tokens=self._total_tokens,
            counters=self.scheduler.counters,
            pool_capacity=self.pool.capacity,
            pool_used=self.pool.used,
            pool_peak_used=self.pool.peak_used,
            pool_evictions=self.pool.evictions,
            copied_bytes=self._copied_bytes,
            verified_samples=self._verified,
            mismatches=tuple(self._mismatches),
            times=self._times,
            interrupted=interrupted,
        )


def _tokens(step: Step) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[tokens] batch row and position of each token the step writes."""
    parts = [(r.row, start, count) for r, start, count in step.prefill]
    parts += [(r.row, r.written, 1) for r in step.decode]
    row, start, count = np.array(parts, np.int64).reshape(-1, 3).T
    first = np.cumsum(count) - count  # place of each part's first token
    positions = np.arange(count.sum()) + np.repeat(start - first, count)
    return np.repeat(row, count), positions


def _operator() -> Write:
    import kvcore

    write: Write = kvcore.scatter_pa_kv_cache
    return write
