# SPDX-License-Identifier: Apache-2.0
"""When the parts of a decode step end, without launching them.

The model clock's arithmetic for the operations that `DecodeEngine` launches in a step, layer by
layer: for runs with too many steps to launch each.  Rows are numbers here, not necessarily whole:
what most requests hit and missed is estimated.  A test holds it to the engine's own clock.

The operations of a layer, and what they wait for (state is what the step before left):

===========  ==========================================================================
write        the layer before; the layer's save of the step before
misses       the misses before; the group's first write; the attention and the install that used
             the same buffer; the layer's save of the step before
hits         write; the layer's install of the step before; the buffer's install
attention    hits, misses
install      the install before; misses, hits
save         the save before; write
===========  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore._kernels import step_times
from kvcore.replay.models.profile import ModelProfile
from kvcore.runtime.profile import COMPUTE, D2H, H2D, HBM, DeviceProfile

__all__ = ["StepClock", "StepTimes"]

WRITE, MISSES, HITS, ATTEND, INSTALL, SAVE = range(6)
KINDS = 6
UNUSED = -1.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of a step: from its first launch to the end of the last attention.

    serve_us:   what the layers waited for their rows, those read from the host among them
    (exposed_us).
    link_us:    the link to the device was busy.
    plan_us:    choosing which rows are held and which are read, where that costs anything.
    """

    us: float
    serve_us: float
    exposed_us: float
    link_us: float
    plan_us: float = 0.0


class StepClock:
    """The time line of one device, which has no other load.

    groups: layers of each group, in order; lanes: pieces of a row.
    depth:  buffers of the attention's input.
    """

    def __init__(
        self,
        model: ModelProfile,
        device: DeviceProfile,
        groups: Sequence[Sequence[int]],
        *,
        lanes: int,
        depth: int = 2,
    ) -> None:
        self._row_bytes, self._lanes, self._depth = model.row_bytes, lanes, depth
        self._service = device.service
        self._launch, self._event = device.value("launch_cost"), device.value("event_cost")
        self.now: float = 0.0
        self._group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        self._first = np.array([place == 0 for group in groups for place in range(len(group))])
        n = len(self._group_of)
        self._order = self._launch_order([len(group) for group in groups])
        # Ties go by launch, so the model sees the operations in that order.
        place_of = np.append(np.argsort(self._order), -1)
        links = self._links(n).reshape(-1, 6)[self._order]
        self._before = np.ascontiguousarray(place_of[links], np.int32)
        self._ready = np.zeros((n, KINDS))
        self._shares = np.full((n, KINDS, 4), UNUSED)
        self._end = np.zeros((n, KINDS))
        self._work = np.zeros((9, n * KINDS), np.int32)
        self._free = np.zeros(4)
        self._installed, self._saved = np.zeros((2, n))
        self._attended, self._drained = np.zeros((2, depth))
        self._turn = 0
        self._tails = np.zeros(KINDS)  # the last end of each kind

    def _links(self, n: int) -> NDArray[np.int32]:
        before = np.full((n, KINDS, 6), -1, np.int32)

        def row(layer: int, kind: int) -> int:
            return layer * KINDS + kind if layer >= 0 else -1

        for layer in range(n):
            used = layer - self._depth  # who had the same buffer
            before[layer, WRITE, 0] = row(layer - 1, ATTEND)
            links = [row(layer - 1, MISSES), row(used, ATTEND), row(used, INSTALL)]
            if self._first[layer]:
                links.append(row(layer, WRITE))
            before[layer, MISSES, : len(links)] = links
            before[layer, HITS, :2] = row(layer, WRITE), row(used, INSTALL)
            before[layer, ATTEND, :2] = row(layer, HITS), row(layer, MISSES)
            before[layer, INSTALL, :3] = (
                row(layer - 1, INSTALL), row(layer, MISSES), row(layer, HITS),
            )  # fmt: skip
            before[layer, SAVE, :2] = row(layer - 1, SAVE), row(layer, WRITE)
        return before

    def _launch_order(self, sizes: Sequence[int]) -> NDArray[np.int64]:
        """Operations in the order of their launches.

        Misses are launched ahead, into every buffer of the group's whose last user is launched.
        """
        order: list[int] = []
        first = 0
        for size in sizes:
            loaded = 0
            for place in range(size):
                order.append((first + place) * KINDS + WRITE)
                while loaded < min(place + self._depth, size):
                    order.append((first + loaded) * KINDS + MISSES)
                    loaded += 1
                order += ((first + place) * KINDS + kind for kind in (HITS, ATTEND, INSTALL, SAVE))
            first += size
        return np.array(order)

    def advance(self, us: float) -> None:
        """Let the device compute something else for so long."""
        self.now = self._tails[ATTEND] = max(self.now, float(self._tails[ATTEND])) + us

    def share(self, resource: int, nbytes: float, pieces: float) -> float:
        """Microseconds of one resource that an operation takes."""
        latency, piece, byte = self._service[resource]
        return latency + pieces * piece + nbytes * byte

    def step(
        self,
        rows: NDArray[np.float64],
        tokens: float,
        sent: float,
        sent_pieces: float,
        layer_us: float,
    ) -> StepTimes:
        """One step.

        rows:     [groups, 3] hits, misses and recent rows of each group, over the batch; each of
                  its layers moves them.
        tokens:   new tokens of the batch, their rows written in every layer.
        sent:     tokens whose rows go to the host in every layer, in so many pieces a lane.
        layer_us: compute time of a layer.
        """
        n, depth = len(self._group_of), self._depth
        self._price(rows, tokens, sent, sent_pieces, layer_us)
        begin = max(self.now + self._event, float(self._tails[ATTEND]))
        host = self._launch_times(rows, sent, begin)
        ready, turns = self._ready, (self._turn + np.arange(n)) % depth
        ready[0] = np.maximum(ready[0], self._tails[[ATTEND, MISSES, WRITE, HITS, INSTALL, SAVE]])
        ready[:, WRITE] = np.maximum(ready[:, WRITE], self._saved)
        ready[:, MISSES] = np.maximum(ready[:, MISSES], self._saved)
        ready[:, HITS] = np.maximum(ready[:, HITS], self._installed)
        early = turns[: min(depth, n)]
        reused = np.maximum(self._attended[early], self._drained[early])
        ready[: len(early), MISSES] = np.maximum(ready[: len(early), MISSES], reused)
        ready[: len(early), HITS] = np.maximum(ready[: len(early), HITS], self._drained[early])
        end = self._end
        order, places = self._order, len(self._order)
        started, ended = np.empty((2, places))
        served = step_times.run(
            self._shares.reshape(-1, 4)[order], self._before, ready.reshape(-1)[order],
            self._free, started, ended, self._work,
        )  # fmt: skip
        end.reshape(-1)[order] = ended
        assert served == places
        self._installed[:] = end[:, INSTALL]
        if sent:
            self._saved[:] = end[:, SAVE]
        self._attended[turns[-depth:]] = end[-depth:, ATTEND]
        self._drained[turns[-depth:]] = end[-depth:, INSTALL]
        self._turn = int((self._turn + n) % depth)
        self._tails = end[-1].copy()
        self.now = max(host + self._event, float(end[-1, ATTEND]))
        exposed = float(np.maximum(end[:, MISSES] - end[:, HITS], 0.0).sum())
        waited = float((end[:, HITS] - end[:, WRITE]).sum())
        link = float(np.maximum(self._shares[:, MISSES, H2D], 0.0).sum())
        return StepTimes(self.now - begin, waited + exposed, exposed, link)

    def peek(
        self,
        rows: NDArray[np.float64],
        tokens: float,
        sent: float,
        sent_pieces: float,
        layer_us: float,
    ) -> StepTimes:
        """What `step` would take now; the time line stays as it is."""
        names = ("_free", "_installed", "_saved", "_attended", "_drained", "_tails")
        kept = [(name, getattr(self, name).copy()) for name in names]
        now, turn = self.now, self._turn
        times = self.step(rows, tokens, sent, sent_pieces, layer_us)
        for name, values in kept:
            setattr(self, name, values)
        self.now, self._turn = now, turn
        return times

    def _price(
        self,
        rows: NDArray[np.float64],
        tokens: float,
        sent: float,
        sent_pieces: float,
        layer_us: float,
    ) -> None:
        """Shares of every operation; what does not happen uses nothing."""
        size, lanes, group = self._row_bytes, self._lanes, self._group_of
        missed, held = rows[:, 1], rows[:, 0] + rows[:, 2]
        shares, nothing = self._shares, UNUSED
        # As the engine counts: a row in device memory is read and written.
        shares[:, WRITE, HBM] = self.share(HBM, 2 * tokens * size, tokens * lanes)
        shares[:, WRITE, COMPUTE] = self.share(COMPUTE, 0, tokens * lanes)
        for kind, resource, count, times in (
            (MISSES, H2D, missed, 1), (MISSES, HBM, missed, 1), (HITS, HBM, held, 2),
            (HITS, COMPUTE, held, 0), (INSTALL, HBM, missed, 2),
        ):  # fmt: skip
            latency, piece, byte = self._service[resource]
            us = latency + count * (lanes * piece + times * size * byte)
            shares[:, kind, resource] = np.where(count > 0, us, nothing)[group]
        shares[:, ATTEND, COMPUTE] = layer_us
        for resource in (D2H, HBM):
            save_us = self.share(resource, sent * size, sent_pieces * lanes)
            shares[:, SAVE, resource] = save_us if sent else nothing

    def _launch_times(self, rows: NDArray[np.float64], sent: float, begin: float) -> float:
        """When the host launches each operation; returns when it has launched the last.

        A launch, a record and a wait cost the host time, in the order of the engine.
        """
        launch, event = self._launch, self._event
        missed = (rows[:, 1] > 0)[self._group_of]
        held = (rows[:, 0] + rows[:, 2] > 0)[self._group_of]
        cost = np.empty((len(self._group_of), KINDS))
        cost[:, WRITE] = event + launch
        cost[:, MISSES] = event + (3 + self._first) * event + missed * launch
        cost[:, HITS] = event + 2 * event + held * launch
        cost[:, ATTEND] = event + event + launch
        cost[:, INSTALL] = event + 2 * event + missed * launch
        cost[:, SAVE] = 2 * event + (event + launch if sent else 0.0)
        host = self.now + self._event + np.cumsum(cost.reshape(-1)[self._order])
        self._ready.reshape(-1)[self._order] = host
        # What follows the launch of a save: its record; else the install's two records alone.
        return float(host[-1]) + (event if sent else 0.0)
