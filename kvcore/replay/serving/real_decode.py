# SPDX-License-Identifier: Apache-2.0
"""The real requests of a replay: caches, device, prefill and decode engine.

With fidelity ``full`` every request and layer is real, with the block tables of the scheduler, on
the model clock.  With ``sampled`` some requests and layers are, each with blocks of its own and
without a clock.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core import overlap
from kvcore._core.overlap import Access
from kvcore.errors import DeviceOutOfMemoryError
from kvcore.offload.decode.engine import DecodeEngine
from kvcore.offload.decode.moves import AttentionInput
from kvcore.offload.decode.result import StepResult
from kvcore.offload.prefill import PrefillOffloader, Staging
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.report.report import Mismatch
from kvcore.replay.traces.made_ids import MadeIds
from kvcore.replay.traces.reader import TraceRequest
from kvcore.replay.traces.recorded_ids import RecordedIds
from kvcore.replay.traces.request_rows import RequestRows
from kvcore.runtime import Device
from kvcore.runtime.profile import DeviceProfile

__all__ = ["RealDecode", "check_host_memory"]

_LANES = ("key", "value")
#: Prompt tokens whose rows are made at a time.
PIECE = 2048


def check_host_memory(
    model: ModelProfile, options: OffloadOptions, num_layers: int, blocks: int
) -> None:
    """Raise DeviceOutOfMemoryError when so many blocks of real layers cannot fit the machine."""
    size = blocks * options.block_size * model.row_bytes * num_layers
    if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise DeviceOutOfMemoryError(
            f"host_blocks: expected caches that fit this machine's memory, got {blocks} blocks"
            f" of {num_layers} layers: {size} bytes; sampled fidelity needs less",
            argument="host_blocks",
            seen=blocks,
        )


class _WriteStaging:
    """The part of a layer's computation that writes its rows into a staging buffer."""

    workspace_size = 0

    def __init__(self, staging: Staging, rows: Sequence[NDArray[np.uint8]]) -> None:
        self._staging, self._rows = staging, rows
        self.bytes_moved = sum(lane.nbytes for lane in rows)
        self.num_descriptors = len(rows)
        self.reads: tuple[Access, ...] = ()
        self.writes = tuple(
            Access(
                f"staging[{i}]",
                lane,
                overlap.merge(
                    np.array([lane.__kvcore_array__.ctypes.data]), max(1, rows[i].nbytes)
                ),
            )
            for i, lane in enumerate(staging.lanes)
        )

    def run(self) -> None:
        """Write the rows into the staging buffer."""
        for lane, rows in zip(self._staging.lanes, self._rows, strict=True):
            lane.__kvcore_array__[: len(rows)] = rows

    def touched(self) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        """(reads, writes) of the last run."""
        return self.reads, self.writes


class RealDecode:
    """Real layers of real requests.

    layers: ids of the real layers; groups: the groups of layers that the engine plans.
    blocks: blocks of the full caches.
    places: the most real requests at a time.
    timed:  True: on the model clock, with prefill through the ring of staging buffers; False:
            plain memory and no clock.
    ids:    the source of the ids; None: the default generator.
    groups_of: the numbers under which a request asks for the ids of its groups, where they are
            not those of ``groups``.
    served_samples: served rows to verify; None: half of ``verify_samples``.
    Raises DeviceOutOfMemoryError for caches that do not fit this machine.
    """

    def __init__(
        self,
        model: ModelProfile,
        options: OffloadOptions,
        profile: DeviceProfile,
        pool: int,
        *,
        layers: Sequence[int],
        groups: Mapping[int, Sequence[int]],
        blocks: int,
        places: int,
        max_tokens: int,
        timed: bool,
        ids: MadeIds | RecordedIds | None = None,
        served_samples: int | None = None,
    ) -> None:
        self._model, self._options, self._timed = model, options, timed
        self._groups = tuple(groups)  # numbers of the groups as the model counts them
        self.layers: tuple[int, ...] = tuple(layers)
        self._lane_bytes = [n for n in model.shape.row_bytes if n]
        check_host_memory(model, options, len(self.layers), blocks)
        events = options.max_trace_events if timed else 0
        self.device: Device = (
            Device(profile, clock="model", trace=bool(events), max_events=events or None)
            if timed
            else Device()
        )
        self.device.__enter__()
        self.rows: RequestRows = RequestRows(model, options.seed, max_tokens, ids)
        self.layer_us: float = 0.0
        self.groups_of: dict[int, tuple[int, ...]] = {}
        self._queries: dict[int, int] = {}
        self.verified: int = 0
        self.mismatches: list[Mismatch] = []
        self._served_budget = (
            options.verify_samples // 2 if served_samples is None else served_samples
        )
        shape = (blocks, options.block_size)
        self.full: dict[int, tuple[Any, ...]] = {
            layer: tuple(self.device.empty_swapped((*shape, n), "uint8") for n in self._lane_bytes)
            for layer in self.layers
        }
        self.engine: DecodeEngine = DecodeEngine(
            self.device,
            self.full,
            groups=tuple(groups.values()),
            max_batch=places,
            max_tokens=max_tokens,
            topk=(1 + options.drafts) * model.topk,
            select=self._select,
            rows=self.rows.make,
            attend=self._attend,
            layer_us=lambda *_: self.layer_us,
            policy=options.policy,
            capacity=pool,
            write_policy=options.write_policy,
            max_drafts=options.drafts,
        )
        self._ring = (
            PrefillOffloader(
                self.device,
                self.full,
                max_tokens=options.chunk,
                copies=self.engine.streams["d2h"],
            )
            if timed
            else None
        )
        self._step = 0

    def close(self) -> None:
        """Leave the device; what was computed stays readable."""
        self.engine.close()
        if self._ring is not None:
            self._ring.close()
        self.device.__exit__(None, None, None)

    # -- prompts --------------------------------------------------------------------------

    def prefill(
        self, request: TraceRequest, table: NDArray[np.int64], first: int, count: int, us: float
    ) -> None:
        """Compute ``count`` prompt tokens from ``first`` on and bring their rows to the host.

        us: of all layers; the rows of a layer leave while the next one computes.
        """
        self.rows.add(request)
        assert self._ring is not None
        compute = self.engine.streams["compute"]
        for layer in self.layers:
            staging = self._ring.take(layer, compute)
            rows = self.rows.make(request.index, layer, first, count)
            compute.launch(_WriteStaging(staging, rows))
            compute.compute(us / len(self.layers), f"prefill {layer}")
            self._ring.hand_over(staging, table, first=first, count=count)

    def order_prompts(self) -> None:
        """Let the next step read prefilled rows only after their copies to the host."""
        streams = self.engine.streams
        streams["h2d"].wait_event(streams["d2h"].record_event())

    def place(
        self, request: TraceRequest, table: NDArray[np.int64], first: int, count: int
    ) -> None:
        """Put rows of a prompt on the host, taking no model time: another device computed them."""
        self.rows.add(request)
        if not count:
            return
        self.device.synchronize_blocking()
        size = self._options.block_size
        for start in range(first, first + count, PIECE):
            end = min(start + PIECE, first + count)
            # Block by block: rows of a block lie behind one another on either side.
            edges = [start, *range(start - start % size + size, end, size), end]
            for layer in self.layers:
                made = self.rows.make(request.index, layer, start, end - start)
                for lane, rows in zip(self.full[layer], made, strict=True):
                    array = lane.__kvcore_array__
                    for low, high in pairwise(edges):
                        block, offset = int(table[low // size]), low % size
                        array[block, offset : offset + high - low] = rows[
                            low - start : high - start
                        ]

    def copy_block(self, source: int, target: int) -> int:
        """Copy a block of every layer within the host; returns the bytes."""
        self.device.synchronize_blocking()
        for layer in self.layers:
            for lane in self.full[layer]:
                array = lane.__kvcore_array__
                array[target] = array[source]
        return self._options.block_size * self._model.row_bytes * len(self.layers)

    # -- steps ----------------------------------------------------------------------------

    def step(
        self, who: Sequence[int], tokens: Mapping[int, int], stands: Mapping[int, int]
    ) -> StepResult:
        """Decode one step of these requests.

        tokens: the number of positions each writes; stands: how many of them will be accepted.
        """
        self._step += 1
        for index in who:
            context = self.engine.context(index)
            self._queries[index] = tokens[index]
            self.rows.reject_from(index, context + stands[index])
        drafts: dict[Hashable, int] = {index: tokens[index] - 1 for index in who}
        result = self.engine.step_blocking(who, drafts)
        for index in who:
            self.engine.accept(index, stands[index])
        return result

    def _select(self, request: Any, group: int, tokens: int) -> NDArray[np.int32]:
        number = self.groups_of.get(request, self._groups)[group]
        found = self.rows.select(request, number, tokens, self._queries[request])
        # The engine sorts the union of several queries; of one it takes the ids as they are.
        return np.sort(found[0]) if len(found) == 1 else found

    def _attend(self, given: AttentionInput) -> None:
        # This runs on a worker.  It checks one row of one request a call, while samples are left.
        if self._served_budget <= 0 or not given.requests:
            return
        pick = (self._step * 0x9E3779B1 + given.layer * 0x85EBCA77) & 0xFFFFFFFF
        index = given.requests[pick % len(given.requests)]
        assert isinstance(index, int)
        ids = given.ids(index)
        accepted = np.flatnonzero((ids >= 0) & (ids < self.engine.context(index)))
        if not len(accepted):
            return
        self._served_budget -= 1
        place = int(accepted[pick % len(accepted)])
        for lane, rows in enumerate(given.rows(index)):
            position = int(ids[place])
            if rows[place].tobytes() != self.rows.expected(index, given.layer, lane, position):
                self.mismatches.append(
                    Mismatch(index, position, given.layer, "served " + _LANES[lane], -1, place)
                )
        self.verified += 1

    # -- the end of a request ---------------------------------------------------------------

    def verify(
        self,
        request: TraceRequest,
        table: NDArray[np.int64],
        positions: Sequence[int],
        draw: np.random.Generator,
    ) -> None:
        """Compare rows on the host with their expected bytes."""
        for position in positions:
            layer = self.layers[int(draw.integers(len(self.layers)))]
            place, row = divmod(position, self._options.block_size)
            block = int(table[place])
            for lane, cache in enumerate(self.full[layer]):
                found = cache.__kvcore_array__[block, row].tobytes()
                if found != self.rows.expected(request.index, layer, lane, position):
                    self.mismatches.append(
                        Mismatch(request.index, position, layer, _LANES[lane], block, row)
                    )
            self.verified += 1
