# SPDX-License-Identifier: Apache-2.0
"""The operations of a decode step: what one layer launches for the whole batch.

A `BatchMove` is one launch; its parts move one request's rows each.  Its cost is known when it is
launched (``demands``).  What it touched is known to the row once it ran; the parts of a request
that was aborted meanwhile do nothing.

`Ring` keeps the newest tokens' rows of one layer, a ring for each place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

import kvcore
from kvcore._core import adopt, overlap
from kvcore._core.overlap import Access
from kvcore._kernels import pool_rows
from kvcore.errors import fail
from kvcore.offload.decode.request import DecodeRequest
from kvcore.offload.rows.full_lanes import FullLane

if TYPE_CHECKING:
    from kvcore.runtime import Stream

__all__ = [
    "Attend", "AttentionInput", "BatchMove", "Ring", "RingServe", "RingStore", "RingWrite", "Tally",
]  # fmt: skip

Accesses = tuple[Access, ...]
Demand = tuple[int, float, int]
#: rows(request, layer, first, count): a lane each, [count, row bytes].
MakeRows = Callable[[Hashable, int, int, int], Sequence[Any]]


class SingleMove(Protocol):
    """What a batch move is made of."""

    def run(self) -> None:
        """Move the bytes."""

    def touched(self) -> tuple[Accesses, Accesses]:
        """(reads, writes) of the last run."""


class Tally:
    """The launches of one stream, in order: how many, and how many ran with none before missing.

    A stream reports a failure once, perhaps to a caller outside the engine (a synchronise of the
    whole device).  A launch that is missing here when the stream has nothing left to run failed
    or was skipped.
    """

    __slots__ = ("launched", "ran")
    launched: int
    ran: int

    def __init__(self) -> None:
        self.launched = self.ran = 0

    def begin(self) -> int:
        """The number of a launch."""
        number = self.launched
        self.launched += 1
        return number

    def end(self, number: int) -> None:
        """That launch has run."""
        if number == self.ran:
            self.ran += 1


class BatchMove:
    """One launch.

    arrays:  owners of all memory it may touch, for the check at launch.
    demands: rows (resource, bytes, pieces); bytes_moved: payload; both of all requests.
    """

    name: str
    parts: Sequence[SingleMove]
    arrays: tuple[Any, ...]
    demands: list[Demand]
    bytes_moved: int

    workspace_size = 0
    host_bytes = 0

    def __init__(
        self,
        name: str,
        parts: Sequence[SingleMove],
        arrays: tuple[Any, ...],
        demands: list[Demand],
        bytes_moved: int,
    ) -> None:
        self.name, self.parts, self.arrays = name, parts, arrays
        self.demands, self.bytes_moved = demands, bytes_moved
        self.num_descriptors: int = demands[-1][2] if demands else 0
        self._tally, self._number = Tally(), 0

    def launch(self, stream: Stream, tally: Tally) -> None:
        """Launch it on a stream, counted there."""
        self._tally, self._number = tally, tally.begin()
        stream.launch(self)

    def run(self) -> None:
        """Every part, in order."""
        for part in self.parts:
            part.run()
        self._tally.end(self._number)

    def touched(self) -> tuple[Accesses, Accesses]:
        """(reads, writes) of the last run, exact to the row."""
        reads: list[Access] = []
        writes: list[Access] = []
        for part in self.parts:
            read, written = part.touched()
            reads += read
            writes += written
        return tuple(reads), tuple(writes)

    @property
    def reads(self) -> Accesses:
        """What the last run read."""
        return self.touched()[0]

    @property
    def writes(self) -> Accesses:
        """What the last run wrote."""
        return self.touched()[1]


class Ring:
    """The newest rows of one layer: ``places`` rings of ``rows`` rows on the device.

    full: the layer's lanes; the rings' lanes have the same row bytes.
    """

    layer: int
    full: tuple[FullLane, ...]
    places: int
    rows: int

    def __init__(
        self, device: Any, layer: int, full: Sequence[FullLane], places: int, rows: int
    ) -> None:
        self.layer, self.full, self.places, self.rows = layer, tuple(full), places, rows
        self.lanes: list[Any] = []
        try:
            for lane in full:
                self.lanes.append(device.empty((places, rows, lane.row_bytes), "uint8"))
        except BaseException:
            self.close()
            raise
        self.arrays: list[Any] = [lane.__kvcore_array__ for lane in self.lanes]

    def close(self) -> None:
        """Give the memory back."""
        lanes, self.lanes = self.lanes, []
        for lane in lanes:
            lane.free()

    def slots(self, place: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of a place's positions, counted over all places."""
        return place * self.rows + positions % self.rows

    def accesses(self, slots: NDArray[np.int64]) -> Accesses:
        """These rows in every lane."""
        return tuple(
            _rows(f"recent[{i}]", owner, array.ctypes.data + slots * array.shape[2], array.shape[2])
            for i, (owner, array) in enumerate(zip(self.lanes, self.arrays, strict=True))
        )


class RingWrite:
    """New tokens' rows of several requests: made by ``make``, written with the scatter operator.

    who: (request, first position, tokens).
    """

    def __init__(
        self, ring: Ring, make: MakeRows, who: Sequence[tuple[DecodeRequest, int, int]]
    ) -> None:
        self._ring, self._make, self._who = ring, make, who
        self._slots = np.empty(0, np.int64)

    def run(self) -> None:
        """Make the rows and scatter them."""
        ring = self._ring
        made: list[list[NDArray[np.uint8]]] = [[] for _ in ring.full]
        slots: list[NDArray[np.int64]] = []
        for request, first, count in self._who:
            if request.aborted:
                continue
            rows = self._make(request.name, ring.layer, first, count)
            if len(rows) != len(ring.full):
                fail("rows", f"{len(ring.full)} arrays, one a lane", len(rows))
            for lane, (full, array) in enumerate(zip(ring.full, rows, strict=True)):
                made[lane].append(_as_bytes(f"rows[{lane}]", array, count, full.row_bytes))
            slots.append(ring.slots(request.place, np.arange(first, first + count)))
        self._slots = np.concatenate(slots) if slots else np.empty(0, np.int64)
        if slots:
            sources = [np.concatenate(parts)[:, None] for parts in made]
            caches = [array[:, :, None] for array in ring.arrays]
            # The operator takes a key and a value lane; what is left alone is a key.
            for i in range(0, len(caches), 2):
                pair = (sources[i + 1], caches[i + 1]) if i + 1 < len(caches) else (None, None)
                kvcore.scatter_pa_kv_cache(sources[i], caches[i], self._slots, *pair)

    def touched(self) -> tuple[Accesses, Accesses]:
        """It writes rows of the rings."""
        return (), self._ring.accesses(self._slots)


class RingServe:
    """Rows of one request that are in its ring, to the attention's input.

    places: int32 [n] row of the request's ring for each row of the input; negative: not here.
    out:    a lane each, [at least n, row bytes].
    """

    def __init__(
        self, ring: Ring, request: DecodeRequest, places: NDArray[np.int32], out: Sequence[Any]
    ) -> None:
        self._ring, self._request, self._out = ring, request, out
        self._places = np.where(places < 0, np.int32(-2), places)
        self._ran = False

    def run(self) -> None:
        """Copy the rows, unless the request was aborted."""
        self._ran = not self._request.aborted
        if not self._ran:
            return
        ring, nothing = self._ring, np.zeros(len(self._places), np.int64)
        for array, out in zip(ring.arrays, self._out, strict=True):
            rows, target = array[self._request.place], out.__kvcore_array__
            pool_rows.serve(
                target.ctypes.data, target.strides[0], rows.ctypes.data, rows.strides[0],
                ring.rows, rows.ctypes.data, 1, ring.rows, 0, rows.strides[0], array.shape[2],
                self._places, nothing,
            )  # fmt: skip

    def touched(self) -> tuple[Accesses, Accesses]:
        """Rows of the ring, and of the input."""
        if not self._ran:
            return (), ()
        used = np.flatnonzero(self._places >= 0)
        slots = self._ring.slots(self._request.place, self._places[used].astype(np.int64))
        return self._ring.accesses(slots), tuple(
            _rows(
                f"out[{i}]",
                out,
                out.__kvcore_array__.ctypes.data + used * out.__kvcore_array__.strides[0],
                out.shape[1],
            )
            for i, out in enumerate(self._out)
        )


class RingStore:
    """Rows of one request's ring to the full cache.

    first:     position of the first; they are consecutive.
    host_rows: int64 [n] rows of the full cache.
    """

    def __init__(
        self, ring: Ring, request: DecodeRequest, first: int, host_rows: NDArray[np.int64]
    ) -> None:
        self._ring, self._request, self._host_rows = ring, request, host_rows
        positions = np.arange(first, first + len(host_rows))
        self._slots = ring.slots(request.place, positions)
        self._ran = False

    def run(self) -> None:
        """Copy the rows, unless the request was aborted.

        Raises ParamInvalidError for a full cache that was resized since.
        """
        self._ran = not self._request.aborted
        if not self._ran:
            return
        ring = self._ring
        for lane in ring.full:
            lane.given.check()
        source = self._slots.astype(np.int32)
        for lane, array in zip(ring.full, ring.arrays, strict=True):
            pool_rows.store(
                array.ctypes.data, array.strides[1], ring.places * ring.rows, lane.address,
                lane.num_blocks, lane.block_size, lane.block_stride, lane.row_stride,
                lane.row_bytes, source, self._host_rows,
            )  # fmt: skip

    def touched(self) -> tuple[Accesses, Accesses]:
        """Rows of the ring, and of the full cache."""
        if not self._ran:
            return (), ()
        return self._ring.accesses(self._slots), tuple(
            _rows(f"full[{i}]", lane.owner, lane.starts(self._host_rows), lane.row_bytes)
            for i, lane in enumerate(self._ring.full)
        )


class AttentionInput:
    """What one layer attends to, while it does.

    layer:    its id.
    requests: those of the step, in its order.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._of: dict[Hashable, tuple[Any, Any, Sequence[Any]]] = {}

    def add(self, request: Hashable, ids: Any, index: Any, out: Sequence[Any]) -> None:
        """A request and where its rows are."""
        self._of[request] = (ids, index, out)

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """The requests of the step, in its order."""
        return tuple(self._of)

    def ids(self, request: Hashable) -> NDArray[np.int64]:
        """int64 [n]: the positions attended to; rows of negative ones are undefined."""
        ids: NDArray[np.int64] = self._of[request][0]
        return ids

    def index(self, request: Hashable) -> NDArray[np.int64] | None:
        """int64 [queries, k]: each query's rows, when each query chose its own; -1 for none."""
        index: NDArray[np.int64] | None = self._of[request][1]
        return index

    def accesses(self) -> Accesses:
        """Every row of every lane, as memory that is read."""
        reads = []
        for ids, _, out in self._of.values():
            for i, lane in enumerate(out):
                array = lane.__kvcore_array__[: len(ids)]
                starts = array.ctypes.data + np.arange(len(ids)) * array.strides[0]
                reads.append(_rows(f"input[{i}]", lane, starts, array.shape[1]))
        return tuple(reads)

    def rows(self, request: Hashable) -> tuple[NDArray[np.uint8], ...]:
        """uint8 [n, row bytes] of each lane, in the order of the ids; read only."""
        ids, _, out = self._of[request]
        found = []
        for lane in out:
            view = lane.__kvcore_array__[: len(ids)].view()
            view.flags.writeable = False
            found.append(view)
        return tuple(found)


class Attend:
    """The attention of one layer, as a callable sees it."""

    def __init__(self, attend: Callable[[AttentionInput], object], given: AttentionInput) -> None:
        self._attend, self._given = attend, given

    def run(self) -> None:
        """Call the attention with its input."""
        self._attend(self._given)

    def touched(self) -> tuple[Accesses, Accesses]:
        """It reads the whole input."""
        return self._given.accesses(), ()


def _rows(name: str, owner: Any, starts: NDArray[np.int64], row_bytes: int) -> Access:
    return Access(name, owner, overlap.merge(starts, row_bytes))


def _as_bytes(name: str, array: Any, count: int, row_bytes: int) -> NDArray[np.uint8]:
    given = adopt.as_numpy(array, name)
    rows = np.ascontiguousarray(given)
    if rows.ndim < 1 or rows.shape[0] != count or rows.nbytes != count * row_bytes:
        fail(name, f"{count} rows of {row_bytes} bytes", f"shape {given.shape} of {given.dtype}")
    return rows.reshape(count, -1).view(np.uint8)
