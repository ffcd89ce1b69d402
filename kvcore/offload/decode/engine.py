# SPDX-License-Identifier: Apache-2.0
"""Sparse decode with the full cache on the host.

A step, for every layer and all requests of the batch at once::

    compute  write new rows . choose . . . . hits . . attend(input b)
    h2d                              misses ^                 (of the next layer of the group
    side                                      install ........ while this one attends)
    d2h        rows due ..............

- New tokens' rows are scattered into rings on the device (`decode_moves.Ring`) and go to the host
  when the write policy says.  What is in the ring is served from there.
- A group of layers shares one choice of ids and one plan of its device pool.
- Misses are read from the host on a stream of their own.  The layers of a group after the first
  need nothing of the layer before but a free input buffer (``depth`` of them), so they load
  while it attends.  The first one needs the choice.
- What was read is installed in the pool on a side stream, behind the hits of the same layer.

Nothing waits on the host: `launch` plans all books, checks everything, then launches.  Whoever
waits for a step waits for the computing stream; installs and copies to the host trail behind.

Only the layers in ``full`` and the requests admitted as real have bytes.  The others are
accounted: their hits and misses follow those of the real ones (`decode_sample.MissModel`), their
rows count in what operations cost on the model clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcore.errors import CaptureError, ParamNullError, StreamError, fail
from kvcore.offload.checks import (
    check_device,
    check_identity,
    check_integer,
    check_stream,
    each_of,
    read_indices,
)
from kvcore.offload.decode.choice import Chooser, Select
from kvcore.offload.decode.launch import Launcher, ran
from kvcore.offload.decode.places import Places, check_full, read_groups
from kvcore.offload.decode.request import DecodeRequest
from kvcore.offload.decode.result import DecodeTotals, RequestStep, StepResult
from kvcore.offload.decode.settle import Settlement
from kvcore.offload.decode.step import DecodeStep, decode_failed
from kvcore.offload.decode.write_policy import make_write_policy
from kvcore.offload.rows.device_pool import DevicePool
from kvcore.offload.rows.full_lanes import FullLane, read_full
from kvcore.runtime.shield import Shield

if TYPE_CHECKING:
    from kvcore.offload.decode.layer_events import LayerEvents
    from kvcore.offload.decode.moves import AttentionInput, MakeRows
    from kvcore.runtime import Device, Stream

__all__ = ["DecodeEngine", "DecodeStep"]

MAX_BATCH = 65_536


class DecodeEngine:
    """Decodes a batch of requests whose full caches are on the host.

    full:       by layer id (any integers of at least 0), the lanes of the real layers, each
                [blocks, block_size, size]; written, so no two may share a byte (layers may
                interleave in one slab).  On a modelled device swapped or device memory, since
                kernels read it in place.
    groups:     all layer ids, by group that shares its top-k; those not in ``full`` are accounted.
    max_batch:  requests at a time; max_real: of them real ones (memory is taken for so many).
    max_tokens: positions are below it.
    topk:       the most rows a request attends to in a step.
    select:     see `Select`; int32 or int64 [n <= topk], each once, -1 for nothing; or
                [queries, k], of which the union (at most topk) is served.  Called by `launch`.
    rows:       rows(request, layer, first, count): the new tokens' rows, a lane each
                [count, row bytes]; called on a worker, in stream order.
    attend:     attend(AttentionInput); called on a worker, in stream order.
    layer_us:   microseconds of compute of a layer: a number, or f(layer, batch, tokens of all).
    policy, capacity, ways: of the pools (`DevicePool`); capacity None: 4 * topk.
    write_policy: "write_through" or "write_back".
    max_drafts: draft tokens of a step; recent_rows: device rows for a request's newest tokens.
    depth:      input buffers.
    pace:       launch operations that only cost time for the layers that are not real.
    compute:    the stream that computes; None: one is made.

    groups, max_batch, max_tokens, topk, max_drafts, recent_rows, write_policy and totals can be
    read.
    Raises ParamInvalidError before any work, DeviceOutOfMemoryError with nothing kept.
    """

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
        attend: Callable[[AttentionInput], object] | None = None,
        layer_us: float | Callable[[int, int, int], float] = 0.0,
        policy: str = "lru",
        capacity: int | None = None,
        ways: int | None = None,
        write_policy: str = "write_through",
        max_drafts: int = 0,
        recent_rows: int | None = None,
        max_real: int | None = None,
        depth: int = 2,
        pace: bool = True,
        compute: Stream | None = None,
    ) -> None:
        check_device("device", device)
        if compute is not None and check_stream("compute", compute).device is not device:
            fail("compute", "a stream of the same device", repr(compute))
        if type(pace) is not bool:
            fail("pace", "True or False", repr(pace))
        self.max_batch = check_integer("max_batch", max_batch, 1, MAX_BATCH)
        self.max_tokens = check_integer("max_tokens", max_tokens, 1)
        self.topk = check_integer("topk", topk, 1)
        self.max_drafts = check_integer("max_drafts", max_drafts, 0, 2**16)
        max_real = max_batch if max_real is None else max_real
        check_integer("max_real", max_real, 0, max_batch)
        check_integer("depth", depth, 1, 1024)
        for name, value in (("select", select), ("rows", rows), ("attend", attend)):
            if not callable(value) and not (name == "attend" and value is None):
                fail(name, "a callable", type(value).__name__)
        writes = make_write_policy(write_policy)
        self.write_policy, most = writes.name, 1 + max_drafts
        if recent_rows is None:
            recent_rows = writes.default_rows(most)
        check_integer("recent_rows", recent_rows, 1, 2**24)
        if recent_rows < writes.rows_needed(most):
            least = writes.rows_needed(most)
            what = f"at least {least} rows for {max_drafts} drafts a step ({write_policy})"
            fail("recent_rows", what, recent_rows)
        self.recent_rows = recent_rows
        lanes = read_full(full, FullLane)
        self.groups = read_groups(groups, lanes)
        check_full(device, lanes)
        first = next(iter(lanes.values()))[0]
        self._states: dict[Hashable, DecodeRequest] = {}  # those that leave included
        self._steps: set[DecodeStep] = set()
        self.totals = DecodeTotals()
        self._closed = self._ended = False
        #: select() of a step under way is being asked.
        self._choosing = False
        self._failure: BaseException | None = None  # found by close
        self._chooser = Chooser(
            len(self.groups), select=select, policy=writes, topk=topk, max_tokens=max_tokens,
            recent_rows=recent_rows, most=most, block_size=first.block_size,
            num_blocks=first.num_blocks,
        )  # fmt: skip
        self._places = Places(
            device, full, self.groups, max_real, policy=policy, capacity=capacity, topk=topk,
            max_tokens=max_tokens, ways=ways,
        )  # fmt: skip
        try:
            self._run = Launcher(
                device, lanes, self.groups, places=max_real, topk=topk, recent_rows=recent_rows,
                depth=depth, rows=rows, attend=attend, layer_us=layer_us, pace=pace,
                compute=compute,
            )  # fmt: skip
        except BaseException:
            self._places.close()
            raise

    # -- what it says ---------------------------------------------------------------------

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """Those that have a place in the batch, in the order they came.

        One that leaves is among them until no operation uses its place any more.
        """
        self._give_back_places()
        return tuple(self._states)

    @property
    def leaving(self) -> tuple[Hashable, ...]:
        """Of ``requests`` those that leave: no step takes them, and their names are not free."""
        self._give_back_places()
        return tuple(name for name, state in self._states.items() if state.leaving)

    @property
    def events(self) -> LayerEvents:
        """Loads (misses are in the layer's input) and saves (rows are on the host) by layer."""
        return self._run.events

    @property
    def streams(self) -> dict[str, Stream]:
        """compute, h2d, side and d2h."""
        return dict(self._run.streams)

    def context(self, request: Hashable) -> int:
        """Tokens of the request that are accepted."""
        return self._state(request, leaving=True).context

    def on_host(self, request: Hashable) -> int:
        """Leading tokens that the full cache has for certain: what prefixes may be made of."""
        return self._state(request, leaving=True).confirmed

    def pool(self, request: Hashable, group: int) -> DevicePool:
        """The request's pool of a group with real layers."""
        pools = self._state(request, leaving=True).pools
        if type(group) is not int or group not in pools:
            fail("group", f"one of {', '.join(map(str, pools)) or 'none'}", repr(group))
        return pools[group]

    # -- who is in the batch --------------------------------------------------------------

    def admit(self, request: Hashable, table: Any, context: int, *, real: bool = True) -> None:
        """Take a request in whose first ``context`` tokens the full cache has.

        table:   int32 or int64 [columns], kept and read at every step: token t is row
                 t % block_size of block table[t // block_size]; -1 where there is none (yet).
        real:    False: accounted only.
        Raises ParamInvalidError when the batch is full.
        """
        self._check_open()
        self._check_not_choosing()
        if request is None:
            raise ParamNullError("request: expected an identity, got None", argument="request")
        if type(real) is not bool:
            fail("real", "True or False", repr(real))
        check_identity("request", request)
        self._give_back_places()
        if request in self._states:
            leaves = ", which is leaving" if self._states[request].leaving else ""
            fail("request", "one not admitted yet", f"{request!r}{leaves}")
        if len(self._states) >= self.max_batch:
            fail("request", f"at most max_batch ({self.max_batch}) requests at a time", "one more")
        read_indices("table", table)
        check_integer("context", context, 0, self.max_tokens)
        place, pools = self._places.take(request) if real else (-1, {})
        self._states[request] = DecodeRequest(request, table, context, place, pools)

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
        """The same, holding this thread."""
        return self._leave_blocking(request, "preempted")

    async def evict(self, request: Hashable) -> int:
        """`preempt` for a request that has finished."""
        return await self._leave(request, "evicted")

    def evict_blocking(self, request: Hashable) -> int:
        """The same, holding this thread."""
        return self._leave_blocking(request, "evicted")

    async def abort(self, request: Hashable) -> int:
        """Forget the request; what has not begun for it does not run.

        Returns how many leading tokens the host has for certain.  Waits as `preempt` does.
        """
        return await self._leave(request, "aborted")

    def abort_blocking(self, request: Hashable) -> int:
        """The same, holding this thread."""
        return self._leave_blocking(request, "aborted")

    async def _leave(self, request: Hashable, how: str) -> int:
        state = self._begin_leave(request, how)
        await self._settle()
        return self._left(state)

    def _leave_blocking(self, request: Hashable, how: str) -> int:
        state = self._begin_leave(request, how)
        self._settle_blocking()
        return self._left(state)

    def _begin_leave(self, request: Hashable, how: str) -> DecodeRequest:
        state = self._state(request, leaving=True)
        self._check_may_wait()
        if not state.leaving:
            if how != "aborted":
                self._launch_flush(state)
            state.leaving = True
            setattr(self.totals, how, getattr(self.totals, how) + 1)
        if how == "aborted" and not state.aborted:
            state.aborted = True
            for pool in state.pools.values():
                pool.evict(request)
        return state

    def _end_leave(self, state: DecodeRequest) -> None:
        """Nothing uses the request's place any more."""
        if self._states.get(state.name) is state:
            del self._states[state.name]
        self._places.give_back(state)

    def _give_back_places(self) -> None:
        """End the leaving of requests that nobody waits for, once their operations are over."""
        for state in list(self._states.values()):
            if state.last and self._run.over(state.last):
                self._end_leave(state)

    def _left(self, state: DecodeRequest) -> int:
        if state.failed is not None:
            raise decode_failed({state.name: state.confirmed}, state.failed)
        return state.confirmed

    # -- tokens ---------------------------------------------------------------------------

    def accept(self, request: Hashable, tokens: int) -> None:
        """Of the positions the last step wrote the first ``tokens`` stand, at least one.

        Those behind were rejected: nothing holds them any more.  Without a call between two
        steps the same positions are written again.
        """
        state = self._state(request)
        self._check_not_choosing()
        check_integer("tokens", tokens, 1)
        if tokens > state.end - state.context:
            fail("tokens", f"at most the {state.end - state.context} written", tokens)
        # The pools hold none of the rejected: a step's positions are all in the ring.
        state.accept(tokens)
        self.totals.accepted += tokens

    def invalidate(self, request: Hashable, from_pos: int) -> None:
        """Roll back: the request has ``from_pos`` tokens, which must not be more than it had."""
        state = self._state(request)
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
        state = self._state(request)
        self._check_may_wait()
        self._launch_flush(state)
        await self._settle()
        return self._flushed(state)

    def flush_blocking(self, request: Hashable) -> int:
        """The same, holding this thread."""
        state = self._state(request)
        self._check_may_wait()
        self._launch_flush(state)
        self._settle_blocking()
        return self._flushed(state)

    def _flushed(self, state: DecodeRequest) -> int:
        if state.failed is not None:
            raise decode_failed({state.name: state.confirmed}, state.failed)
        return state.confirmed

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
        Raises ParamInvalidError, before anything is launched and with the books as they were,
        for requests not admitted or named twice, too many drafts, bad ids, bad tables, and for
        blocks that are not the writer's own: two requests write one in the step, or a row is
        written that is an accepted token of another request (blocks may be shared for reading).
        """
        self._check_open()
        self._check_capture()
        self._check_not_choosing()
        named = list(each_of("requests", requests))
        states = [self._state(request, f"requests[{i}]") for i, request in enumerate(named)]
        if len({id(state) for state in states}) != len(states):
            fail("requests", "each request once", named)
        self._choosing = True
        try:
            parts, exhausted, cut = self._chooser.plan(states, drafts, tuple(self._states.values()))
        finally:
            self._choosing = False
        try:
            times = self._run.times(parts)
        except BaseException:
            self._chooser.take_back(parts)
            raise
        for part in parts:
            part.request.forget_tail()
        totals = self.totals
        totals.steps += 1
        totals.exhausted += len(exhausted)
        totals.cut_drafts += cut
        copies = self._run.copies_launched()
        before = [(p.request, p.request.clean, p.request.epoch) for p in parts]
        result, start, end = self._run.step(totals.steps, parts, times)
        for part in parts:
            request = part.request
            request.wrote(part.tokens, self.recent_rows)
            request.clean = max(request.clean, part.send[1])
            totals.tokens += part.tokens
            result["requests"][request.name] = RequestStep(
                "stepped", request.context, part.tokens, request.real,
                *(tuple(rows[i] for rows in part.rows) for i in range(3)),
            )  # fmt: skip
        nothing = (0,) * len(self.groups)
        for request in exhausted:
            result["requests"][request.name] = RequestStep(
                "exhausted", request.context, 0, request.real, nothing, nothing, nothing
            )
        for name in ("hits", "misses", "recent", "hit_bytes", "h2d_bytes", "d2h_bytes"):
            setattr(totals, name, getattr(totals, name) + result[name])
        totals.rows += result["rows"]
        totals.real_rows += result["real_rows"]
        step = DecodeStep(self, result, start, end, before, copies)
        self._steps.add(step)
        return step

    async def step(
        self, requests: Sequence[Hashable], drafts: int | Mapping[Hashable, int] = 0
    ) -> StepResult:
        """`launch` and wait."""
        return await self.launch(requests, drafts).wait()

    def step_blocking(
        self, requests: Sequence[Hashable], drafts: int | Mapping[Hashable, int] = 0
    ) -> StepResult:
        """`launch` and wait, holding this thread."""
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
            await self._settle()
        self._closed_well()

    def close(self) -> None:
        """The same, holding this thread; also after the device was left."""
        if self._begin_close():
            self._settle_blocking()
        self._closed_well()

    def _begin_close(self) -> bool:
        """Drop the requests; True when there is something to wait for."""
        if self._ended:
            return False
        if self._run.is_open:
            self._check_may_wait()
        self._closed = True
        for state in self._states.values():
            state.aborted = state.leaving = True
        return True

    def _end_close(self) -> None:
        self._ended = True
        self._states.clear()
        self._places.close()
        self._run.close()

    def _closed_well(self) -> None:
        cause, self._failure = self._failure, None
        if cause is not None:
            raise decode_failed({}, cause)

    def _check_open(self) -> None:
        if self._closed:
            raise StreamError("engine: expected an open one, got one that was closed")

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

    def _state(
        self, request: Hashable, argument: str = "request", *, leaving: bool = False
    ) -> DecodeRequest:
        self._check_open()
        state = self._states.get(check_identity(argument, request))
        if state is None:
            fail(argument, "a request that was admitted", repr(request))
        if state.leaving and not leaving:
            fail(argument, "a request that is not leaving", repr(request))
        return state

    async def _settle(
        self, step: DecodeStep | None = None, error: StreamError | None = None
    ) -> None:
        """Wait until nothing runs that was launched by now.  A failure puts every request out.

        step, error: one that failed.  Lasts through every cancel and raises it at its end.
        """
        settlement = Settlement(self, step, error)
        with Shield() as shield, settlement:
            for stream in settlement.to_synchronize:
                with settlement.seeing():
                    await shield(stream.synchronize)
            for stream in settlement.to_drain():
                await shield(stream.drain)
            settlement.end()

    def _settle_blocking(
        self, step: DecodeStep | None = None, error: StreamError | None = None
    ) -> None:
        settlement = Settlement(self, step, error)
        with settlement:
            for stream in settlement.to_synchronize:
                with settlement.seeing():
                    stream.synchronize_blocking()
            for stream in settlement.to_drain():
                stream.drain_blocking()
            settlement.end()

    def _put_out(self, cause: StreamError) -> list[DecodeRequest]:
        """Every request leaves; what is not certain must be computed again.  Returns them."""
        lost = [state for state in self._states.values() if not state.leaving]
        for step in self._steps:
            step._lost = {state.name: state.confirmed for state in lost}
            step._cause = cause
        self._steps.clear()
        for state in self._states.values():
            state.failed = state.failed or cause
        for state in lost:
            state.leaving = state.aborted = True
            for pool in state.pools.values():
                pool.evict(state.name)
        self.totals.failed += len(lost)
        if self._closed:
            self._failure = self._failure or cause
        elif self._run.is_open:
            self._run.start_again()
        return lost

    def _finished(self, step: DecodeStep) -> None:
        self._steps.discard(step)
        # The step's layers waited for the copies of the steps before it.
        if not step._cause and ran(step._copies):
            for request, clean, epoch in step._before:
                request.confirm(clean, epoch)
