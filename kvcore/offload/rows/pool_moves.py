# SPDX-License-Identifier: Apache-2.0
"""The bytes of a device pool: serves, halves of them and installs, as plans that a stream launches.

A move knows when it is made which rows it copies.  When it runs it checks the order that the pool
rests on: a layer's serve follows its install of the step before, and its install follows its
serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union

import numpy as np
from numpy.typing import NDArray

from kvcore import threads
from kvcore._core import arrays, overlap
from kvcore._core.overlap import Access
from kvcore._kernels import pool_rows
from kvcore.errors import StreamError, fail
from kvcore.offload.rows.full_lanes import FullLane
from kvcore.offload.rows.pool_selection import Selection
from kvcore.strides import meant_strides

if TYPE_CHECKING:
    from kvcore.offload.rows.device_pool import DevicePool

__all__ = ["Out", "PoolLane", "PoolLayer", "PoolMove", "PoolOutput"]

PARALLEL_BYTES = 262_144  # below it a second thread costs more than it moves
#: An array a lane.
Out = Union[Sequence[Any], "PoolOutput"]


class PoolLane(FullLane):
    """One lane of one layer: where the full cache lies, and the rows held."""

    __slots__ = ("array", "held")

    def __init__(self, name: str, full: Any) -> None:
        super().__init__(name, full)
        self.held: Any = None
        self.array: NDArray[np.uint8] = np.empty((0, 0), np.uint8)


class PoolLayer:
    """The lanes of a layer, and how far it is."""

    __slots__ = ("fetched", "installed", "lanes", "taken")
    fetched: int
    installed: int
    taken: int

    def __init__(self, lanes: list[PoolLane]) -> None:
        self.lanes: list[PoolLane] = lanes
        # The last selection whose hits were served, whose misses were, and that was installed.
        # (Apart, since two workers may be at the two halves of a serve.)
        self.taken = self.fetched = self.installed = 0


class PoolOutput:
    """Where rows are served to, an array a lane: looked at once, for many moves."""

    __slots__ = ("arrays", "held", "infos")

    def __init__(self, out: Sequence[Any]) -> None:
        if isinstance(out, np.ndarray) or not isinstance(out, Sequence):
            fail("out", "a sequence with an array a lane", type(out).__name__)
        self.arrays: tuple[Any, ...] = tuple(out)
        self.held: list[arrays.HeldArray] = [
            arrays.HeldArray(array, f"out[{lane}]") for lane, array in enumerate(out)
        ]
        self.infos: list[arrays.ArrayInfo] = [held.info for held in self.held]


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
        layer: PoolLayer,
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
        self.skipped: bool = False
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

    def _keep_apart(self, name: str, info: Any, row_step: int, lane: PoolLane) -> None:
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
        self.skipped = not pool.serves(selection)
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
