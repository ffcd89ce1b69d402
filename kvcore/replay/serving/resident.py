# SPDX-License-Identifier: Apache-2.0
"""Serve a request trace into real paged caches of this machine, and check what they hold.

A step works out the slots of all its tokens from the block tables, makes their bytes layer by
layer, and writes them with the operator that a server on the hardware would call.  Rows are read
back through the block table and compared with what their bytes must be.

Writer and reader share nothing but the block table: slots, the operator and the fast form of
the bytes on one side; block, row, the layout's definition and the plain form on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.blocks.pool import BlockPool
from kvcore.offload.checks import check_integer
from kvcore.replay.models.profile import ModelShape
from kvcore.replay.report.report import Mismatch, Outcome
from kvcore.replay.report.resident import ReplayReport
from kvcore.replay.serving.caches import LAYOUTS, PagedCaches
from kvcore.replay.serving.samples import sample_positions
from kvcore.replay.serving.scheduler import Running, Scheduler, Step
from kvcore.replay.serving.strategy import Strategy, Timings
from kvcore.replay.traces.content import TokenRows, content_words, expected_row, token_words
from kvcore.replay.traces.reader import HASH_BLOCK_TOKENS, TraceRequest

__all__ = ["Resident", "ResidentOptions", "slot_mapping"]

#: Takes the arguments of ``kvcore.scatter_pa_kv_cache``.
Write = Callable[..., None]

_LANES = ("key", "value")
MAX_STEP_TOKENS = 2**20  # rows of one step are made at a time


def slot_mapping(
    tables: NDArray[np.int64], rows: NDArray[np.int64], positions: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """[tokens] the slot of each token: block * size + row, the block from the block table.

    tables:    [requests, places] block of each place.
    rows:      [tokens] the row of ``tables`` of the request whose token it is.
    positions: [tokens] its position in the request.
    size:      tokens of a block.
    """
    place, row = np.divmod(positions, size)
    return tables[rows, place] * size + row


class ResidentOptions(TypedDict, total=False):
    """The options of `Resident`, whose docstring says what each means."""

    num_blocks: int
    block_size: int
    layout: str
    max_batch: int
    chunk_tokens: int
    seed: int
    verify_samples: int
    num_threads: int | None
    write: Write | None
    on_finished: Callable[[Running], None] | None


class _Contents(NamedTuple):
    """What the prompts of the running requests hold, by row of the block tables.

    words:  uint64 [row, 512-token block] of the prompt; then one for all generated tokens.
    prompt: int64 [2, row]: tokens, blocks.
    """

    words: NDArray[np.uint64]
    prompt: NDArray[np.int64]

    def put(self, row: int, request: TraceRequest, seed: int) -> None:
        """A request begins in that row."""
        words = content_words(request, seed)
        self.words[row, : len(words)] = words
        self.prompt[:, row] = request.input_length, len(request.hash_ids)

    def of(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The content of each token."""
        tokens, blocks = self.prompt[:, rows]
        block = np.where(positions < tokens, positions // HASH_BLOCK_TOKENS, blocks)
        return self.words[rows, block]


class Resident(Strategy[ReplayReport]):
    """Real caches of every layer, in the memory of this machine.

    shape:          the cache entry of a token.
    num_blocks, block_size, layout: the caches (of every layer).
    max_batch:      requests that run at a time; chunk_tokens: prompt tokens of a step.
    seed:           of the tokens' bytes and of the samples.
    verify_samples: rows to check, spread evenly over the requests.
    num_threads:    passed to the operator.
    write:          stands in for ``kvcore.scatter_pa_kv_cache``.
    on_finished:    called with each finished request while it still holds its blocks.
    Raises ParamInvalidError for options that cannot be, DeviceOutOfMemoryError for caches that do
    not fit.
    """

    shape: ModelShape
    seed: int
    times: Timings
    verified: int
    mismatches: list[Mismatch]

    def __init__(
        self,
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
        for name, value in (("max_batch", max_batch), ("chunk_tokens", chunk_tokens)):
            check_integer(name, value, 1)
            if value > MAX_STEP_TOKENS:
                fail(name, f"at most {MAX_STEP_TOKENS}", value)
        self.shape, self.seed = shape, check_integer("seed", seed, 0, 2**64 - 1)
        self.verify_samples: int = check_integer("verify_samples", verify_samples, 0)
        self.times, self.verified, self.mismatches = Timings(), 0, []
        # These come first, since they refuse more blocks than the machine's memory holds.
        self.caches: PagedCaches = PagedCaches(shape, num_blocks, block_size, layout)
        self.pool: BlockPool = BlockPool(num_blocks)
        self._max_batch, self._chunk = max_batch, chunk_tokens
        self._rows = TokenRows(shape.num_layers, *shape.row_bytes, max_batch + chunk_tokens, seed)
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
        self._sampler = np.random.default_rng([0x7665, seed])

    def begin(self, requests: Sequence[TraceRequest]) -> Scheduler:
        """Make the scheduler over the caches' pool of blocks."""
        self._scheduler = Scheduler(
            requests,
            self.pool,
            block_size=self.caches.block_size,
            max_batch=self._max_batch,
            chunk_tokens=self._chunk,
        )
        longest = max((len(request.hash_ids) for request in requests), default=0)
        num_rows = len(self._scheduler.tables)
        self._contents = _Contents(
            np.zeros((num_rows, longest + 1), np.uint64), np.zeros((2, num_rows), np.int64)
        )
        return self._scheduler

    def admitted(self, running: Running) -> None:
        """Note what the request's prompt holds."""
        self._contents.put(running.row, running.request, self.seed)

    def copy_block(self, source: int, target: int) -> int:
        """Copy a block in every layer; returns the bytes."""
        return self.caches.copy_block(source, target)

    # -- writing --------------------------------------------------------------------------

    def serve(self, step: Step) -> None:
        """Write the rows of all tokens of the step, with the operator."""
        begin = perf_counter_ns()
        rows, positions = _tokens(step)
        slots = slot_mapping(self._scheduler.tables, rows, positions, self.caches.block_size)
        words = token_words(self._contents.of(rows, positions), positions)
        self.times.schedule_ns += perf_counter_ns() - begin
        if len(slots):
            self._write_layers(words, slots)

    def _write_layers(self, words: NDArray[np.uint64], slots: NDArray[np.int64]) -> None:
        shape, caches, times = self.shape, self.caches, self.times
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

    def verify(self, running: Running, count: int) -> None:
        """Read rows by the block table and the layout's definition, and compare them."""
        for position in sample_positions(self._sampler, running, count):
            layer = int(self._sampler.integers(self.shape.num_layers))
            place, row = divmod(position, self.caches.block_size)
            block = int(self._scheduler.tables[running.row, place])
            for lane, row_bytes in enumerate(self.shape.row_bytes):
                if not row_bytes:
                    continue
                expected = expected_row(
                    running.request, position, layer, lane, row_bytes, self.seed
                )
                if self.caches.read_row(layer, lane, block, row) != expected:
                    self.mismatches.append(
                        Mismatch(running.request.index, position, layer, _LANES[lane], block, row)
                    )
            self.verified += 1

    def left(self, running: Running, *, finished: bool) -> None:
        """Hand a finished request to ``on_finished``."""
        if self._on_finished is not None:
            self._on_finished(running)

    def report(self, outcome: Outcome) -> ReplayReport:
        """The figures so far."""
        return ReplayReport(
            **outcome.fields(),
            shape=self.shape,
            layout=self.caches.layout,
            block_size=self.caches.block_size,
            cache_bytes=self.caches.num_bytes,
            pool_capacity=self.pool.capacity,
            pool_used=self.pool.used,
            pool_peak_used=self.pool.peak_used,
            pool_evictions=self.pool.evictions,
            times=self.times,
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
