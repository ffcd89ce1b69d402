# SPDX-License-Identifier: Apache-2.0
"""The time line of decode steps whose operations are not launched.

This is the model clock's arithmetic for the operations that `DecodeEngine` launches in a step,
layer by layer, for runs with too many steps to launch each.  Numbers of rows need not be whole
here: hits and misses of most requests are estimates.  A test compares the result with the engine's
own clock.

Many steps are priced at once, as arrays, and timed in one call (`TimeLine`); `step` times one.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._kernels.step_times import TimeLine
from kvcore.replay.models.profile import ModelProfile
from kvcore.runtime.profile import COMPUTE, D2H, H2D, HBM, DeviceProfile

__all__ = ["RunTimes", "StepClock", "StepTimes", "resource_us"]

WRITE, MISSES, HITS, ATTEND, INSTALL, SAVE = range(6)
KINDS = 6
UNUSED = -1.0
NOTHING = -1.0  # in ``waits``: the device computes nothing before the step


def resource_us(service: tuple[float, float, float], nbytes: Any, pieces: Any) -> Any:
    """Microseconds that one resource takes: its latency, then so much a piece and a byte."""
    latency, piece, byte = service
    return latency + pieces * piece + nbytes * byte


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of a step: from its first launch to the end of the last attention.

    serve_us:   the layers waited for their rows.
    exposed_us: the part of it that was for rows read from the host.
    link_us:    the link to the device was busy.
    plan_us:    choosing which rows are held and which are read, where a deployment has a figure
                for that.
    """

    us: float
    serve_us: float
    exposed_us: float
    link_us: float
    plan_us: float = 0.0


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Microseconds of steps that follow one another: see `StepTimes`; float64 [steps] each.

    now_us: the time after each; plan_us: see `StepTimes`.
    """

    us: NDArray[np.float64]
    serve_us: NDArray[np.float64]
    exposed_us: NDArray[np.float64]
    link_us: NDArray[np.float64]
    now_us: NDArray[np.float64]
    plan_us: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.us)

    def __getitem__(self, places: slice | NDArray[np.bool_]) -> RunTimes:
        return RunTimes(
            self.us[places], self.serve_us[places], self.exposed_us[places], self.link_us[places],
            self.now_us[places], self.plan_us[places],
        )  # fmt: skip


class StepClock:
    """The time line of one device that does nothing else.

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
        sizes = [len(group) for group in groups]
        first = np.array([place == 0 for size in sizes for place in range(size)])
        order = self._launch_order(sizes)
        # Of operations that could begin at the same time the one launched first does, so the time
        # line has them in the order of their launches.
        place_of = np.append(np.argsort(order), -1)
        links = self._links(first).reshape(-1, 6)[order]
        # A group has two rows of prices: its first layer alone waits for the choice of the top-k.
        rows = 2 * np.repeat(np.arange(len(sizes)), sizes) + ~first
        self._line = TimeLine(
            order.astype(np.int32),
            np.ascontiguousarray(place_of[links], np.int32),
            rows.astype(np.int32),
            depth,
            self._event,
        )

    @property
    def now(self) -> float:
        """Microseconds."""
        return self._line.now

    def _links(self, first: NDArray[np.bool_]) -> NDArray[np.int32]:
        n = len(first)
        before = np.full((n, KINDS, 6), -1, np.int32)

        def row(layer: int, kind: int) -> int:
            return layer * KINDS + kind if layer >= 0 else -1

        for layer in range(n):
            used = layer - self._depth  # the layer that had the same buffer before
            before[layer, WRITE, 0] = row(layer - 1, ATTEND)
            links = [row(layer - 1, MISSES), row(used, ATTEND), row(used, INSTALL)]
            if first[layer]:
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
        """Let the device compute something else for ``us`` microseconds."""
        self._line.advance(us)

    def step(
        self,
        rows: NDArray[np.float64],
        tokens: float,
        sent: float,
        sent_pieces: float,
        layer_us: float,
    ) -> StepTimes:
        """One step; each argument is one entry of the same argument of `steps`."""
        return _only(self.steps(*_one(rows, tokens, sent, sent_pieces, layer_us)))

    def peek(
        self,
        rows: NDArray[np.float64],
        tokens: float,
        sent: float,
        sent_pieces: float,
        layer_us: float,
    ) -> StepTimes:
        """What `step` would take now; the time line stays as it is."""
        one = _one(rows, tokens, sent, sent_pieces, layer_us)
        return _only(self.steps(*one, looks=np.ones(1, np.uint8)))

    def steps(
        self,
        rows: NDArray[np.float64],
        tokens: NDArray[np.float64],
        sent: NDArray[np.float64],
        sent_pieces: NDArray[np.float64],
        layer_us: NDArray[np.float64],
        *,
        waits: NDArray[np.float64] | None = None,
        looks: NDArray[np.uint8] | None = None,
        until_ms: float = np.inf,
    ) -> RunTimes:
        """Time consecutive steps: the first, and those after it that begin before ``until_ms``.

        rows:     [steps, groups, 3] hits, misses and recent rows of each group, over the batch;
                  each of the group's layers moves them.
        tokens:   [steps] new tokens of the batch, their rows written in every layer.
        sent:     [steps] tokens whose rows go to the host in every layer; sent_pieces: [steps] in
                  how many pieces a lane.
        layer_us: [steps] compute time of a layer.
        waits:    [steps] microseconds that the device computes something else before the step
                  (`advance`); negative: none.
        looks:    [steps] 1 for an entry that is timed without moving the time line (`peek`); it
                  stands before the step itself and has that step's wait.
        """
        shares = self._price(rows, tokens, sent, sent_pieces, layer_us)
        out = np.empty((len(shares), 5))
        served = self._line.run(
            shares,
            self._launch_costs(rows, sent),
            np.full(len(shares), NOTHING) if waits is None else waits,
            np.zeros(len(shares), np.uint8) if looks is None else looks,
            until_ms,
            out,
        )
        us, serve_us, exposed_us, link_us, now_us = out[:served].T
        return RunTimes(us, serve_us, exposed_us, link_us, now_us, np.zeros(served))

    def _price(
        self,
        rows: NDArray[np.float64],
        tokens: NDArray[np.float64],
        sent: NDArray[np.float64],
        sent_pieces: NDArray[np.float64],
        layer_us: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """[steps, 2 * groups, kinds, 4] microseconds that each operation takes of each resource.

        `UNUSED` for a resource that an operation does not use, and for operations that do not run.
        """
        size, lanes = self._row_bytes, self._lanes
        count, groups = rows.shape[:2]
        missed, held = rows[:, :, 1], rows[:, :, 0] + rows[:, :, 2]
        shares = np.full((count, groups, 2, KINDS, 4), UNUSED)

        def put(kind: int, resource: int, us: NDArray[np.float64]) -> None:
            """Put one resource's share of an operation: us is [steps] or [steps, groups]."""
            shares[:, :, :, kind, resource] = us.reshape(count, -1, 1)

        def us(resource: int, nbytes: NDArray[np.float64], pieces: NDArray[np.float64]) -> Any:
            return resource_us(self._service[resource], nbytes, pieces)

        # A copy within device memory counts twice, as in the engine: it is read and written.
        put(WRITE, HBM, us(HBM, 2 * tokens * size, tokens * lanes))
        put(WRITE, COMPUTE, us(COMPUTE, 0 * tokens, tokens * lanes))
        for kind, resource, moved, times in (
            (MISSES, H2D, missed, 1), (MISSES, HBM, missed, 1), (HITS, HBM, held, 2),
            (HITS, COMPUTE, held, 0), (INSTALL, HBM, missed, 2),
        ):  # fmt: skip
            taken = us(resource, times * size * moved, lanes * moved)
            put(kind, resource, np.where(moved > 0, taken, UNUSED))
        put(ATTEND, COMPUTE, layer_us)
        for resource in (D2H, HBM):
            taken = us(resource, sent * size, sent_pieces * lanes)
            put(SAVE, resource, np.where(sent > 0, taken, UNUSED))
        return shares.reshape(count, 2 * groups, KINDS, 4)

    def _launch_costs(
        self, rows: NDArray[np.float64], sent: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """[steps, 2 * groups, kinds] microseconds that launching an operation takes the host.

        The host's time goes into launches, records and waits, in the order of the engine.
        """
        launch, event = self._launch, self._event
        count, groups = rows.shape[:2]
        missed = (rows[:, :, 1] > 0)[:, :, None]
        held = (rows[:, :, 0] + rows[:, :, 2] > 0)[:, :, None]
        cost = np.empty((count, groups, 2, KINDS))
        cost[..., WRITE] = event + launch
        cost[..., MISSES] = event + np.array((4, 3)) * event + missed * launch
        cost[..., HITS] = event + 2 * event + held * launch
        cost[..., ATTEND] = event + event + launch
        cost[..., INSTALL] = event + 2 * event + missed * launch
        cost[..., SAVE] = 2 * event + np.where(sent > 0, event + launch, 0.0)[:, None, None]
        return cost.reshape(count, 2 * groups, KINDS)


def _one(rows: NDArray[np.float64], *each: float) -> tuple[NDArray[np.float64], ...]:
    """The arguments of one step as those of a run of one."""
    return (np.asarray(rows, np.float64)[None], *np.array(each, np.float64)[:, None])


def _only(times: RunTimes) -> StepTimes:
    """The only step of a run."""
    return StepTimes(
        float(times.us[0]), float(times.serve_us[0]), float(times.exposed_us[0]),
        float(times.link_us[0]),
    )  # fmt: skip
