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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from numpy.typing import NDArray

from kvcore.errors import ParamNullError, StreamError, fail
from kvcore.offload.checks import check_integer
from kvcore.offload.decode_launch import Launcher
from kvcore.offload.decode_request import DecodeRequest, read_table
from kvcore.offload.decode_result import DecodeFailed, DecodeTotals, RequestStep, StepResult
from kvcore.offload.decode_sample import MissModel
from kvcore.offload.device_pool import DevicePool
from kvcore.offload.full_lanes import FullLane, read_full
from kvcore.offload.write_policy import make_write_policy

if TYPE_CHECKING:
    from kvcore.offload.decode_moves import AttentionInput, MakeRows
    from kvcore.offload.device_pool import Selection
    from kvcore.offload.layer_events import LayerEvents
    from kvcore.runtime import Device, Event, Stream

__all__ = ["DecodeEngine", "DecodeStep"]

MAX_BATCH = 65_536
#: select(request, group index, tokens): positions below ``tokens``.
Select = Callable[[Hashable, int, int], Any]


@dataclass(slots=True)
class Chosen:
    """What one request attends to in one group.

    ids: int64 [n]; index: int64 [queries, k] rows of ids, or None; in_ring: int32 [n] row of the
    ring, or -1.
    """

    ids: NDArray[np.int64]
    index: NDArray[np.int64] | None
    in_ring: NDArray[np.int32]
    selection: Selection


@dataclass(slots=True)
class Part:
    """One request's part of a step: positions [context, context + tokens).

    send:   positions [send[0], send[1]) go to the host; host_rows: where.
    chosen: by group with real layers, of real requests.
    rows:   (hits, misses, recent) of each group.
    """

    request: DecodeRequest
    tokens: int
    send: tuple[int, int]
    host_rows: NDArray[np.int64]
    chosen: dict[int, Chosen]
    rows: list[tuple[int, int, int]]


class DecodeEngine:
    """Decodes a batch of requests whose full caches are on the host.

    full:       by layer id (any integers of at least 0), the lanes of the real layers, each
                [blocks, block_size, size]; written.  On a modelled device swapped or device
                memory, since kernels read it in place.
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
        self._policy = make_write_policy(write_policy)
        most = 1 + max_drafts
        if recent_rows is None:
            recent_rows = self._policy.default_rows(most)
        least = self._policy.rows_needed(most)
        check_integer("recent_rows", recent_rows, 1, 2**24)
        if recent_rows < least:
            what = f"at least {least} rows for {max_drafts} drafts a step ({write_policy})"
            fail("recent_rows", what, recent_rows)
        self._recent, self._most = recent_rows, most
        if capacity is None:
            capacity = topk if policy == "previous" else 4 * topk
        lanes = read_full(full, FullLane)
        self._groups = _read_groups(groups, lanes)
        first = next(iter(lanes.values()))
        _check_full(device, lanes)
        self._block_size, self._num_blocks = first[0].block_size, first[0].num_blocks
        self._select = select
        self._states: dict[Hashable, DecodeRequest] = {}
        self._leaving: set[DecodeRequest] = set()
        self._steps: set[DecodeStep] = set()
        self.totals = DecodeTotals()
        self._model = MissModel(len(self._groups))
        self._closed = False
        self._pools: list[dict[int, DevicePool]] = []
        self._free = list(range(max_real - 1, -1, -1))
        made: list[DevicePool] = []
        self._launcher: Launcher | None = None
        try:
            for _ in range(max_real):
                pools: dict[int, DevicePool] = {}
                for index, group in enumerate(self._groups):
                    own = {layer: full[layer] for layer in group if layer in lanes}
                    if own:
                        pools[index] = DevicePool(
                            own, capacity=capacity, topk=topk, max_tokens=max_tokens,
                            policy=policy, ways=ways, device=device,
                        )  # fmt: skip
                        made.append(pools[index])
                self._pools.append(pools)
            self._launcher = Launcher(
                device, lanes, self._groups, places=max_real, topk=topk, recent_rows=recent_rows,
                depth=depth, rows=rows, attend=attend, layer_us=layer_us, pace=pace,
                compute=compute,
            )  # fmt: skip
        except BaseException:
            for pool in made:
                pool.close()
            raise
        self._run: Launcher = self._launcher

    # -- what it says ---------------------------------------------------------------------

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """Those admitted, in the order they came."""
        return tuple(self._states)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layer ids by group."""
        return self._groups

    @property
    def write_policy(self) -> str:
        """Its name."""
        return self._policy.name

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
        return self._state(request).context

    def on_host(self, request: Hashable) -> int:
        """Leading tokens that the full cache has for certain: what prefixes may be made of."""
        return self._state(request).confirmed

    def pool(self, request: Hashable, group: int) -> DevicePool:
        """The request's pool of a group with real layers."""
        pools = self._state(request).pools
        if group not in pools:
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
        if request is None:
            raise ParamNullError("request: expected an identity, got None", argument="request")
        if request in self._states:
            fail("request", "one not admitted yet", repr(request))
        if len(self._states) + len(self._leaving) >= self.max_batch:
            fail("request", f"at most max_batch ({self.max_batch}) requests at a time", "one more")
        array = read_table(table)
        check_integer("context", context, 0, self.max_tokens)
        place, pools = -1, {}
        if real:
            if not self._free:
                expected = f"at most {len(self._pools)} real requests at a time"
                fail("real", expected, "one more")
            place = self._free.pop()
            pools = self._pools[place]
            for pool in pools.values():
                pool.admit(request)
        self._states[request] = DecodeRequest(request, array, context, place, pools)

    async def preempt(self, request: Hashable) -> int:
        """Send what the host lacks, then forget the request; its blocks may be given back.

        Returns how many leading tokens the host has: all that were accepted.  Resume it with
        `admit`.  Waits for what is launched, shielded: when this returns or raises
        DecodeFailed, no operation touches the request's blocks.  Raises ParamInvalidError, and
        changes nothing, when its table has no block for a row to be sent.
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
        try:
            await self._settle()
        finally:
            self._end_leave(state)
        return self._left(state)

    def _leave_blocking(self, request: Hashable, how: str) -> int:
        state = self._begin_leave(request, how)
        try:
            self._settle_blocking()
        finally:
            self._end_leave(state)
        return self._left(state)

    def _begin_leave(self, request: Hashable, how: str) -> DecodeRequest:
        state = self._state(request)
        if how != "aborted":
            self._launch_flush(state)
        del self._states[request]
        self._leaving.add(state)
        if how == "aborted":
            state.aborted = True
            for pool in state.pools.values():
                pool.evict(request)
        setattr(self.totals, how, getattr(self.totals, how) + 1)
        return state

    def _end_leave(self, state: DecodeRequest) -> None:
        self._leaving.discard(state)
        self._give_back(state)

    def _give_back(self, state: DecodeRequest) -> None:
        for pool in state.pools.values():
            if pool.request == state.name:
                pool.evict(state.name)
        if state.place >= 0:
            self._free.append(state.place)
            state.place, state.pools = -1, {}

    def _left(self, state: DecodeRequest) -> int:
        if state.failed is not None:
            raise _decode_failed({state.name: state.confirmed}, state.failed)
        if not state.aborted:
            state.confirm(state.clean, state.epoch)
        return state.confirmed

    # -- tokens ---------------------------------------------------------------------------

    def accept(self, request: Hashable, tokens: int) -> None:
        """Of the positions the last step wrote the first ``tokens`` stand, at least one.

        Those behind were rejected: nothing holds them any more.  Without a call between two
        steps the same positions are written again.
        """
        state = self._state(request)
        check_integer("tokens", tokens, 1)
        if tokens > state.end - state.context:
            fail("tokens", f"at most the {state.end - state.context} written", tokens)
        end = state.end
        state.accept(tokens)
        for pool in state.pools.values():
            pool.invalidate(request, state.context, end)
        self.totals.accepted += tokens

    def invalidate(self, request: Hashable, from_pos: int) -> None:
        """Roll back: the request has ``from_pos`` tokens, which must not be more than it had."""
        state = self._state(request)
        check_integer("from_pos", from_pos, 0, state.context)
        state.roll_back(from_pos)
        for pool in state.pools.values():
            pool.invalidate(request, from_pos)

    async def flush(self, request: Hashable) -> int:
        """Send all accepted rows that the host lacks; returns `on_host`.

        Before its blocks are copied or their content is made findable.
        """
        state = self._state(request)
        self._launch_flush(state)
        await self._settle()
        return self._flushed(state)

    def flush_blocking(self, request: Hashable) -> int:
        """The same, holding this thread."""
        state = self._state(request)
        self._launch_flush(state)
        self._settle_blocking()
        return self._flushed(state)

    def _flushed(self, state: DecodeRequest) -> int:
        if state.failed is not None:
            raise _decode_failed({state.name: state.confirmed}, state.failed)
        state.confirm(state.clean, state.epoch)
        return state.confirmed

    def _launch_flush(self, state: DecodeRequest) -> None:
        state.forget_tail()
        if state.clean >= state.context:
            return
        rows = state.host_rows(state.clean, state.context, self._block_size, self._num_blocks)
        self.totals.d2h_bytes += self._run.flush(state, state.clean, rows)
        state.clean = state.context

    # -- steps ----------------------------------------------------------------------------

    def launch(
        self, requests: Sequence[Hashable], drafts: int | Mapping[Hashable, int] = 0
    ) -> DecodeStep:
        """Launch a step for these requests and return at once.

        drafts: tokens to write behind the newest of each request, or of each by name.
        Raises ParamInvalidError, before anything is launched and with the books as they were,
        for requests not admitted or named twice, too many drafts, bad ids, bad tables.
        """
        self._check_open()
        parts, exhausted, cut = self._read_step(requests, drafts)
        self._choose(parts)
        for part in parts:
            part.request.forget_tail()
        totals = self.totals
        totals.steps += 1
        totals.exhausted += len(exhausted)
        totals.cut_drafts += cut
        before = [(p.request, p.request.clean, p.request.epoch) for p in parts]
        result, start, end = self._run.step(totals.steps, parts)
        for part in parts:
            request = part.request
            request.wrote(part.tokens, self._recent)
            request.clean = max(request.clean, part.send[1])
            totals.tokens += part.tokens
            result["requests"][request.name] = RequestStep(
                "stepped", request.context, part.tokens, request.real,
                *(tuple(rows[i] for rows in part.rows) for i in range(3)),
            )  # fmt: skip
        nothing = (0,) * len(self._groups)
        for request in exhausted:
            result["requests"][request.name] = RequestStep(
                "exhausted", request.context, 0, request.real, nothing, nothing, nothing
            )
        for name in ("hits", "misses", "recent", "hit_bytes", "h2d_bytes", "d2h_bytes"):
            setattr(totals, name, getattr(totals, name) + result[name])
        totals.rows += result["rows"]
        totals.real_rows += result["real_rows"]
        step = DecodeStep(self, result, start, end, before)
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

    def _read_step(
        self, requests: Sequence[Hashable], drafts: int | Mapping[Hashable, int]
    ) -> tuple[list[Part], list[DecodeRequest], int]:
        states = [self._state(request, f"requests[{i}]") for i, request in enumerate(requests)]
        if len({id(state) for state in states}) != len(states):
            fail("requests", "each request once", list(requests))
        parts: list[Part] = []
        exhausted: list[DecodeRequest] = []
        cut = 0
        for state in states:
            more = drafts.get(state.name, 0) if isinstance(drafts, Mapping) else drafts
            check_integer("drafts", more, 0, self.max_drafts)
            tokens = state.room(1 + more, self._block_size, self._num_blocks, self.max_tokens)
            if not tokens:
                exhausted.append(state)
                continue
            cut += 1 + more - tokens
            clean, context = min(state.clean, state.context), state.context
            due = self._policy.due(clean, context, context + tokens, self._recent, self._most)
            rows = state.host_rows(clean, due, self._block_size, self._num_blocks)
            parts.append(Part(state, tokens, (clean, due), rows, {}, []))
        return parts, exhausted, cut

    def _choose(self, parts: list[Part]) -> None:
        """Ids, plans and counts of every request and group."""
        planned: list[tuple[DevicePool, Selection]] = []
        try:
            for part in parts:
                for group in part.request.pools:
                    part.chosen[group] = self._choose_one(part, group)
                    pool = part.request.pools[group]
                    planned.append((pool, part.chosen[group].selection))
        except BaseException:
            for pool, selection in planned:
                pool.abandon(selection)
            raise
        model, num_groups = self._model, len(self._groups)
        for part in parts:
            for group, chosen in part.chosen.items():
                selection = chosen.selection
                recent = int(np.count_nonzero(chosen.in_ring >= 0))
                model.learn(part.request.age, group, (selection.hits, selection.misses, recent))
        for part in parts:
            wanted = min(self.topk, part.request.context + part.tokens)
            for group in range(num_groups):
                if group in part.chosen:
                    chosen = part.chosen[group]
                    recent = int(np.count_nonzero(chosen.in_ring >= 0))
                    part.rows.append((chosen.selection.hits, chosen.selection.misses, recent))
                else:
                    part.rows.append(model.estimate(part.request.age, group, wanted))

    def _choose_one(self, part: Part, group: int) -> Chosen:
        request = part.request
        end = request.context + part.tokens
        ids, index = _read_ids(self._select(request.name, group, end), end, self.topk)
        window = max(request.window, end - self._recent)
        recent = ids >= window
        in_ring = np.where(recent, ids % self._recent, -1).astype(np.int32)
        if np.count_nonzero(recent) != len(np.unique(ids[recent])):
            fail("ids", "each id once", "a repeat among the newest tokens")
        pool = request.pools[group]
        selection = pool.plan(request.name, np.where(recent, -1, ids), request.table)
        return Chosen(ids, index, in_ring, selection)

    # -- the end of things ----------------------------------------------------------------

    def close(self) -> None:
        """Give the device memory back, once nothing runs any more (see `abort`)."""
        if self._closed:
            return
        self._closed = True
        for state in self._states.values():
            state.aborted = True
        self._states.clear()
        for pools in self._pools:
            for pool in pools.values():
                pool.close()
        self._run.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamError("engine: expected an open one, got one that was closed")

    def _state(self, request: Hashable, argument: str = "request") -> DecodeRequest:
        self._check_open()
        state = self._states.get(request)
        if state is None:
            fail(argument, "a request that was admitted", repr(request))
        return state

    async def _settle(self) -> None:
        """Wait until nothing runs.  A failure puts every request out."""
        first: Exception | None = None
        with anyio.CancelScope(shield=True):
            for stream in self._run.streams.values():
                try:
                    await stream.synchronize()
                except Exception as error:
                    first = first or error
        self._settled(first)

    def _settle_blocking(self) -> None:
        first: Exception | None = None
        for stream in self._run.streams.values():
            try:
                stream.synchronize_blocking()
            except Exception as error:
                first = first or error
        self._settled(first)

    def _settled(self, error: Exception | None) -> None:
        if isinstance(error, StreamError):
            self._put_out(error)
        elif error is not None:
            raise error

    def _put_out(self, cause: BaseException) -> None:
        """Every request is out: what is unsure must be computed again."""
        self._run.start_again()
        lost = {state.name: state.confirmed for state in self._states.values()}
        for step in self._steps:
            step._lost, step._cause = lost, cause
        self._steps.clear()
        for state in self._leaving:
            state.failed = cause
        for state in self._states.values():
            state.failed = cause
            self._give_back(state)
        self.totals.failed += len(self._states)
        self._states.clear()

    def _finished(self, step: DecodeStep) -> None:
        self._steps.discard(step)
        # The step's layers waited for the copies of the steps before it.
        if not step._cause:
            for request, clean, epoch in step._before:
                request.confirm(clean, epoch)


class DecodeStep:
    """A step that was launched."""

    def __init__(
        self,
        engine: DecodeEngine,
        result: dict[str, Any],
        start: Event,
        end: Event,
        before: list[tuple[DecodeRequest, int, int]],
    ) -> None:
        self._engine, self._result, self._start, self._end = engine, result, start, end
        self._before = before
        self._lost: Mapping[Hashable, int] = {}
        self._cause: BaseException | None = None

    async def wait(self) -> StepResult:
        """Wait until the computing stream has done the step.

        Cancelling stops the waiting, not the work.  Raises DecodeFailed when an operation
        failed (every request is out then), RaceError (``race_check="raise"``).
        """
        try:
            await self._end.synchronize()
        except StreamError as error:
            await self._engine._settle()
            self._fail(error)
        return self._finish()

    def wait_blocking(self) -> StepResult:
        """The same, holding this thread."""
        try:
            self._end.synchronize_blocking()
        except StreamError as error:
            self._engine._settle_blocking()
            self._fail(error)
        return self._finish()

    def _fail(self, error: StreamError) -> None:
        if self._cause is None:
            # The streams had been told of it by somebody else's wait.
            self._engine._put_out(error)
        raise _decode_failed(self._lost, self._cause or error)

    def _finish(self) -> StepResult:
        if self._cause is not None:
            raise _decode_failed(self._lost, self._cause)
        self._engine._finished(self)
        start, end = (self._engine._run.time_of(event) for event in (self._start, self._end))
        return StepResult(start_us=start, end_us=end, **self._result)


def _decode_failed(lost: Mapping[Hashable, int], cause: BaseException) -> DecodeFailed:
    error = DecodeFailed(
        f"engine: expected every operation to run, got {cause}; its requests are out",
        argument="engine",
        seen=str(cause),
    )
    error.lost = dict(lost)
    error.__cause__ = cause
    return error


def _read_groups(
    groups: Sequence[Sequence[int]], lanes: Mapping[int, Any]
) -> tuple[tuple[int, ...], ...]:
    if isinstance(groups, str | bytes) or not isinstance(groups, Sequence) or not groups:
        fail("groups", "a sequence of layer ids for each group", repr(groups))
    seen: set[int] = set()
    read: list[tuple[int, ...]] = []
    for i, group in enumerate(groups):
        if isinstance(group, str | bytes) or not isinstance(group, Sequence) or not group:
            fail(f"groups[{i}]", "layer ids", repr(group))
        for layer in group:
            check_integer(f"groups[{i}]", layer, 0)
            if layer in seen:
                fail(f"groups[{i}]", "each layer once", layer)
            seen.add(layer)
        read.append(tuple(group))
    for layer in lanes:
        if layer not in seen:
            fail("groups", f"a group with layer {layer} of full", "none")
    return tuple(read)


def _check_full(device: Device, layers: Mapping[int, Sequence[FullLane]]) -> None:
    first = next(iter(layers.values()))
    for layer, lanes in layers.items():
        for lane in lanes:
            if lane.flat:
                fail(f"full[{layer}]", "lanes [blocks, block_size, size]", "a flat one")
            if lane.read_only:
                fail(f"full[{layer}]", "arrays that can be written", "a read-only one")
            space = getattr(lane.owner, "space", None)
            if device.profile is not None and space not in ("swapped", "device"):
                seen = f"{space or 'pageable host'} memory"
                fail(f"full[{layer}]", "swapped or device memory on a modelled device", seen)
        if [lane.row_bytes for lane in lanes] != [lane.row_bytes for lane in first]:
            seen = str([lane.row_bytes for lane in lanes])
            fail(f"full[{layer}]", f"rows of {[lane.row_bytes for lane in first]} bytes", seen)


def _read_ids(ids: Any, end: int, topk: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The union of the ids, and each query's rows in it when there are several queries."""
    array = getattr(ids, "__kvcore_array__", ids)
    if not isinstance(array, np.ndarray) or array.dtype not in (np.int32, np.int64):
        seen = array.dtype if isinstance(array, np.ndarray) else type(ids).__name__
        fail("ids", "an int32 or int64 array", seen)
    if array.ndim not in (1, 2):
        fail("ids", "[n] or [queries, n]", f"shape {array.shape}")
    index: NDArray[np.int64] | None = None
    wide = array.astype(np.int64)
    if array.ndim == 2:
        union, inverse = np.unique(wide, return_inverse=True)
        negative = int(np.count_nonzero(union < 0))
        index = np.maximum(inverse.reshape(array.shape) - negative, -1).astype(np.int64)
        wide = union[negative:]
    if len(wide) > topk:
        fail("ids", f"at most topk ({topk}) ids", len(wide))
    if len(wide) and int(wide.max()) >= end:
        place = int(wide.argmax())
        fail(f"ids[{place}]", f"positions below {end}", int(wide[place]))
    return wide, index
