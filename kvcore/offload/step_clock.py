# SPDX-License-Identifier: Apache-2.0
"""When the parts of a decode step end, without launching them.

The arithmetic of the model clock for the operations that `DecodeEngine` launches in a step, layer
by layer: for runs with too many steps to launch each.  Rows are numbers here, not necessarily
whole: what most requests hit and missed is estimated.  A test holds it to the engine's own clock.

An operation takes a share of each resource (latency + pieces * a piece + bytes / rate) and as long
as the longest; it starts when its stream and the events it waits for allow.  One thing the model
clock has is left out: that operations of different streams take turns at device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.offload.models import ModelProfile
from kvcore.runtime.profile import COMPUTE, D2H, H2D, HBM, DeviceProfile

__all__ = ["GroupRows", "StepClock", "StepTimes"]


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows of one group's selection in a step, over the batch: each of its layers moves them."""

    hits: float
    misses: float
    recent: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of a step: from its first launch to the end of the last attention.

    serve_us:   what the layers waited for their rows, those read from the host among them
    (exposed_us).
    link_us:    the link to the device was busy.
    """

    us: float
    serve_us: float
    exposed_us: float
    link_us: float


class StepClock:
    """The time line of one device.

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
        self._groups = [len(group) for group in groups]
        self._row_bytes, self._lanes, self._depth = model.row_bytes, lanes, depth
        self._service = device.service
        self._launch, self._event = device.value("launch_cost"), device.value("event_cost")
        self.now = 0.0
        num_layers = sum(self._groups)
        self._installed, self._saved = [0.0] * num_layers, [0.0] * num_layers
        self._attended, self._drained = [0.0] * depth, [0.0] * depth
        self._turn = 0
        self._tails = [0.0] * 4  # compute, h2d, side, d2h

    def advance(self, us: float) -> None:
        """Let the device compute something else for so long."""
        self._tails[0] = self.now = max(self.now, self._tails[0]) + us

    def share(self, resource: int, nbytes: float, pieces: float) -> float:
        """Microseconds of one resource that an operation takes."""
        latency, piece, byte = self._service[resource]
        return latency + pieces * piece + nbytes * byte

    def step(
        self,
        rows: Sequence[GroupRows],
        tokens: int,
        sent: float,
        sent_pieces: float,
        layer_us: float,
    ) -> StepTimes:
        """One step.

        rows:     of each group.
        tokens:   new tokens of the batch, their rows written in every layer.
        sent:     tokens whose rows go to the host in every layer, in so many pieces a lane.
        layer_us: compute time of a layer.
        """
        launch, event = self._launch, self._event
        share, row, lanes, depth = self.share, self._row_bytes, self._lanes, self._depth
        installed, saved = self._installed, self._saved
        attended, drained = self._attended, self._drained
        compute, h2d, side, d2h = self._tails
        floor = self._service[COMPUTE][0]
        write_us = max(share(HBM, 2 * tokens * row, tokens * lanes), floor)
        sent_us = max(
            share(D2H, sent * row, sent_pieces * lanes), share(HBM, sent * row, sent_pieces * lanes)
        )
        host = self.now + event
        begin = max(host, compute)
        waited = exposed = link = 0.0
        layer, turn = 0, self._turn
        for group, counts in zip(self._groups, rows, strict=True):
            missed, held = counts.misses, counts.hits + counts.recent
            miss_link = share(H2D, missed * row, missed * lanes)
            miss_us = max(miss_link, share(HBM, missed * row, missed * lanes))
            hit_us = max(share(HBM, 2 * held * row, held * lanes), floor)
            install_us = share(HBM, 2 * missed * row, missed * lanes)
            host += event
            for place in range(group):
                # The new rows.
                host += 2 * event + launch
                compute = max(host, compute, saved[layer]) + write_us
                written = compute
                if not place:
                    h2d = max(h2d, written)
                # The rows that are missing.
                h2d = max(h2d, attended[turn], drained[turn], saved[layer])
                host += 4 * event
                if missed:
                    host += launch
                    h2d = max(host, h2d) + miss_us
                    link += miss_link
                loaded = h2d
                # The rows that are held.
                compute = max(compute, installed[layer], drained[turn])
                host += 3 * event
                if held:
                    host += launch
                    compute = max(host, compute) + hit_us
                waited += compute - written
                taken = compute
                # The layer.
                host += 2 * event + launch
                exposed += max(0.0, loaded - compute)
                compute = max(host, compute, loaded) + layer_us
                attended[turn] = compute
                # What was read goes into the pool, beside what follows.
                side = max(side, loaded, taken)
                host += 4 * event
                if missed:
                    host += launch
                    side = max(host, side) + install_us
                installed[layer] = drained[turn] = side
                if sent:
                    host += 2 * event + launch
                    d2h = max(host, d2h, written) + sent_us
                    saved[layer] = d2h
                turn = (turn + 1) % depth
                layer += 1
        self._turn = turn
        self._tails = [compute, h2d, side, d2h]
        self.now = max(compute, host)
        return StepTimes(compute - begin, waited + exposed, exposed, link)
