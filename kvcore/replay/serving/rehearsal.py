# SPDX-License-Identifier: Apache-2.0
"""The sampled requests, served for real before the replay begins.

What a request misses depends on its own ids and on no other request, since its pools are its own.
So the sample is served first, a few requests at a time and without a clock, each from its prompt to
its end; from its first step on the replay then has shares of misses for all requests.  If the
sample were served in the order of the schedule, the first steps would have no shares to use.

For the same reason the sample may be served in parts, each in a process of its own: together they
learn what one process would.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.report.report import Mismatch
from kvcore.replay.serving.decoding import Decoding
from kvcore.replay.serving.miss_table import MissTable
from kvcore.replay.serving.real_decode import RealDecode
from kvcore.replay.serving.sample import GroupSample, draw_groups, draw_requests
from kvcore.replay.serving.samples import sample_positions
from kvcore.replay.serving.scheduler import Running
from kvcore.replay.traces.made_ids import MadeIds
from kvcore.replay.traces.reader import TraceRequest
from kvcore.replay.traces.recorded_ids import RecordedIds
from kvcore.runtime.profile import DeviceProfile

__all__ = ["Elsewhere", "Learned", "Rehearsal", "most_bytes"]

PLACES = 4
#: Blocks for all requests together, as a multiple of those of the longest request.
BLOCKS = 1.5


@dataclass(slots=True)
class _Served:
    """A sampled request that is being served, and its progress."""

    running: Running
    state: Decoding
    table: NDArray[np.int64]
    groups: GroupSample
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned from a part of the sample, and the rows it moved and verified.

    shares: `MissTable.learned`.
    recorded, made: selections whose ids were read from a recording, and made by the generator.
    """

    shares: dict[int, dict[int, NDArray[np.float64]]]
    rows: int
    verified: int
    mismatches: list[Mismatch]
    recorded: int
    made: int


class Elsewhere(Protocol):
    """A process that serves the other part of the sample."""

    def learned(self) -> Learned | None:
        """What was learned there; None when it has not ended after a short wait."""


def most_bytes(model: ModelProfile, options: OffloadOptions, pool: int, longest: int) -> int:
    """Bytes of this machine's memory that the rows of a sample take, at most.

    pool: entries of a request and layer; longest: tokens of the longest sampled request.
    The full caches of the requests in their places, their pools, and two buffers of selections.
    """
    layers = min(options.sample_layers, max(1, len(model.groups)))
    blocks = math.ceil(BLOCKS * -(-(longest + 1) // options.block_size))
    selected = 2 * (1 + options.drafts) * model.topk
    rows = blocks * options.block_size * layers + PLACES * (pool * layers + selected)
    return rows * model.row_bytes


class Rehearsal:
    """Serves the sample, `step` by step, and fills ``table``.

    real:  caches and engine, closed with the last request or by `close`.
    rows:  rows moved so far.
    ids:   the source of the ids; None: the default generator.
    part:  (number, parts): serve requests number, number + parts, number + 2 * parts, ... of the
           sample.
    elsewhere: the process that serves the other of two parts.
    Raises DeviceOutOfMemoryError for caches that do not fit this machine.
    """

    def __init__(
        self,
        model: ModelProfile,
        options: OffloadOptions,
        profile: DeviceProfile,
        pool: int,
        requests: Sequence[TraceRequest],
        ids: MadeIds | RecordedIds | None = None,
        *,
        part: tuple[int, int] = (0, 1),
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._model, self._options, self._elsewhere = model, options, elsewhere
        whole = draw_requests(requests, options)
        number, parts = part
        sample = whole[number::parts]
        # Request number i of n takes its share of the samples, so that they come out even.
        half = options.verify_samples // 2
        self._samples = {
            request.index: half * (i + 1) // len(whole) - half * i // len(whole)
            for i, request in enumerate(whole)
        }
        self.rows: int = 0
        self.table: MissTable = MissTable()
        self._sizes = [len(group) for group in model.groups]
        num_groups = min(options.sample_layers, len(self._sizes))
        self._waiting = deque(sample)
        longest = max(request.total_tokens for request in sample)
        blocks = math.ceil(BLOCKS * self._blocks_for(longest))
        self._free_blocks = list(range(blocks - 1, -1, -1))
        places = min(PLACES, len(sample))
        self._free = list(range(places))
        self._running: list[_Served] = []
        self._closed = False
        self.real: RealDecode = RealDecode(
            model, options, profile, pool,
            layers=range(num_groups),
            groups={n: (n,) for n in range(num_groups)},
            blocks=blocks,
            places=places,
            max_tokens=longest + 1,
            timed=False,
            ids=ids,
            served_samples=half * (number + 1) // parts - half * number // parts,
        )  # fmt: skip

    def step(self) -> bool:
        """Serve one step of those in their places; False when the sample is through."""
        if self._closed:
            return False
        while self._free and self._waiting:
            needed = self._blocks_for(self._waiting[0].total_tokens)
            if needed > len(self._free_blocks):
                break
            self._admit(self._waiting.popleft(), needed)
        self._leave_ended()  # those that generate nothing
        if self._running:
            self._decode()
            self._leave_ended()
        if not self._running and not self._waiting:
            if self._elsewhere is not None:
                other = self._elsewhere.learned()
                if other is None:
                    return True
                self._add(other)
            self.table.settle()
            self.close()
        return True

    @property
    def learned(self) -> Learned:
        """What was learned so far."""
        real = self.real
        return Learned(
            self.table.learned, self.rows, real.verified, real.mismatches, real.rows.recorded,
            real.rows.made,
        )  # fmt: skip

    def _add(self, other: Learned) -> None:
        self.table.learned.update(other.shares)
        self.rows += other.rows
        self.real.verified += other.verified
        self.real.mismatches += other.mismatches
        self.real.rows.recorded += other.recorded
        self.real.rows.made += other.made

    def close(self) -> None:
        """Give memory and threads back."""
        if not self._closed:
            self._closed = True
            self.real.close()

    def _blocks_for(self, tokens: int) -> int:
        return -(-(tokens + 1) // self._options.block_size)

    def _admit(self, request: TraceRequest, blocks: int) -> None:
        place = self._free.pop()
        running = Running(request, request.input_length, row=place)
        table = np.array([self._free_blocks.pop() for _ in range(blocks)], np.int64)
        groups = draw_groups(self._sizes, self._options.sample_layers, self._options, request.index)
        self.real.groups_of[request.index] = groups.numbers
        self.real.place(request, table, 0, request.input_length)
        running.written = request.input_length
        self.real.engine.admit(request.index, table, running.written)
        self._running.append(_Served(running, Decoding(request, self._options), table, groups))

    def _decode(self) -> None:
        options = self._options
        writes: dict[int, int] = {}
        stand: dict[int, int] = {}
        for served in self._running:
            request = served.running.request
            room = request.total_tokens - served.running.written - 1
            writes[request.index] = 1 + min(options.drafts, room)
            stand[request.index] = served.state.stands(writes[request.index], options.accept)
        result = self.real.step(list(writes), writes, stand)
        self.rows += result.rows
        for served in self._running:
            index = served.running.request.index
            found, context = result.requests[index], served.running.written
            rows = np.array((found.hits, found.misses, found.recent), np.float64)
            wanted = writes[index] * min(context + writes[index], self._model.topk)
            self.table.learn(index, context, served.steps, wanted, served.groups.mean(rows))
            served.running.written += stand[index]
            served.steps += 1

    def _ended(self, served: _Served) -> bool:
        running = served.running
        return running.written >= min(running.request.total_tokens, served.state.abort_at)

    def _leave_ended(self) -> None:
        for served in [s for s in self._running if self._ended(s)]:
            self._leave(served)

    def _leave(self, served: _Served) -> None:
        running = served.running
        index = running.request.index
        if running.written >= running.request.total_tokens:
            self.real.engine.evict_blocking(index)
            self._verify(served)
        else:
            self.real.engine.abort_blocking(index)
        self.real.rows.drop(index)
        del self.real.groups_of[index]
        self._running.remove(served)
        self._free.append(running.row)
        self._free_blocks += served.table[::-1].tolist()

    def _verify(self, served: _Served) -> None:
        """Compare the request's share of the samples on the host with their expected bytes."""
        request = served.running.request
        draw = np.random.default_rng([0x7666, self._options.seed, request.index])
        positions = sample_positions(draw, served.running, self._samples[request.index])
        self.real.verify(request, served.table, positions, draw)
