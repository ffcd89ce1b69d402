# SPDX-License-Identifier: Apache-2.0
"""Prefill with the full cache on the host: each layer's rows leave while the next computes.

The device keeps a ring of staging buffers, not a cache.  For each layer the computation takes a
buffer, writes the layer's keys and values into it, and hands it over; a copy stream takes the rows
to their blocks on the host.  Two events tie the streams together: the copy waits for the rows, and
the next user of the buffer waits for the copy.  The host never waits::

    offloader = PrefillOffloader(device, full, max_tokens=512, copies=device.stream("d2h"))
    for layer in full:
        staging = offloader.take(layer, compute)
        compute.launch(...)                       # writes staging.lanes
        offloader.hand_over(staging, block_table, first=0, count=512)
    compute.wait_event(offloader.stored(0))       # layer 0 can be read from the host
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore._core import adopt, arrays, overlap
from kvcore.errors import StreamError, fail
from kvcore.offload.checks import check_device, check_integer, check_stream, read_indices

if TYPE_CHECKING:
    from kvcore.runtime import Buffer, Device, Event, Stream

__all__ = ["PrefillOffloader", "Staging"]

MAX_DEPTH = 1024


@dataclass(eq=False, slots=True)
class Staging:
    """One buffer of the ring, while a layer has it.

    layer: whose rows go into it.
    lanes: for each lane a device buffer [max_tokens, size]; rows beyond ``count`` are not copied.
    """

    layer: int
    lanes: tuple[Buffer, ...]
    stream: Stream
    place: int


class PrefillOffloader:
    """A ring of ``depth`` staging buffers between a computation and the host.

    full:       by layer id (any integers), the lanes of the full cache on the host, each
                [blocks, block_size, size]; written by the copies, so no two may share a byte
                (layers may interleave in one slab).  ``host`` buffers of the device,
                or plain arrays (copied at a pageable array's speed).
    max_tokens: rows of a staging buffer: the most tokens of one hand-over.
    copies:     the stream that copies.
    depth:      buffers in the ring; with one, copy and computation take turns.

    Raises ParamInvalidError; DeviceOutOfMemoryError with nothing kept.
    """

    max_tokens: int
    depth: int

    def __init__(
        self,
        device: Device,
        full: Mapping[int, Sequence[Any]],
        *,
        max_tokens: int,
        copies: Stream,
        depth: int = 2,
    ) -> None:
        check_integer("max_tokens", max_tokens, 1)
        check_integer("depth", depth, 1, MAX_DEPTH)
        check_device("device", device)
        if check_stream("copies", copies).device is not device:
            fail("copies", "a stream of the same device", repr(copies))
        if not isinstance(full, Mapping) or not full:
            fail("full", "the lanes of each layer, by layer id", type(full).__name__)
        for layer, given in full.items():
            check_integer("full", layer, 0)
            if isinstance(given, np.ndarray) or not isinstance(given, Sequence) or not given:
                fail(f"full[{layer}]", "a sequence of arrays, one a lane", type(given).__name__)
        self._full = {
            layer: tuple(_sliceable(lane, f"full[{layer}]") for lane in lanes)
            for layer, lanes in full.items()
        }
        self._shape = _common_shape(self._full)
        self._held = {
            layer: [arrays.HeldArray(lane, f"full[{layer}]") for lane in lanes]
            for layer, lanes in self._full.items()
        }
        overlap.check_all_apart(held.info for lanes in self._held.values() for held in lanes)
        self._device, self._copies = device, copies
        self.max_tokens, self.depth = max_tokens, depth
        self._stored: dict[int, Event] = {}
        self._buffers: list[tuple[Buffer, ...]] = []
        self._drained = [device.event() for _ in range(depth)]
        self._taken: dict[int, Staging] = {}
        self._next = 0
        # Rows that went to the host since another layer had its turn: (layer, (block, row) pairs).
        self._sent: tuple[int, set[tuple[int, int]]] = (-1, set())
        made: list[Buffer] = []
        try:
            for _ in range(depth):
                for size, dtype in self._shape[2]:
                    made.append(device.empty((max_tokens, size), dtype))
        except BaseException:
            for buffer in made:
                buffer.free()
            raise
        lanes = len(self._shape[2])
        self._buffers = [tuple(made[i * lanes : (i + 1) * lanes]) for i in range(depth)]

    def take(self, layer: int, stream: Stream) -> Staging:
        """The next buffer of the ring, for a layer's rows; the stream waits until it is free.

        Returns at once.  Raises StreamError when all buffers are taken and none was handed over
        or put back: that would wait for ever.
        """
        if type(layer) is not int or layer not in self._full:
            fail("layer", f"one of {', '.join(map(str, self._full))}", repr(layer))
        if not self._buffers:
            raise StreamError("offloader: expected an open one, got one that was closed")
        if check_stream("stream", stream).device is not self._device:
            fail("stream", "a stream of the same device", repr(stream))
        place = self._next
        if place in self._taken:
            raise StreamError(
                f"layer: expected one of {self.depth} buffers handed over or put back before "
                f"layer {layer} takes it, got it taken by layer {self._taken[place].layer}",
                argument="layer",
                seen=layer,
            )
        stream.wait_event(self._drained[place])
        staging = Staging(layer, self._buffers[place], stream, place)
        self._taken[place] = staging
        self._next = (place + 1) % self.depth
        return staging

    def hand_over(self, staging: Staging, block_table: Any, *, first: int, count: int) -> Event:
        """Copy ``count`` rows to the host behind what the stream that took the buffer has now.

        block_table: int32 or int64 [columns]: token t is row t % block_size of block
                     block_table[t // block_size].  Read now.
        first:       position of row 0.
        A row of a layer goes to the host once in a step: a block twice among those written is
        refused, and so is a row of an earlier hand-over of the layer, up to the first hand-over of
        another one (of a ring with one layer nobody knows where a step ends).
        Returns the event behind the copy (also ``stored(layer)``).  Raises ParamInvalidError and
        launches nothing then; the buffer stays taken.
        """
        self._check_taken(staging)
        check_integer("first", first, 0)
        check_integer("count", count, 0, self.max_tokens)
        for held in self._held[staging.layer]:
            held.check()
        targets, sources, rows = self._pieces(staging, block_table, first, count)
        if self._sent[0] != staging.layer:
            self._sent = (staging.layer, set())
        self._sent[1].update(rows)
        filled, stream = self._device.event(), staging.stream
        filled.record(stream)
        self._copies.wait_event(filled)
        if targets:
            self._copies.copy_batch(targets, sources)
        self._drained[staging.place].record(self._copies)
        stored: Event = self._device.event()
        self._stored[staging.layer] = stored
        stored.record(self._copies)
        del self._taken[staging.place]
        return stored

    def put_back(self, staging: Staging) -> None:
        """Give a buffer back without a copy: the request was aborted."""
        self._check_taken(staging)
        # What the stream launched may still write into it.
        self._drained[staging.place].record(staging.stream)
        del self._taken[staging.place]

    def stored(self, layer: int) -> Event:
        """The event behind the layer's last hand-over; not recorded before the first."""
        if type(layer) is not int or layer not in self._full:
            fail("layer", f"one of {', '.join(map(str, self._full))}", repr(layer))
        return self._stored.get(layer) or self._device.event()

    def close(self) -> None:
        """Free the ring.  Launched work keeps the bytes it needs; a buffer taken is lost."""
        buffers, self._buffers = self._buffers, []
        self._taken.clear()
        for lanes in buffers:
            for buffer in lanes:
                buffer.free()

    def _check_taken(self, staging: Staging) -> None:
        if not isinstance(staging, Staging) or self._taken.get(staging.place) is not staging:
            fail("staging", "a buffer taken and not yet handed over or put back", repr(staging))

    def _pieces(
        self, staging: Staging, block_table: Any, first: int, count: int
    ) -> tuple[list[Any], list[Any], set[tuple[int, int]]]:
        num_blocks, block_size, _ = self._shape
        if block_table is None:
            fail("block_table", "an int32 or int64 array", "NoneType")
        table = read_indices("block_table", block_table)
        if len(table) * block_size < first + count:
            fail("block_table", f"blocks for {first + count} tokens", f"shape {table.shape}")
        targets: list[Any] = []
        sources: list[Any] = []
        columns: dict[int, int] = {}
        written: set[tuple[int, int]] = set()
        layer, sent = self._sent
        again = sent if layer == staging.layer and len(self._full) > 1 else set()
        done = 0
        while done < count:
            column, row = divmod(first + done, block_size)
            block, rows = int(table[column]), min(block_size - row, count - done)
            if not 0 <= block < num_blocks:
                fail(f"block_table[{column}]", f"a block below {num_blocks}", block)
            if block in columns:
                seen = f"block {block} of block_table[{columns[block]}] again"
                fail(f"block_table[{column}]", "each block once", seen)
            columns[block] = column
            for place in range(row, row + rows):
                if (block, place) in again:
                    fail(
                        f"block_table[{column}]",
                        f"rows that no other hand-over of layer {layer} wrote in the step",
                        f"row {place} of block {block}",
                    )
                written.add((block, place))
            for lane, buffer in zip(self._full[staging.layer], staging.lanes, strict=True):
                targets.append(lane[block, row : row + rows])
                sources.append(buffer[done : done + rows])
            done += rows
        return targets, sources, written


def _sliceable(lane: Any, name: str) -> Any:
    """The lane, or a numpy array of its memory where its own type may know no slices."""
    from kvcore.runtime import Buffer

    torch_type = adopt.torch_tensor_type()
    if isinstance(lane, Buffer | np.ndarray) or (torch_type and isinstance(lane, torch_type)):
        return lane
    return adopt.as_numpy(lane, name)


def _common_shape(
    full: Mapping[int, tuple[Any, ...]],
) -> tuple[int, int, tuple[tuple[int, str], ...]]:
    """(blocks, block size, (size, dtype) of each lane), the same in all layers."""
    shapes: list[tuple[int, int, tuple[tuple[int, str], ...]]] = []
    for layer, lanes in full.items():
        infos = [arrays.read(lane, f"full[{layer}]") for lane in lanes]
        for info in infos:
            if len(info.shape) != 3 or 0 in info.shape:
                fail(f"full[{layer}]", "lanes [blocks, block_size, size]", info.shape)
            if info.read_only:
                fail(f"full[{layer}]", "arrays that can be written", "a read-only one")
            overlap.check_self(info)
        places = {info.shape[:2] for info in infos}
        if len(places) != 1:
            fail(f"full[{layer}]", "lanes of one block table", sorted(places))
        sizes = tuple((info.shape[2], info.dtype_name) for info in infos)
        num_blocks, block_size = places.pop()
        shapes.append((num_blocks, block_size, sizes))
        if shapes[-1] != shapes[0]:
            fail(f"full[{layer}]", f"the shape of the first layer {shapes[0]}", shapes[-1])
    return shapes[0]
