# SPDX-License-Identifier: Apache-2.0
"""A pool of rows on the device in front of the full cache on the host, larger than top-k.

One pool serves one request (at a time) and one group of layers that share their top-k ids.  A
step has three parts, so that the group decides once and the writes into the pool can leave the
path of the computation:

1. ``plan(request, ids)``: which ids are held and where, which must be read, and which places
   those take.  Once a step for the whole group; books only.
2. ``serve(selection, layer, out)``: the rows in the order of the ids, held ones from the pool and
   the others from the host.  Exactly one copy a row.  Also in halves, for two streams:
   ``plan_hits`` and ``plan_misses``.
3. ``install(selection, layer, out)``: the rows that were read, from ``out`` into their places.  Of
   a layer behind its serve; may run on a side stream.

What is served equals the full cache's bytes, whatever the policy, as long as whoever rewrites
rows of the full cache says so with ``invalidate``.  The order that this rests on is checked when
a move runs: a layer's serve follows its install of the step before, and its install follows its
serve.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Union

import numpy as np
from numpy.typing import NDArray

from kvcore import threads
from kvcore._core import arrays, overlap
from kvcore._core.overlap import Access
from kvcore._kernels import pool_rows
from kvcore.errors import StreamError, fail
from kvcore.offload.checks import check_device, check_identity, check_integer, read_indices
from kvcore.offload.rows.full_lanes import FullLane, read_full
from kvcore.offload.rows.policy import make_books
from kvcore.strides import meant_strides

__all__ = ["DevicePool", "PoolMove", "PoolOutput", "Selection"]

Ids = NDArray[np.int32] | NDArray[np.int64]
BLOCK_FAULT = 3  # of the books: an id whose block is not in the table or the cache
PARALLEL_BYTES = 262_144  # below it a second thread costs more than it moves


#: An array a lane.
Out = Union[Sequence[Any], "PoolOutput"]


class Selection:
    """One step's decision, the same for every layer of the group.

    ids:    int64 [n] the ids as given; negative ones ask for nothing.
    source: int32 [n] the place that holds the row, -1 where it is read from the host, -2 nothing.
    target: int32 [n] the place the row is installed in, or -1.
    hits, misses: how many of either.
    """

    __slots__ = (
        "_halves", "hits", "host_rows", "ids", "misses", "number", "previous", "source", "target",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        previous: int,
        ids: NDArray[np.int64],
        host_rows: NDArray[np.int64],
        source: NDArray[np.int32],
        target: NDArray[np.int32],
    ) -> None:
        self.number, self.previous = number, previous
        self.ids, self.host_rows = ids, host_rows
        self.source, self.target = source, target
        self.hits = self.misses = 0
        self._halves: dict[str, NDArray[np.int32]] = {}

    def places(self, kind: str) -> NDArray[np.int32]:
        """int32 [n]: what a move of this kind does with each row, in the form of ``source``."""
        if kind == "serve":
            return self.source
        if kind == "install":
            return self.target
        if kind not in self._halves:
            other = self.source == -1 if kind == "hits" else self.source >= 0
            self._halves[kind] = np.where(other, np.int32(-2), self.source)
        return self._halves[kind]

    def count(self, kind: str) -> int:
        """Rows that a move of this kind copies."""
        if kind == "install":
            return int(np.count_nonzero(self.target >= 0))
        return self.hits * (kind != "misses") + self.misses * (kind != "hits")

    def __repr__(self) -> str:
        return f"<Selection {self.number}: {self.hits} held, {self.misses} to read>"


class _Lane(FullLane):
    """One lane of one layer: where the full cache lies, and the rows held."""

    __slots__ = ("array", "held")

    def __init__(self, name: str, full: Any) -> None:
        super().__init__(name, full)
        self.held: Any = None
        self.array: NDArray[np.uint8] = np.empty((0, 0), np.uint8)


class _Layer:
    """The lanes of a layer, and how far it is."""

    __slots__ = ("fetched", "installed", "lanes", "taken")

    def __init__(self, lanes: list[_Lane]) -> None:
        self.lanes = lanes
        # The last selection whose hits were served, whose misses were, and that was installed.
        # (Apart, since two workers may be at the two halves of a serve.)
        self.taken = self.fetched = self.installed = 0


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
        self._layers = {n: _Layer(lanes) for n, lanes in read_full(full, _Lane).items()}
        first = next(iter(self._layers.values())).lanes[0]
        self._block_size, self._num_blocks = first.block_size, first.num_blocks
        self._flat = first.flat
        self._request: Hashable = None
        self._number = self._barrier = 0
        self._pending: Selection | None = None
        self._live_number = 0
        self._closed = False
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

    # -- what it says ---------------------------------------------------------------------

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
        """Give the device memory back; the pool serves nobody any more."""
        if not self._closed:
            self._closed = True
            self._request = None
            self._forget_all()
            for buffer in self._buffers:
                buffer.free()

    # -- the books ------------------------------------------------------------------------

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
        return self._books.forget(min(from_pos, self.max_tokens), min(end, self.max_tokens))

    # -- the bytes ------------------------------------------------------------------------

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
        """The half of a serve that reads the host; before or beside the other half."""
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

    def _layer(self, layer: int) -> _Layer:
        if type(layer) is not int or layer not in self._layers:
            fail("layer", f"one of {', '.join(map(str, self._layers))}", repr(layer))
        return self._layers[layer]


class PoolOutput:
    """Where rows are served to, read once for many moves: an array a lane."""

    __slots__ = ("arrays", "held", "infos")

    def __init__(self, out: Sequence[Any]) -> None:
        if isinstance(out, np.ndarray) or not isinstance(out, Sequence):
            fail("out", "a sequence with an array a lane", type(out).__name__)
        self.arrays = tuple(out)
        self.held = [arrays.Held(array, f"out[{lane}]") for lane, array in enumerate(out)]
        self.infos = [held.info for held in self.held]


class PoolMove:
    """One serve (or half of one) or install of a layer, as a plan that a stream can launch.

    skipped: the last run did nothing, because the request had been evicted.
    """

    workspace_size = 0

    def __init__(
        self,
        pool: DevicePool,
        kind: Literal["serve", "hits", "misses", "install"],
        selection: Selection,
        layer: _Layer,
        layer_id: int,
        out: Out,
    ) -> None:
        if not isinstance(selection, Selection):
            fail("selection", "a Selection made by plan()", type(selection).__name__)
        output = out if isinstance(out, PoolOutput) else PoolOutput(out)
        if len(output.arrays) != len(layer.lanes):
            fail("out", f"{len(layer.lanes)} arrays, one a lane", len(output.arrays))
        self._pool, self._kind, self._selection = pool, kind, selection
        self._layer, self._layer_id, self._out = layer, layer_id, output.arrays
        self.skipped = False
        self._ran = False
        self._infos = output.infos
        self._steps = [
            meant_strides(info.shape, info.strides, info.itemsize) for info in output.infos
        ]
        # What was passed may be resized before the move runs.
        self._held = [*output.held, *(lane.given for lane in layer.lanes)]
        for number, info in enumerate(output.infos):
            self._check_out(number, info)

    def __repr__(self) -> str:
        return f"<PoolMove {self._kind} of layer {self._layer_id}: {self._selection!r}>"

    def _check_out(self, number: int, info: Any) -> None:
        name, lane = f"out[{number}]", self._layer.lanes[number]
        n = len(self._selection.ids)
        if len(info.shape) != 2 or info.shape[0] < n:
            fail(name, f"[at least {n}, size]", info.shape)
        if info.shape[1] * info.itemsize != lane.row_bytes:
            fail(name, f"rows of {lane.row_bytes} bytes", info.shape[1] * info.itemsize)
        row_step, step = self._steps[number]
        if step != info.itemsize or row_step < lane.row_bytes:
            fail(name, "rows apart, their elements contiguous", info.strides)
        if self._kind != "install":
            if info.read_only:
                fail(name, "an array that can be written", "a read-only one")
            self._keep_apart(name, info, row_step, lane)

    def _keep_apart(self, name: str, info: Any, row_step: int, lane: _Lane) -> None:
        low, high = info.address, info.address + row_step * info.shape[0]
        held = lane.array.ctypes.data
        for other, start, end in (
            ("the full cache", lane.address, lane.end),
            ("the pool", held, held + lane.array.nbytes),
        ):
            if low < end and start < high:
                fail(name, f"memory apart from {other}", "memory that it shares")

    def _check_order(self) -> None:
        selection, layer = self._selection, self._layer
        if self._kind != "install":
            if self._kind != "misses" and layer.installed < selection.previous:
                self._late(f"selection {selection.previous} installed first", "it is not")
            if layer.installed >= selection.number:
                self._late("a serve before the install", "an install already done")
        else:
            served = min(layer.taken, layer.fetched)
            if served != selection.number:
                self._late("this selection served first", f"selection {served} served")
            if layer.installed >= selection.number:
                self._late("one install", "a second")

    def _late(self, expected: str, seen: str) -> NoReturn:
        raise StreamError(
            f"selection: expected {expected} in layer {self._layer_id}, got {seen}",
            argument="selection",
            seen=seen,
            expected=expected,
        )

    def run(self) -> None:
        """Move the bytes.

        Raises StreamError when the order of the layer is broken, ParamInvalidError for an array
        that was resized or reshaped since; nothing is written then.
        """
        pool, selection = self._pool, self._selection
        self._ran = True
        self.skipped = pool._closed or selection.number <= pool._barrier
        if self.skipped:
            return
        for held in self._held:
            held.check()
        self._check_order()
        n, kind, layer = len(selection.ids), self._kind, self._layer
        places, rows = selection.places(kind), self._rows()
        for lane, info, (row_step, _) in zip(layer.lanes, self._infos, self._steps, strict=True):
            array = lane.array
            place = (info.address, row_step, array.ctypes.data, lane.row_bytes)
            workers = _workers(rows * lane.row_bytes)
            if n and kind != "install":
                pool_rows.serve(
                    *place, pool.capacity, lane.address, lane.num_blocks, lane.block_size,
                    lane.block_stride, lane.row_stride, lane.row_bytes, places,
                    selection.host_rows, workers,
                )  # fmt: skip
            elif n:
                pool_rows.install(*place, pool.capacity, lane.row_bytes, places, workers)
        if kind == "install":
            layer.installed = selection.number
        if kind in ("serve", "hits"):
            layer.taken = selection.number
        if kind in ("serve", "misses"):
            layer.fetched = selection.number

    def _rows(self) -> int:
        return self._selection.count(self._kind)

    # -- what a stream asks ---------------------------------------------------------------

    @property
    def bytes_moved(self) -> int:
        """Payload bytes of the run (known before it)."""
        return 0 if self.skipped else self._rows() * sum(x.row_bytes for x in self._layer.lanes)

    @property
    def num_descriptors(self) -> int:
        """Rows copied by the run; before it, 0."""
        return self._rows() * len(self._infos) if self._ran and not self.skipped else 0

    @property
    def reads(self) -> tuple[Access, ...]:
        """What a run reads: known before it, since the selection is."""
        return self._accesses()[0]

    @property
    def writes(self) -> tuple[Access, ...]:
        """What a run writes."""
        return self._accesses()[1]

    def touched(self) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        """(reads, writes) of the last run, exact to the row."""
        return ((), ()) if self.skipped else self._accesses()

    def _accesses(self) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        selection = self._selection
        reads: list[Access] = []
        writes: list[Access] = []
        for number, (lane, info) in enumerate(zip(self._layer.lanes, self._infos, strict=True)):
            place = selection.places(self._kind)
            held = lane.array.ctypes.data + place[place >= 0].astype(np.int64) * lane.row_bytes
            used = np.flatnonzero(place >= (0 if self._kind == "install" else -1))
            outs = info.address + used * self._steps[number][0]
            pool_side = _access(f"pool[{number}]", lane.held, held, lane.row_bytes)
            out_side = _access(f"out[{number}]", self._out[number], outs, lane.row_bytes)
            if self._kind == "install":
                reads.append(out_side)
                writes.append(pool_side)
                continue
            rows = selection.host_rows[place == -1]
            starts = lane.starts(rows)
            reads += [pool_side, _access(f"full[{number}]", lane.owner, starts, lane.row_bytes)]
            writes.append(out_side)
        return tuple(reads), tuple(writes)


def _access(name: str, owner: Any, starts: NDArray[np.int64], row_bytes: int) -> Access:
    return Access(name, owner, overlap.merge(starts, row_bytes))


def _workers(nbytes: int) -> int:
    if nbytes < PARALLEL_BYTES:
        return 1
    return threads.default_threads() or threads.usable_cores()
