# SPDX-License-Identifier: Apache-2.0
"""A pool of rows on the device in front of the full cache on the host, larger than top-k.

One pool serves one request (at a time) and one group of layers that share their top-k ids.  A
step has three parts, so that the group decides once and the writes into the pool can leave the
path of the computation:

1. ``plan(request, ids)``: which ids are held and where, which must be read, and which places
   those take.  Once a step for the whole group; no byte is moved.
2. ``serve(selection, layer, out)``: the rows in the order of the ids, held ones from the pool and
   the others from the host.  Exactly one copy a row.  Also in halves, for two streams:
   ``plan_hits`` and ``plan_misses``.
3. ``install(selection, layer, out)``: the rows that were read, from ``out`` into their places.  Of
   a layer behind its serve; may run on a side stream.

What is served equals the full cache's bytes, whatever the policy, as long as rows of the full cache
that are rewritten are named to ``invalidate``.  The order that this rests on is checked when a move
runs: a layer's serve follows its install of the step before, and its install follows its serve.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.checks import check_device, check_identity, check_integer, read_indices
from kvcore.offload.rows.full_lanes import read_full
from kvcore.offload.rows.policy import make_books
from kvcore.offload.rows.pool_moves import Out, PoolLane, PoolLayer, PoolMove, PoolOutput
from kvcore.offload.rows.pool_selection import Selection

__all__ = ["DevicePool", "DevicePoolStatistics", "PoolMove", "PoolOutput", "Selection"]

Ids = NDArray[np.int32] | NDArray[np.int64]
BLOCK_FAULT = 3  # of a plan: an id whose block is not in the table or the cache


@dataclass(frozen=True, slots=True)
class DevicePoolStatistics:
    """What `DevicePool.statistics` returns.

    used, free:  places now; request: whose rows are held, or None.
    selections:  plans since the pool was made, for all its requests; abandoned: those of them that
                 were taken back.
    hits, misses: rows of the plans (abandoned ones too) that were held and that had to be read.
    invalidated: rows that `DevicePool.invalidate` dropped.
    """

    policy: str
    capacity: int
    used: int
    free: int
    request: Hashable
    selections: int
    abandoned: int
    hits: int
    misses: int
    invalidated: int


class DevicePool:
    """Rows of one request's tokens, for the layers of one group.

    full:       by layer id (any integers), the layer's lanes of the full cache: each
                ``[blocks, block_size, size]``, or ``[tokens, size]`` where a token's id is its
                row.  Any dtype; host, swapped, a memory map or device.  Never written.
    capacity:   places; topk: the most ids a step; max_tokens: ids are below it.
    policy, ways: see ``kvcore.offload.rows.policy``.
    device:     a ``kvcore.Device`` whose memory the rows are counted against; None: plain memory.

    Raises ParamInvalidError; DeviceOutOfMemoryError with nothing kept.
    """

    policy: str
    capacity: int
    topk: int

    def __init__(
        self,
        full: Mapping[int, Sequence[Any]],
        *,
        capacity: int,
        topk: int,
        max_tokens: int,
        policy: str = "lru",
        ways: int | None = None,
        device: Any = None,
    ) -> None:
        if device is not None:
            check_device("device", device)
        self._books = make_books(policy, capacity, max_tokens, topk, ways)
        self.policy, self.capacity, self.topk = policy, capacity, topk
        self.max_tokens = max_tokens
        self._layers = {n: PoolLayer(lanes) for n, lanes in read_full(full, PoolLane).items()}
        first = next(iter(self._layers.values())).lanes[0]
        self._block_size, self._num_blocks = first.block_size, first.num_blocks
        self._flat = first.flat
        self._request: Hashable = None
        self._number = self._barrier = 0
        self._pending: Selection | None = None
        self._live_number = 0
        self._closed = False
        self._selections = self._abandoned = self._hits = self._misses = self._invalidated = 0
        buffers: list[Any] = []
        try:
            for layer in self._layers.values():
                for lane in layer.lanes:
                    shape = (capacity, lane.row_bytes)
                    if device is None:
                        lane.held = lane.array = np.empty(shape, np.uint8)
                    else:
                        lane.held = device.empty(shape, "uint8")
                        buffers.append(lane.held)
                        lane.array = lane.held.__kvcore_array__
        except BaseException:
            for buffer in buffers:
                buffer.free()
            raise
        self._buffers = buffers

    # -- what can be read ---------------------------------------------------------------------

    @property
    def request(self) -> Hashable:
        """Whose rows are held, or None."""
        return self._request

    @property
    def used(self) -> int:
        """Places that hold a token."""
        return self._books.used

    @property
    def free(self) -> int:
        """Places that hold none; ``used + free == capacity``."""
        return self.capacity - self._books.used

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer ids of the group."""
        return tuple(self._layers)

    def held(self) -> dict[int, int]:
        """Place by token, of every token held."""
        tokens = np.empty(self.capacity, np.int32)
        self._books.tokens(tokens)
        return {int(tokens[place]): int(place) for place in np.flatnonzero(tokens >= 0)}

    def serves(self, selection: Selection) -> bool:
        """Whether moves of a selection of this pool still do something.

        They do nothing once its request was evicted or the pool closed.
        """
        return not self._closed and selection.number > self._barrier

    def statistics(self) -> DevicePoolStatistics:
        """What the pool holds now, and what it was asked since it was made: a snapshot."""
        return DevicePoolStatistics(
            self.policy, self.capacity, self.used, self.free, self._request, self._selections,
            self._abandoned, self._hits, self._misses, self._invalidated,
        )  # fmt: skip

    # -- whose it is ----------------------------------------------------------------------

    def admit(self, request: Hashable) -> None:
        """Begin to serve a request, by its identity; nothing is held.

        Raises ParamInvalidError when another is being served.
        """
        if check_identity("request", request) is None:
            fail("request", "an identity", None)
        if self._request is not None:
            fail("request", f"no request before {self._request!r} is evicted", repr(request))
        self._forget_all()
        self._request = request

    def evict(self, request: Hashable) -> None:
        """Stop serving the request; hold nothing.

        Moves of its selections that have not begun do nothing from here on.  Nothing is waited
        for: what runs still uses the rows, so order the next request's first serve behind it.
        """
        self._checked(request)
        self._request = None
        self._forget_all()

    def _forget_all(self) -> None:
        self._books.reset()
        self._barrier, self._live_number, self._pending = self._number, 0, None

    def _checked(self, request: Hashable) -> None:
        if request is None or check_identity("request", request) != self._request:
            fail("request", f"the request being served ({self._request!r})", repr(request))

    def close(self) -> None:
        """Give the device memory back; no request can be admitted."""
        if not self._closed:
            self._closed = True
            self._request = None
            self._forget_all()
            for buffer in self._buffers:
                buffer.free()

    # -- decisions ------------------------------------------------------------------------

    def plan(self, request: Hashable, ids: Any, block_table: Any = None) -> Selection:
        """Decide one step.

        ids:         [n <= topk] int32 or int64, below max_tokens, each once; negative ids ask
                     for nothing.
        block_table: [columns] int32 or int64: token t of the request is row t % block_size of
                     block block_table[t // block_size].  Read now.  None for flat full caches.
        Raises ParamInvalidError (SlotRangeError is not used: nothing is a slot here) and changes
        nothing then.
        """
        self._checked(request)
        wanted = read_indices("ids", ids)
        if len(wanted) > self.topk:
            fail("ids", f"at most topk ({self.topk}) ids", len(wanted))
        n = len(wanted)
        wide, rows = np.empty((2, n), np.int64)
        source, target = np.empty((2, n), np.int32)
        fault = self._books.plan_rows(
            wanted, self._table(block_table), self._block_size, self._num_blocks, wide, rows,
            source, target,
        )  # fmt: skip
        if fault:
            self._refuse(fault, self._books.fault_index, wanted, block_table)
        self._number += 1
        selection = Selection(self._number, self._live_number, wide, rows, source, target)
        selection.hits, selection.misses = self._books.hits, self._books.misses
        self._live_number, self._pending = self._number, selection
        self._selections += 1
        self._hits += selection.hits
        self._misses += selection.misses
        return selection

    def _table(self, block_table: Any) -> NDArray[np.int64]:
        if self._flat:
            if block_table is not None:
                fail("block_table", "none for a flat full cache", type(block_table).__name__)
            return np.zeros(1, np.int64)
        return np.ascontiguousarray(read_indices("block_table", block_table), np.int64)

    def _refuse(self, fault: int, place: int, ids: Ids, block_table: Any) -> NoReturn:
        id = int(ids[place])
        if fault != BLOCK_FAULT:
            expected = f"ids below {self.max_tokens}" if fault == 1 else "each id once"
            fail(f"ids[{place}]", expected, id)
        column = id // self._block_size
        if self._flat:
            fail(f"ids[{place}]", f"a row of the full cache ({self._block_size})", id)
        table = self._table(block_table)
        if column >= len(table):
            fail(f"ids[{place}]", f"a token of {len(table)} blocks", id)
        fail(f"block_table[{column}]", f"a block below {self._num_blocks}", int(table[column]))

    def abandon(self, selection: Selection) -> None:
        """Take back the newest selection: the places it gave are free, whatever was installed.

        For a step that is given up.  What gave way stays away.
        """
        if selection is None or selection is not self._pending:
            fail("selection", "the newest selection, not yet abandoned", repr(selection))
        for id in selection.ids[selection.target >= 0].tolist():
            self._books.forget(id, id + 1)
        self._live_number, self._pending = selection.previous, None
        self._abandoned += 1

    def invalidate(self, request: Hashable, from_pos: int, end: int | None = None) -> int:
        """Hold no token at or past ``from_pos`` (and before ``end``) any more.

        For draft tokens that were rejected and for newest tokens that are written again: call it
        before the next plan.  Returns how many were held.
        """
        self._checked(request)
        check_integer("from_pos", from_pos, 0)
        if end is None:
            end = self.max_tokens
        check_integer("end", end, 0)
        dropped = self._books.forget(min(from_pos, self.max_tokens), min(end, self.max_tokens))
        self._invalidated += dropped
        return dropped

    # -- bytes ------------------------------------------------------------------------

    def plan_serve(self, selection: Selection, layer: int, out: Out) -> PoolMove:
        """A move for ``stream.launch``: row i of every lane to ``out[lane][i]``.

        out: for each lane an array ``[at least n, size]`` of the lane's row bytes, written in
             place; rows of negative ids are not written.  Or a `PoolOutput` of them.
        """
        return PoolMove(self, "serve", selection, self._layer(layer), layer, out)

    def plan_hits(self, selection: Selection, layer: int, out: Out) -> PoolMove:
        """The half of a serve that reads the pool; behind the install of the step before."""
        return PoolMove(self, "hits", selection, self._layer(layer), layer, out)

    def plan_misses(self, selection: Selection, layer: int, out: Out) -> PoolMove:
        """The half of a serve that reads the host, in any order with the other half."""
        return PoolMove(self, "misses", selection, self._layer(layer), layer, out)

    def plan_install(self, selection: Selection, layer: int, out: Out) -> PoolMove:
        """A move for ``stream.launch``: the rows that were read, from ``out`` into the pool."""
        return PoolMove(self, "install", selection, self._layer(layer), layer, out)

    def serve(self, selection: Selection, layer: int, out: Out) -> None:
        """``plan_serve`` and run it now."""
        self.plan_serve(selection, layer, out).run()

    def install(self, selection: Selection, layer: int, out: Out) -> None:
        """``plan_install`` and run it now."""
        self.plan_install(selection, layer, out).run()

    def _layer(self, layer: int) -> PoolLayer:
        if type(layer) is not int or layer not in self._layers:
            fail("layer", f"one of {', '.join(map(str, self._layers))}", repr(layer))
        return self._layers[layer]
