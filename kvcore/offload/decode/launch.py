# SPDX-License-Identifier: Apache-2.0
"""The streams, events and device memory of the decode engine: bytes, never decisions.

What orders what, of layer l with input buffer b (both ways, so that no byte is raced for):

- writing new rows waits for the layer's last copy to the host, which reads the same rings;
- misses wait for the choice of ids, for the attention and the install that used b last, and for
  the layer's copies to the host of the steps before;
- hits wait for the layer's install of the step before, and for the install that used b last;
- the attention waits for the misses; the install for misses and hits;
- a copy to the host waits for the writing of new rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.decode.layer_events import LayerEvents
from kvcore.offload.decode.moves import (
    Attend,
    AttentionInput,
    BatchMove,
    Ring,
    RingServe,
    RingStore,
    RingWrite,
    Tally,
)
from kvcore.offload.decode.result import Moved
from kvcore.offload.rows.device_pool import PoolOutput
from kvcore.runtime.profile import COMPUTE, D2H, H2D, HBM

if TYPE_CHECKING:
    from kvcore.offload.decode.choice import Part
    from kvcore.offload.decode.moves import Demand
    from kvcore.offload.decode.options import EngineSettings
    from kvcore.offload.decode.request import DecodeRequest
    from kvcore.offload.rows.full_lanes import FullLane
    from kvcore.runtime import Device, Event, Stream

__all__ = ["Launched", "Launcher", "ran"]

#: How many launches each stream had.
Launched = Sequence[tuple[Tally, int]]
MAX_LAYER_US = 1e9  # a quarter of an hour


class Launcher:
    """See `DecodeEngine` for the arguments.

    lanes: of the layers that have rows; the other layers of the groups only take their time.

    events: loads and saves by layer; streams: compute, h2d, side, d2h.
    """

    def __init__(
        self,
        device: Device,
        lanes: Mapping[int, Sequence[FullLane]],
        groups: Sequence[Sequence[int]],
        settings: EngineSettings,
    ) -> None:
        places, topk, depth = settings.max_batch, settings.topk, settings.depth
        recent_rows, compute = settings.ring_rows, settings.compute
        self._lanes = dict(lanes)
        self._groups = groups
        self._first_with_rows = [
            next((layer for layer in group if layer in lanes), None) for group in groups
        ]
        self._make, self._attend = settings.rows, settings.attend
        self._layer_us = settings.layer_us
        first = next(iter(lanes.values()))
        self._row_bytes = sum(lane.row_bytes for lane in first)
        self._num_lanes = len(first)
        self._joined = all(lane.row_stride * lane.block_size == lane.block_stride for lane in first)
        self._recent, self._topk, self._depth = recent_rows, topk, depth
        self._link = H2D
        if all(getattr(lane.owner, "space", "") == "device" for lane in first):
            self._link = HBM
        self._rings: dict[int, Ring] = {}
        self._inputs: list[list[Any]] = []
        # [buffer][place] the input of each lane
        self._outs: list[list[PoolOutput]] = []
        try:
            for layer, full in lanes.items():
                self._rings[layer] = Ring(device, layer, full, places, recent_rows)
            for _ in range(depth):
                self._inputs.append([])
                for lane in first:
                    made = device.empty((places, topk, lane.row_bytes), "uint8")
                    self._inputs[-1].append(made)
                inputs = self._inputs[-1]
                self._outs.append([PoolOutput([lane[i] for lane in inputs]) for i in range(places)])
        except BaseException:
            self.close()
            raise
        inputs = [buffer for buffers in self._inputs for buffer in buffers]
        # Owners of the memory that a layer's moves touch.
        self._owners: dict[int, tuple[Any, ...]] = {
            layer: (*ring.lanes, *(lane.owner for lane in ring.full), *inputs)
            for layer, ring in self._rings.items()
        }
        self.streams: dict[str, Stream] = {
            "compute": device.stream("compute") if compute is None else compute
        }
        for name in ("h2d", "side", "d2h"):
            self.streams[name] = device.stream(name)
        self._tallies = {name: Tally() for name in self.streams}
        layers = [layer for group in groups for layer in group]
        self.events: LayerEvents = LayerEvents(device, layers)
        self._installed = {layer: device.event() for layer in layers if layer in lanes}
        self._attended = [device.event() for _ in range(depth)]
        self._drained = [device.event() for _ in range(depth)]
        self._written, self._taken = device.event(), device.event()
        self._turn = 0
        self._origin_us = device.now
        self._origin = self.streams["compute"].record_event()

    def close(self) -> None:
        """Give the memory back."""
        rings, self._rings = self._rings, {}
        for ring in rings.values():
            ring.close()
        inputs, self._inputs = self._inputs, []
        for buffers in inputs:
            for buffer in buffers:
                buffer.free()

    @property
    def is_open(self) -> bool:
        """The device has not been left."""
        return bool(self.streams["compute"].queue.executor.is_open)

    def launched(self) -> Launched:
        """What was launched by now, for `ran`."""
        return [(tally, tally.launched) for tally in self._tallies.values()]

    def did_not_run(self, launched: Launched) -> bool:
        """Nothing of it is under way, and some of it never ran; no restart has put that right."""
        current = [launch for launch in launched if launch[0] in self._tallies.values()]
        return not ran(current)

    def copies_launched(self) -> Launched:
        """Of that the copies to the host."""
        return [(self._tallies["d2h"], self._tallies["d2h"].launched)]

    def check_thread(self) -> None:
        """Raise StreamError inside a host function of the device: it would wait for itself."""
        executor = self.streams["compute"].queue.executor
        if executor.inside():
            executor.check()

    def marks(self) -> Sequence[Any]:
        """A mark on each stream, behind everything launched."""
        return [stream.queue.mark() for stream in self.streams.values()]

    def over(self, marks: Sequence[Any]) -> bool:
        """Nothing before the marks runs any more; the host waits for nothing.

        (A mark that was dropped says nothing of the operation that ran at that moment.)
        """
        return all(not mark.pending and (not mark.dropped or mark.queue.idle) for mark in marks)

    def time_of(self, event: Event) -> float:
        """Microseconds on the device's clock of an event of the computing stream, reached."""
        return self._origin_us + self._origin.elapsed_time(event) * 1e3

    def start_again(self) -> None:
        """After a failure that all streams have reported: no event of the past holds work back.

        What may still run of the past is before everything to come all the same.
        """
        self._tallies = {name: Tally() for name in self.streams}
        compute = self.streams["compute"]
        for name in ("h2d", "side", "d2h"):
            compute.wait_stream(self.streams[name])
        for layer in self.events.layers:
            self.events.layer_loaded(layer, compute)
            self.events.layer_saved(layer, compute)
        for event in (*self._installed.values(), *self._attended, *self._drained):
            event.record(compute)

    # -- a step ---------------------------------------------------------------------------

    def times(self, parts: Sequence[Part]) -> dict[int, float]:
        """Microseconds of compute of each layer that a step will launch."""
        if not parts:
            return {}
        tokens = sum(part.request.context + part.tokens for part in parts)
        given, found = self._layer_us, {}
        for layer in self.events.layers:
            us = given(layer, len(parts), tokens) if callable(given) else given
            number = isinstance(us, int | float) and not isinstance(us, bool)
            if not number or not 0 <= us <= MAX_LAYER_US:
                fail("layer_us", f"microseconds from 0 to {MAX_LAYER_US:.0e}", repr(us))
            found[layer] = us
        return found

    def step(self, parts: Sequence[Part], times: Mapping[int, float]) -> tuple[Moved, Event, Event]:
        """Launch every layer; returns what they move, and events at the step's start and end."""
        compute = self.streams["compute"]
        tokens = sum(part.tokens for part in parts)
        pieces = sum(self._pieces(part.send[0], part.host_rows) for part in parts)
        sent = sum(len(part.host_rows) for part in parts)
        start = compute.record_event()
        all_hits = all_misses = all_recent = 0
        for index, group in enumerate(self._groups if parts else ()):
            with_rows = [layer for layer in group if layer in self._lanes]
            hits, misses, recent = (sum(part.rows(index)[i] for part in parts) for i in range(3))
            all_hits += hits * len(with_rows)
            all_misses += misses * len(with_rows)
            all_recent += recent * len(with_rows)
            place = loaded = 0
            for layer in group:
                if layer not in self._lanes:
                    self._compute(layer, times[layer])
                    continue
                self._write(layer, parts, tokens)
                # Launched ahead, into every buffer whose last user is launched already: a host
                # that launches one by one must not be what the next layer's misses wait for.
                while loaded < min(place + self._depth, len(with_rows)):
                    self._load(with_rows[loaded], parts, index, misses, loaded - place)
                    loaded += 1
                self._serve(layer, parts, index, hits + recent)
                self._attention(layer, parts, index, times[layer])
                self._install(layer, parts, index, misses)
                self._save(layer, parts, sent, pieces)
                self._turn = (self._turn + 1) % self._depth
                place += 1
        size = self._row_bytes
        moved = Moved(
            all_hits, all_misses, all_recent, all_hits * size, all_misses * size,
            sent * size * len(self._lanes),
        )  # fmt: skip
        return moved, start, compute.record_event() if parts else start

    def _write(self, layer: int, parts: Sequence[Part], tokens: int) -> None:
        compute = self.streams["compute"]
        self.events.wait_for_layer_save(layer, compute)
        ring = self._rings[layer]
        who = [(part.request, part.request.context, part.tokens) for part in parts]
        write = RingWrite(ring, self._make, who)
        arrays = tuple(ring.lanes)
        self._launch(
            "compute", self._move(f"write {layer}", [write], arrays, HBM, tokens, twice=True)
        )
        self._written.record(compute)

    def _load(self, layer: int, parts: Sequence[Part], group: int, misses: int, ahead: int) -> None:
        h2d, turn = self.streams["h2d"], (self._turn + ahead) % self._depth
        if layer == self._first_with_rows[group]:
            h2d.wait_event(self._written)  # and the choice of ids
        for event in (self._attended[turn], self._drained[turn]):
            if event.recorded:
                h2d.wait_event(event)
        self.events.wait_for_layer_save(layer, h2d)
        moves = []
        for i, part in enumerate(parts):
            pool = part.request.pools[group]
            out = self._out(turn, i)
            moves.append(pool.plan_misses(part.chosen[group].selection, layer, out))
        name = f"misses {layer}"
        self._launch("h2d", self._move(name, moves, self._owners[layer], self._link, misses))
        self.events.layer_loaded(layer, h2d)

    def _serve(self, layer: int, parts: Sequence[Part], group: int, count: int) -> None:
        compute, turn = self.streams["compute"], self._turn
        for event in (self._installed[layer], self._drained[turn]):
            if event.recorded:
                compute.wait_event(event)
        moves: list[Any] = []
        for i, part in enumerate(parts):
            request, chosen, out = part.request, part.chosen[group], self._out(turn, i)
            moves.append(request.pools[group].plan_hits(chosen.selection, layer, out))
            if (chosen.in_ring >= 0).any():
                moves.append(RingServe(self._rings[layer], request, chosen.in_ring, out.arrays))
        move = self._move(f"hits {layer}", moves, self._owners[layer], HBM, count, twice=True)
        self._launch("compute", move)
        self._taken.record(compute)

    def _attention(self, layer: int, parts: Sequence[Part], group: int, us: float) -> None:
        compute, turn = self.streams["compute"], self._turn
        self.events.wait_for_layer_load(layer, compute)
        if self._attend is not None:
            given = AttentionInput(layer)
            for i, part in enumerate(parts):
                chosen = part.chosen[group]
                given.add(part.request.name, chosen.ids, chosen.index, self._out(turn, i).arrays)
            arrays = tuple(self._inputs[turn])
            move = BatchMove(f"attend {layer}", [Attend(self._attend, given)], arrays, [], 0)
            self._launch("compute", move)
        self._compute(layer, us)
        self._attended[turn].record(compute)

    def _compute(self, layer: int, us: float) -> None:
        if us:
            self.streams["compute"].compute(us, f"layer {layer}")

    def _install(self, layer: int, parts: Sequence[Part], group: int, misses: int) -> None:
        side, turn = self.streams["side"], self._turn
        self.events.wait_for_layer_load(layer, side)
        side.wait_event(self._taken)
        moves = []
        for i, part in enumerate(parts):
            pool = part.request.pools[group]
            out = self._out(turn, i)
            moves.append(pool.plan_install(part.chosen[group].selection, layer, out))
        move = self._move(f"install {layer}", moves, self._owners[layer], HBM, misses, twice=True)
        self._launch("side", move)
        self._installed[layer].record(side)
        self._drained[turn].record(side)

    def _save(self, layer: int, parts: Sequence[Part], sent: int, pieces: int) -> None:
        if not sent:
            return
        d2h = self.streams["d2h"]
        moves = [
            RingStore(self._rings[layer], part.request, part.send[0], part.host_rows)
            for part in parts
            if len(part.host_rows)
        ]
        d2h.wait_event(self._written)
        self._launch_save(layer, moves, sent, pieces)

    def _launch_save(self, layer: int, moves: list[Any], sent: int, pieces: int) -> None:
        d2h = self.streams["d2h"]
        demands: list[Demand] = [
            (HBM if self._link == HBM else D2H, sent * self._row_bytes, pieces * self._num_lanes)
        ]
        if self._link != HBM:
            demands.append((HBM, sent * self._row_bytes, pieces * self._num_lanes))
        arrays, nbytes = self._owners[layer], sent * self._row_bytes
        self._launch("d2h", BatchMove(f"save {layer}", moves, arrays, demands, nbytes))
        self.events.layer_saved(layer, d2h)

    def flush(self, request: DecodeRequest, first: int, host_rows: NDArray[np.int64]) -> int:
        """Send positions from ``first`` on to the host, in every layer; returns the bytes."""
        written = self.streams["compute"].record_event()
        self.streams["d2h"].wait_event(written)
        pieces = self._pieces(first, host_rows)
        for layer in self.events.layers:
            if layer in self._lanes:
                store = RingStore(self._rings[layer], request, first, host_rows)
                self._launch_save(layer, [store], len(host_rows), pieces)
        return len(host_rows) * self._row_bytes * len(self._lanes)

    # -- parts ----------------------------------------------------------------------------

    def _out(self, turn: int, place: int) -> PoolOutput:
        """A request's input of each lane, by its place among the step's requests."""
        return self._outs[turn][place]

    def _launch(self, stream: str, move: BatchMove) -> None:
        move.launch(self.streams[stream], self._tallies[stream])

    def _move(
        self,
        name: str,
        moves: Sequence[Any],
        arrays: tuple[Any, ...],
        resource: int,
        rows: int,
        *,
        twice: bool = False,
    ) -> BatchMove:
        """One launch that moves so many rows: read and written on the device, or over the link."""
        nbytes, pieces = rows * self._row_bytes, rows * self._num_lanes
        demands: list[Demand] = [(resource, nbytes * (1 + twice), pieces)]
        if resource == H2D:
            demands.append((HBM, nbytes, pieces))
        if name.startswith(("write", "hits")):
            demands.append((COMPUTE, 0, pieces))  # kernels among those that compute
        return BatchMove(name, moves, arrays, demands, nbytes)

    def _pieces(self, first: int, host_rows: NDArray[np.int64]) -> int:
        """Contiguous pieces, of each lane, of a copy from the ring to these rows."""
        if not len(host_rows):
            return 0
        slots = np.arange(first, first + len(host_rows)) % self._recent
        apart = (np.diff(host_rows) != 1) | (np.diff(slots) != 1)
        if not self._joined:
            size = next(iter(self._lanes.values()))[0].block_size
            apart |= host_rows[1:] % size == 0
        return 1 + int(np.count_nonzero(apart))


def ran(launched: Launched) -> bool:
    """All of it ran, and none failed: only once nothing of it is under way any more."""
    return all(tally.ran >= number for tally, number in launched)
