# SPDX-License-Identifier: Apache-2.0
"""What each request does in the next step: continuous batching over a block pool.

The rules, in the order in which a step applies them:

1. Waiting requests are admitted in order of arrival, while the batch has room, the step has
   prompt tokens left to give, and the pool has blocks for all known tokens of the head of the
   queue.  Cached blocks are taken instead of computed: the later a request is admitted, the more
   it finds.  No request overtakes another.  One free block for each running request, the new one
   included, is left as headroom, so that a request that was just preempted does not come back to
   be preempted at once.  (A request that runs alone needs none.)
2. Every decoding request writes one token, the oldest first.  It may need a block: a new one
   at a block's end, or a copy of one that it shares with another request; a share taken in
   this very step counts, which is why admission comes first.  When the pool has none, the
   *youngest* running request is preempted (it may be the one that asks): it gives its blocks
   back and is computed again later, at the head of the queue.
3. Prefill: at most ``chunk_tokens`` prompt tokens a step, the oldest first.

Because the blocks of all known tokens are taken at admission, prefill cannot run out, and the
oldest request always proceeds: it can have every block that younger ones hold, and it fits the
pool alone (checked before work starts).  So every schedule ends.

Blocks can be found by other requests only after the step that wrote them (`commit`).

The scheduler owns no bytes and no arrays but the block tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.blocks.pool import BlockPool
from kvcore.offload.checks import check_integer
from kvcore.replay.traces.content import block_keys
from kvcore.replay.traces.reader import TraceRequest

if TYPE_CHECKING:
    from kvcore.replay.serving.runs import Run

__all__ = ["Counters", "Running", "Scheduler", "Step"]


@dataclass(slots=True, eq=False)
class Running:
    """A request and its progress.

    row:         its row of the block tables while it runs.
    blocks:      its blocks, by place.
    known:       tokens that must be in the cache before it decodes: the prompt, and those it had
                 generated when it was preempted.
    written:     tokens whose bytes are in the cache; reached: the most there ever were.
    prefix_hit:  tokens found in the cache when it was admitted last.
    preemptions: times it was preempted.
    loading:     whether tokens of it are being loaded from elsewhere; it takes no part in steps.
    """

    request: TraceRequest
    known: int
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    written: int = 0
    reached: int = 0
    registered: int = 0
    prefix_hit: int = 0
    preemptions: int = 0
    loading: bool = False

    @property
    def missing(self) -> int:
        """Known tokens that are to be computed."""
        return 0 if self.loading else max(0, self.known - self.written)

    @property
    def decoding(self) -> bool:
        """True when all known tokens are in the cache and one more is to be written."""
        return self.known <= self.written < self.request.total_tokens


@dataclass(slots=True)
class Step:
    """What to do now: first the copies in order, then the writes of both kinds.

    copies:    (source block, target block).
    prefill:   (request, first position, number of tokens).
    decode:    requests that write tokens from position ``written`` on; tokens: how many each.
    admitted, preempted: for a server that keeps state of its own for each request.
    """

    copies: list[tuple[int, int]] = field(default_factory=list)
    prefill: list[tuple[Running, int, int]] = field(default_factory=list)
    decode: list[Running] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    admitted: list[Running] = field(default_factory=list)
    preempted: list[Running] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Totals of a schedule.

    prompt_tokens:     of the requests admitted so far.
    prefix_hit_tokens: those of them that were found in the cache instead of being computed.
    prefill_tokens, decode_tokens: written for the first time.
    recomputed_tokens: written again after a preemption; recovered_tokens were still in the
                       cache then.
    copies:            blocks copied because they were shared when one owner had to write.
    The prefix hits and the tokens written for the first time add up to `seen_tokens`.
    """

    steps: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    recovered_tokens: int = 0
    preemptions: int = 0
    copies: int = 0

    @property
    def seen_tokens(self) -> int:
        """Tokens of the trace that are, or were, in the cache."""
        return self.prefix_hit_tokens + self.prefill_tokens + self.decode_tokens


class Scheduler:
    """Serves ``requests`` in their order over ``pool``.

    tables: [rows, places] int64, block of each place of each running request (its ``row``); -1
            where there is none.
    drafts: draft tokens that a request writes behind its next one in a step; `commit` takes how
            many are accepted.  There are fewer where the request ends, or where the pool has no
            block: no request is preempted for a draft.
    before_preempt: called with a request that is about to give its blocks back.
    load: called with a request that is admitted and the number of its blocks that were found;
            returns True when more of them come from elsewhere: it then waits for `loaded`.
    Raises ParamInvalidError when a request cannot fit the pool even alone.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        pool: BlockPool,
        *,
        block_size: int,
        max_batch: int,
        chunk_tokens: int,
        drafts: int = 0,
        before_preempt: Callable[[Running], None] | None = None,
        load: Callable[[Running, int], bool] | None = None,
    ) -> None:
        self.pool = pool
        self.drafts: int = check_integer("drafts", drafts, 0, 1023)
        self._before_preempt = before_preempt
        self._load = load
        self.block_size: int = check_integer("block_size", block_size, 1)
        self.max_batch: int = check_integer("max_batch", max_batch, 1)
        self.chunk_tokens: int = check_integer("chunk_tokens", chunk_tokens, 1)
        self.waiting: deque[Running] = deque(
            Running(request, request.input_length) for request in requests
        )
        self.running: list[Running] = []
        self.counters: Counters = Counters()
        self._refuse_what_cannot_fit()
        places = max((self._blocks_for(w.request.total_tokens) for w in self.waiting), default=0)
        num_rows = min(max_batch, len(self.waiting))
        self.tables: NDArray[np.int64] = np.full((num_rows, places), -1, np.int64)
        self._rows = list(range(num_rows - 1, -1, -1))
        self._blocked_at: int | None = None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _refuse_what_cannot_fit(self) -> None:
        requests = (waiting.request for waiting in self.waiting)
        largest = max(requests, key=lambda request: request.total_tokens, default=None)
        if largest is None:
            return
        needed = self._blocks_for(largest.total_tokens)
        if needed > self.pool.capacity:
            fail(
                f"request {largest.index}",
                f"at most {self.pool.capacity} blocks of {self.block_size} tokens (the pool)",
                f"{needed}: a prompt of {largest.input_length} tokens"
                f" and {largest.output_length} to generate",
            )

    # -- a step ---------------------------------------------------------------------------

    @property
    def next_arrival_ms(self) -> float | None:
        """When the head of the queue arrives (or has arrived); None without one."""
        return self.waiting[0].request.timestamp_ms if self.waiting else None

    def plan(self, now_ms: float | None = None) -> Step | None:
        """The next step; None when every request has finished.  `commit` it before the next.

        now_ms: requests that arrive later are not there yet; None: all are.
        """
        if not self.running and not self.waiting:
            return None
        step = Step()
        self._admit(step, now_ms)
        self._plan_decode(step)
        self._plan_prefill(step)
        self.counters.steps += 1
        return step

    def commit(self, step: Step, accepted: Sequence[int] | None = None) -> list[Running]:
        """Note that the step's bytes are written; returns requests with nothing left to write.

        accepted: accepted tokens of each decoding request; None: one of each.
        The finished still hold their blocks: `retire` each of them.
        """
        for running, start, count in step.prefill:
            self._computed(running, start, count)
        stand = accepted if accepted is not None else [1] * len(step.decode)
        for running, count in zip(step.decode, stand, strict=True):
            running.written = running.reached = running.written + count
        self.counters.decode_tokens += sum(stand)
        return [r for r in self.running if r.written == r.request.total_tokens]

    def commit_run(self, run: Run, count: int) -> list[Running]:
        """Commit the first ``count`` steps of a run, of which the first was planned.

        The other steps are planned here: blocks are taken and named in the order of steps.
        """
        step, new, place = run.step, run.new, 0
        for n in range(count):
            if run.awaits_blocks and n and n == count - 1:
                self._blocked_at = self.pool.free
            while place < len(new) and new[place][0] == n:
                self._take_block(step.decode[new[place][1]])
                place += 1
            for running, start, tokens in step.prefill:
                self._computed(running, start + n * tokens, tokens)
        for running in step.decode:
            running.written = running.reached = running.written + count
        self.counters.steps += count - 1
        self.counters.decode_tokens += count * len(step.decode)
        return [r for r in self.running if r.written == r.request.total_tokens]

    def _computed(self, running: Running, start: int, count: int) -> None:
        """Note that ``count`` prompt tokens from ``start`` on are written."""
        running.written = start + count
        again = min(count, max(0, running.reached - start))
        running.reached = max(running.reached, running.written)
        self.counters.recomputed_tokens += again
        self.counters.prefill_tokens += count - again
        self._register(running)

    def retire(self, running: Running) -> None:
        """Give a finished request's blocks back; whole prompt blocks can still be found."""
        self.running.remove(running)
        self._give_back(running)

    # -- decode ---------------------------------------------------------------------------

    def _plan_decode(self, step: Step) -> None:
        place = 0
        while place < len(self.running):
            running = self.running[place]
            if not running.decoding:
                place += 1
            elif self._can_write_next(running, step):
                step.decode.append(running)
                step.tokens.append(1 + (self._room(running) if self.drafts else 0))
                place += 1
            else:
                # Younger requests have no part in this step yet, so the last can be preempted;
                # when this one is the last, it is preempted itself, and the loop ends.
                self._preempt(self.running[-1], step)

    def _can_write_next(self, running: Running, step: Step) -> bool:
        place, row = divmod(running.written, self.block_size)
        if place == len(running.blocks):
            return self._take_block(running)
        # Most tokens land in a block that was private one token ago, but it may have been
        # taken by a request of the same prompt since.
        shared = running.blocks[place]
        if self.pool.prepare_write(shared, row):
            return True
        fresh = self.pool.allocate()
        if fresh is None:
            return False
        step.copies.append((shared, fresh[0]))
        self.counters.copies += 1
        running.blocks[place] = fresh[0]
        self.tables[running.row, place] = fresh[0]
        self.pool.release([shared])
        return True

    def _take_block(self, running: Running) -> bool:
        """Take a block behind the request's last; False when the pool has none."""
        fresh = self.pool.allocate()
        if fresh is None:
            return False
        self.tables[running.row, len(running.blocks)] = fresh[0]
        running.blocks += fresh
        return True

    def _room(self, running: Running) -> int:
        """Drafts that the request can write behind its next token, with blocks for them."""
        more = min(self.drafts, running.request.total_tokens - running.written - 1)
        needed = self._blocks_for(running.written + 1 + more) - len(running.blocks)
        for _ in range(needed):
            if not self._take_block(running):
                return len(running.blocks) * self.block_size - running.written - 1
        return more

    def _preempt(self, running: Running, step: Step) -> None:
        if self._before_preempt is not None:
            self._before_preempt(running)
        self.running.remove(running)
        self._register(running, everything=True)
        self._give_back(running)
        running.known = max(running.known, running.written)
        running.written = running.registered = 0
        running.loading = False
        running.preemptions += 1
        self.waiting.appendleft(running)
        self.counters.preemptions += 1
        step.preempted.append(running)

    def _give_back(self, running: Running) -> None:
        # From the end, since a prefix without its beginning is of no use.
        self.pool.release(running.blocks[::-1])
        self.tables[running.row] = -1
        self._rows.append(running.row)
        running.blocks = []
        running.row = -1
        self._blocked_at = None

    # -- admission ------------------------------------------------------------------------

    def _admit(self, step: Step, now_ms: float | None) -> None:
        budget = self.chunk_tokens - sum(r.missing for r in self.running)
        while self.waiting and len(self.running) < self.max_batch and budget > 0:
            if self.running and self._blocked_at == self.pool.free:
                return  # nothing has changed since the head of the queue did not fit
            running = self.waiting[0]
            if now_ms is not None and running.request.timestamp_ms > now_ms:
                return
            hits = self._found(running)
            if hits is None:
                self._blocked_at = self.pool.free
                return
            self.waiting.popleft()
            self._start(running, hits)
            budget -= running.missing
            step.admitted.append(running)

    @property
    def has_room(self) -> bool:
        """Whether the batch has room for one more."""
        return len(self.running) < self.max_batch

    def head_fits(self) -> bool:
        """Whether the pool has blocks now for the head of the queue, which must not be empty."""
        return self._found(self.waiting[0]) is not None

    def _found(self, running: Running) -> list[int] | None:
        """Blocks of a waiting request that are cached; None: the pool lacks the others."""
        if not running.keys:
            running.keys = block_keys(running.request, self.block_size, running.known)
        hits = self.pool.match(running.keys)
        needed = len(running.keys) - sum(self.pool.references(block) > 0 for block in hits)
        headroom = len(self.running) + 1 if self.running else 0
        return None if needed + headroom > self.pool.free else hits

    def _start(self, running: Running, hits: list[int]) -> None:
        self.pool.acquire(hits)
        fresh = self.pool.allocate(len(running.keys) - len(hits))
        assert fresh is not None  # counted in _admit
        running.blocks = hits + fresh
        running.row = self._rows.pop()
        self.tables[running.row, : len(running.blocks)] = running.blocks
        running.prefix_hit = min(len(hits) * self.block_size, running.known)
        running.written = running.prefix_hit
        running.registered = len(hits)
        self.running.append(running)
        counters = self.counters
        if not running.preemptions:
            counters.prompt_tokens += running.known
        recovered = min(running.prefix_hit, running.reached)
        counters.recovered_tokens += recovered
        counters.prefix_hit_tokens += running.prefix_hit - recovered
        running.reached = max(running.reached, running.prefix_hit)
        running.loading = self._load is not None and self._load(running, len(hits))

    def loaded(self, running: Running, tokens: int) -> None:
        """Note that a load from elsewhere is done: the first ``tokens`` tokens are there."""
        running.loading = False
        start, counters = running.written, self.counters
        recovered = max(0, min(tokens, running.reached) - start)
        counters.recovered_tokens += recovered
        counters.prefix_hit_tokens += tokens - start - recovered
        running.prefix_hit = running.written = tokens
        running.reached = max(running.reached, tokens)
        self._register(running)

    # -- prefill --------------------------------------------------------------------------

    def _plan_prefill(self, step: Step) -> None:
        budget = self.chunk_tokens
        for running in self.running:
            if not budget:
                return
            count = min(running.missing, budget)
            if count:
                step.prefill.append((running, running.written, count))
                budget -= count

    def _register(self, running: Running, *, everything: bool = False) -> None:
        """Register the blocks that are written, so that they can be found.

        While a request runs these are the blocks of its known tokens, each as it is completed.
        Blocks of generated tokens are of use to the same request alone, so they are registered
        (``everything``) only when it is preempted.
        """
        written = running.written
        if everything and written > running.known:
            whole = running.known // self.block_size
            before = running.keys[whole - 1] if whole else b""
            running.keys[whole:] = block_keys(
                running.request, self.block_size, written, first=whole, before=before
            )
            running.registered = min(running.registered, whole)
        last = len(running.keys) if written >= running.known else written // self.block_size
        for place in range(running.registered, last):
            filled = min((place + 1) * self.block_size, written) - place * self.block_size
            self.pool.register(running.blocks[place], running.keys[place], filled)
        running.registered = last
