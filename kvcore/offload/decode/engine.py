# SPDX-License-Identifier: Apache-2.0
"""Sparse decode with the full cache on the host.

A step, for every layer and all requests of the batch at once::

    compute  write new rows . choose . . . . hits . . attend(input b)
    h2d                              misses ^                 (of the next layer of the group
    side                                      install ........ while this one attends)
    d2h        rows due ..............

- New tokens' rows are scattered into rings on the device (`moves.Ring`) and go to the host when
  the write policy says.  What is in the ring is served from there.
- A group of layers shares one choice of ids and one plan of its device pool.
- Misses are read from the host on a stream of their own.  The layers of a group after the first
  need nothing of the layer before but a free input buffer (``depth`` of them), so they load
  while it attends.  The first one needs the choice.
- What was read is installed in the pool on a side stream, behind the hits of the same layer.

Nothing waits on the host: `DecodeEngine.launch` plans and checks everything, then launches.  A
wait for a step is a wait for the computing stream; installs and copies to the host trail behind.

The work is divided: `choice` plans a step, `launch` puts it on the streams, `batch` knows which
requests there are and what becomes of them, `settle` waits for operations.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Unpack

from kvcore.errors import CaptureError, StreamError, fail
from kvcore.offload.checks import check_integer, each_of
from kvcore.offload.decode.batch import Batch, LaunchedStep
from kvcore.offload.decode.choice import Chooser
from kvcore.offload.decode.launch import Launcher
from kvcore.offload.decode.options import EngineOptions, Select, read_settings
from kvcore.offload.decode.places import Places, check_full, read_groups
from kvcore.offload.decode.result import (
    DecodeStatistics,
    DecodeTotals,
    StepResult,
    decode_failed,
)
from kvcore.offload.decode.settle import Settler
from kvcore.offload.decode.step import DecodeStep
from kvcore.offload.rows.full_lanes import FullLane, read_full

if TYPE_CHECKING:
    from kvcore.offload.decode.layer_events import LayerEvents
    from kvcore.offload.decode.moves import MakeRows
    from kvcore.offload.decode.request import DecodeRequest
    from kvcore.offload.rows.device_pool import DevicePool
    from kvcore.runtime import Device, Stream

__all__ = ["DecodeEngine", "DecodeStep"]


class DecodeEngine:
    """Decodes a batch of requests whose full caches are on the host.

    full:       by layer id (any integers of at least 0), the layer's lanes, each
                [blocks, block_size, size]; written, so no two may share a byte (layers may
                interleave in one slab).  On a modelled device swapped or device memory, since
                kernels read it in place.
    groups:     all layer ids, by group that shares its top-k.  A layer that is not in ``full``
                takes its time (``layer_us``), and has no rows: none is moved or counted for it.
    max_batch:  requests at a time; memory is taken for so many.
    max_tokens: positions are below it.
    topk:       the most rows a request attends to in a step.
    select:     select(request, group index, tokens): int32 or int64 positions below ``tokens``
                [n <= topk], each once, -1 for nothing; or [queries, k], of which the union (at
                most topk) is served.  Called by `launch`, for groups with a layer in ``full``.
    rows:       rows(request, layer, first, count): the new tokens' rows, a lane each
                [count, row bytes]; called on a worker, in stream order.

    Options:

    attend:     attend(AttentionInput); called on a worker, in stream order.
    layer_us:   microseconds of compute of a layer: a number, or f(layer, batch, tokens of all).
    policy, capacity, ways: of the pools (`DevicePool`); capacity None: 4 * topk.
    write_policy: "write_through" or "write_back".
    max_drafts: draft tokens of a step; recent_rows: device rows for a request's newest tokens.
    depth:      input buffers (2).
    compute:    the stream that computes; None: one is made.

    groups, max_batch, max_tokens, topk, max_drafts, recent_rows, write_policy and totals can be
    read.
    Raises ParamInvalidError before any work, DeviceOutOfMemoryError with nothing kept.
    """

    max_batch: int
    max_tokens: int
    topk: int
    max_drafts: int
    write_policy: str

    def __init__(
        self,
        device: Device,
        full: Mapping[int, Sequence[Any]],
        *,
        groups: Sequence[Sequence[int]],
        max_batch: int,
        max_tokens: int,
        topk: int,
        select: Select,
        rows: MakeRows,
        **options: Unpack[EngineOptions],
    ) -> None:
        settings = read_settings(
            device, max_batch=max_batch, max_tokens=max_tokens, topk=topk, select=select,
            rows=rows, options=options,
        )  # fmt: skip
        lanes = read_full(full, FullLane)
        self.groups: tuple[tuple[int, ...], ...] = read_groups(groups, lanes)
        check_full(device, lanes)
        self.max_batch, self.max_tokens, self.topk = max_batch, max_tokens, topk
        self.max_drafts, self.write_policy = settings.max_drafts, settings.write_policy
        self.recent_rows: int = settings.ring_rows
        first = next(iter(lanes.values()))[0]
        self._chooser = Chooser(settings, first.block_size, first.num_blocks)
        places = Places(device, full, self.groups, settings)
        try:
            self._run = Launcher(device, lanes, self.groups, settings)
        except BaseException:
            places.close()
            raise
        self._batch = Batch(settings, places, self._run)
        self._settler = Settler(self._batch, self._run)
        #: select() of a step under way is being asked.
        self._choosing = False

    # -- what can be read -----------------------------------------------------------------

    @property
    def totals(self) -> DecodeTotals:
        """Sums over all steps launched, which go on growing; `statistics` has a copy."""
        return self._batch.totals

    def statistics(self) -> DecodeStatistics:
        """The engine at this moment and its sums so far.  It can be asked after `close` too."""
        batch = self._batch
        batch.free_places()
        requests = batch.requests
        return DecodeStatistics(
            max_batch=self.max_batch,
            free_places=0 if batch.closed else batch.num_free,
            requests=len(requests),
            leaving=sum(state.leaving for state in requests),
            open_steps=len(batch.steps),
            closed=batch.closed,
            **asdict(batch.totals),
        )

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """Those that have a place in the batch, in the order they came.

        One that leaves is among them until no operation uses its place any more.
        """
        self._batch.free_places()
        return tuple(state.name for state in self._batch.requests)

    @property
    def leaving(self) -> tuple[Hashable, ...]:
        """Of ``requests`` those that leave: no step takes them, and their names are not free."""
        self._batch.free_places()
        return tuple(state.name for state in self._batch.requests if state.leaving)

    @property
    def events(self) -> LayerEvents:
        """Loads (misses are in the layer's input) and saves (rows are on the host) by layer."""
        return self._run.events

    @property
    def streams(self) -> dict[str, Stream]:
        """The streams by name: compute, h2d, side and d2h."""
        return dict(self._run.streams)

    def context(self, request: Hashable) -> int:
        """Tokens of the request that are accepted."""
        return self._any(request).context

    def on_host(self, request: Hashable) -> int:
        """Leading tokens that the full cache has for certain: what prefixes may be made of."""
        return self._any(request).confirmed

    def pool(self, request: Hashable, group: int) -> DevicePool:
        """The request's pool of a group that has a layer in ``full``."""
        pools = self._any(request).pools
        if type(group) is not int or group not in pools:
            fail("group", f"one of {', '.join(map(str, pools)) or 'none'}", repr(group))
        return pools[group]

    # -- who is in the batch --------------------------------------------------------------

    def admit(self, request: Hashable, table: Any, context: int) -> None:
        """Take a request in whose first ``context`` tokens the full cache has.

        table:   int32 or int64 [columns], kept and read at every step: token t is row
                 t % block_size of block table[t // block_size]; -1 where there is none (yet).
        Raises ParamInvalidError when the batch is full.
        """
        self._batch.check_open()
        self._check_not_choosing()
        self._batch.admit(request, table, context)

    async def preempt(self, request: Hashable) -> int:
        """Send what the host lacks, then forget the request; its blocks may be given back.

        Returns how many leading tokens the host has: all that were accepted.  Resume it with
        `admit`.  Waits until no operation uses the request's place and blocks, whatever cancel
        comes, and raises the cancel then; the request has left all the same.  Only a
        KeyboardInterrupt (a second Ctrl-C) ends the wait at once: the request is ``leaving``
        then, until its operations are over or it is asked to leave again, which waits for them.
        Raises DecodeFailed, with the request gone, when an operation failed; ParamInvalidError,
        with nothing changed, when its table has no block for a row to be sent; CaptureError
        while a graph is captured on a stream of the engine.
        """
        return await self._leave(request, "preempted")

    def preempt_blocking(self, request: Hashable) -> int:
        """Do what `preempt` does, holding this thread."""
        return self._leave_blocking(request, "preempted")

    async def evict(self, request: Hashable) -> int:
        """Do what `preempt` does, for a request that has finished."""
        return await self._leave(request, "evicted")

    def evict_blocking(self, request: Hashable) -> int:
        """Do what `evict` does, holding this thread."""
        return self._leave_blocking(request, "evicted")

    async def abort(self, request: Hashable) -> int:
        """Forget the request; what has not begun for it does not run.

        Returns how many leading tokens the host has for certain.  Waits as `preempt` does.
        """
        return await self._leave(request, "aborted")

    def abort_blocking(self, request: Hashable) -> int:
        """Do what `abort` does, holding this thread."""
        return self._leave_blocking(request, "aborted")

    async def _leave(self, request: Hashable, how: str) -> int:
        state = self._begin_leave(request, how)
        await self._settler.settle()
        return _on_host(state)

    def _leave_blocking(self, request: Hashable, how: str) -> int:
        state = self._begin_leave(request, how)
        self._settler.settle_blocking()
        return _on_host(state)

    def _begin_leave(self, request: Hashable, how: str) -> DecodeRequest:
        state = self._any(request)
        self._check_may_wait()
        if not state.leaving and how != "aborted":
            self._launch_flush(state)
        self._batch.begin_leave(state, how)
        return state

    # -- tokens ---------------------------------------------------------------------------

    def accept(self, request: Hashable, tokens: int) -> None:
        """Of the positions the last step wrote the first ``tokens`` stand, at least one.

        Those behind were rejected: nothing holds them any more.  Without a call between two
        steps the same positions are written again.
        """
        state = self._batch.find(request, "request")
        self._check_not_choosing()
        check_integer("tokens", tokens, 1)
        if tokens > state.end - state.context:
            fail("tokens", f"at most the {state.end - state.context} written", tokens)
        # The pools hold none of the rejected: a step's positions are all in the ring.
        state.accept(tokens)
        self.totals.accepted += tokens

    def invalidate(self, request: Hashable, from_pos: int) -> None:
        """Roll back: the request has ``from_pos`` tokens, which must not be more than it had."""
        state = self._batch.find(request, "request")
        self._check_not_choosing()
        check_integer("from_pos", from_pos, 0, state.context)
        state.roll_back(from_pos)
        for pool in state.pools.values():
            pool.invalidate(request, from_pos)

    async def flush(self, request: Hashable) -> int:
        """Send all accepted rows that the host lacks; returns `on_host`.

        Before its blocks are copied or their content is made findable.  Waits, cancelled or not,
        as `preempt` does, and raises what it raises.
        """
        state = self._begin_flush(request)
        await self._settler.settle()
        return _on_host(state)

    def flush_blocking(self, request: Hashable) -> int:
        """Do what `flush` does, holding this thread."""
        state = self._begin_flush(request)
        self._settler.settle_blocking()
        return _on_host(state)

    def _begin_flush(self, request: Hashable) -> DecodeRequest:
        state = self._batch.find(request, "request")
        self._check_may_wait()
        self._launch_flush(state)
        return state

    def _launch_flush(self, state: DecodeRequest) -> None:
        state.forget_tail()
        if state.clean >= state.context:
            return
        rows = self._chooser.host_rows(state, state.clean, state.context)
        self.totals.d2h_bytes += self._run.flush(state, state.clean, rows)
        state.clean = state.context

    # -- steps ----------------------------------------------------------------------------

    def launch(
        self, requests: Sequence[Hashable], drafts: int | Mapping[Hashable, int] = 0
    ) -> DecodeStep:
        """Launch a step for these requests and return at once.

        drafts: tokens to write behind the newest of each request, or of each by name.
        Raises CaptureError while a graph is captured on a stream of the engine.
        Raises ParamInvalidError, before anything is launched and with nothing changed, for
        requests not admitted or named twice, too many drafts, bad ids, bad tables, and for
        blocks that are not the writer's own: two requests write one in the step, or a row is
        written that is an accepted token of another request (blocks may be shared for reading).
        """
        batch = self._batch
        batch.check_open()
        self._check_capture()
        self._check_not_choosing()
        named = list(each_of("requests", requests))
        states = [batch.find(request, f"requests[{i}]") for i, request in enumerate(named)]
        if len({id(state) for state in states}) != len(states):
            fail("requests", "each request once", named)
        self._choosing = True
        try:
            parts, exhausted, cut = self._chooser.plan(states, drafts, batch.requests)
        finally:
            self._choosing = False
        try:
            times = self._run.times(parts)
        except BaseException:
            self._chooser.take_back(parts)
            raise
        begun = batch.begin_step(parts, exhausted, cut)
        copies = self._run.copies_launched()
        moved, start, end = self._run.step(parts, times)
        outcomes = batch.wrote(parts, exhausted, len(self.groups), self.recent_rows)
        step = LaunchedStep(self.totals.steps, moved, outcomes, start, end, begun, copies)
        batch.add_step(step)
        return DecodeStep(step, batch, self._run, self._settler)

    async def step(
        self, requests: Sequence[Hashable], drafts: int | Mapping[Hashable, int] = 0
    ) -> StepResult:
        """`launch` a step and wait for it."""
        return await self.launch(requests, drafts).wait()

    def step_blocking(
        self, requests: Sequence[Hashable], drafts: int | Mapping[Hashable, int] = 0
    ) -> StepResult:
        """`launch` a step and wait for it, holding this thread."""
        return self.launch(requests, drafts).wait_blocking()

    # -- the end of things ----------------------------------------------------------------

    async def aclose(self) -> None:
        """Wait until nothing runs, whatever cancel comes, then give the device memory back.

        Requests still in are dropped as by `abort`.  Raises DecodeFailed or RaceError, with the
        memory given back all the same, when something failed that was not reported before; and
        the cancel.  What ends the wait at once (a second Ctrl-C) leaves the memory taken until
        this is called again, or the device is left.
        """
        if self._begin_close():
            await self._settler.settle()
        self._batch.raise_failure()

    def close(self) -> None:
        """Do what `aclose` does, holding this thread; also after the device was left."""
        if self._begin_close():
            self._settler.settle_blocking()
        self._batch.raise_failure()

    def _begin_close(self) -> bool:
        """Drop the requests; True when there is something to wait for."""
        if self._batch.closed:
            return False
        if self._run.is_open:
            self._check_may_wait()
        self._batch.begin_close()
        return True

    # -- checks ---------------------------------------------------------------------------

    def _any(self, request: Hashable) -> DecodeRequest:
        """A request of the batch, one that is leaving too."""
        return self._batch.find(request, "request", leaving=True)

    def _check_may_wait(self) -> None:
        """Raise before anything is changed where no wait for the operations is possible."""
        self._check_capture()
        self._check_not_choosing()
        self._run.check_thread()

    def _check_not_choosing(self) -> None:
        """Raise where ``select``, which a step that is being launched asks, calls back."""
        if self._choosing:
            raise StreamError(
                "engine: expected select() to return ids and leave the engine as it is, got a call "
                "that would change it",
                argument="engine",
            )

    def _check_capture(self) -> None:
        if any(stream.is_capturing for stream in self._run.streams.values()):
            raise CaptureError(
                "engine: expected streams of which no graph is captured, got one that is",
                argument="engine",
            )


def _on_host(state: DecodeRequest) -> int:
    """Leading tokens that the host has; DecodeFailed when an operation failed meanwhile."""
    if state.failed is not None:
        raise decode_failed({state.name: state.confirmed}, state.failed)
    return state.confirmed
