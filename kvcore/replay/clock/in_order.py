# SPDX-License-Identifier: Apache-2.0
"""The time line of decode steps whose layers wait for their rows: nothing is launched ahead.

One die's step, in microseconds::

    step  = compute + groups * plan + layers * serve(misses) + draft layers * serve(their misses)
    serve = max(HBM's share, the link's share) + (1 - overlap) * the shorter of them
            # each share: latency + pieces * piece + bytes / rate

A serve is one kernel that reads held rows from device memory and missing ones from the host, and
writes all of them.  Attention waits until it has ended.  Installing rows in the pool and copying
new rows to the host run on other streams and delay nothing.  Source: cann-recipes-infer, GLM-5.2
offload guide, for the order; the figures are the deployment's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcore.replay.clock.step_clock import RunTimes, StepTimes, resource_us
from kvcore.replay.deployments.deployment import Deployment
from kvcore.runtime.profile import COMPUTE, H2D, HBM

__all__ = ["InOrderClock"]


class InOrderClock:
    """The time line of one device, as `StepClock` has it, for a deployment that serves in order.

    now: microseconds so far.
    """

    def __init__(self, deployment: Deployment, *, lanes: int) -> None:
        model, device = deployment.model, deployment.device
        self._row_bytes, self._lanes = model.row_bytes, lanes
        self._sizes = np.array(
            [len(group) for group in model.groups or ((*range(model.layers),),)], np.float64
        )
        self._layers = model.layers
        self._service = device.service
        self._overlap = deployment.own("serve_overlap", 1.0)
        self._plan = deployment.own("plan_group") * len(model.groups)
        self._draft_layers = model.draft_layers if "draft_misses" in deployment.figures else 0
        self._draft_misses = deployment.own("draft_misses")
        self.now: float = 0.0

    def advance(self, us: float) -> None:
        """Let the device compute something else for ``us`` microseconds."""
        self.now += us

    def _shares(
        self, rows: NDArray[np.float64], missed: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Microseconds of a layer's serve, and of device memory and of the link in it."""
        shares = []
        for resource, pieces, size in ((HBM, rows, 2 * rows - missed), (H2D, missed, missed)):
            us = resource_us(self._service[resource], size * self._row_bytes, pieces * self._lanes)
            shares.append(np.where(pieces > 0, us, 0.0))
        hbm, link = shares
        both = np.maximum(hbm, link) + (1 - self._overlap) * np.minimum(hbm, link)
        us = np.where(rows > 0, np.maximum(self._service[COMPUTE][0], both), 0.0)
        return us, hbm, link

    def step(
        self,
        rows: NDArray[np.float64],
        tokens: float,
        sent: float,
        sent_pieces: float,
        layer_us: float,
    ) -> StepTimes:
        """One step; the arguments are `StepClock.step`'s.

        rows: [groups, 3] hits, misses and recent rows, each query's own counted.
        """
        rows = np.asarray(rows, np.float64)
        wanted, missed = rows.sum(axis=1), rows[:, 1]
        us, hbm, link = self._shares(wanted, missed)
        serve = float(us @ self._sizes)
        busy = float(link @ self._sizes)
        exposed = float((us - hbm) @ self._sizes)
        plan = 0.0
        if wanted.any():
            plan = self._plan
            if self._draft_layers:
                mean = np.array([wanted.mean()])
                more, held, read = self._shares(mean, mean * self._draft_misses)
                serve += self._draft_layers * float(more[0])
                busy += self._draft_layers * float(read[0])
                exposed += self._draft_layers * float(more[0] - held[0])
        total = layer_us * self._layers + plan + serve
        self.now += total
        return StepTimes(total, serve, max(0.0, exposed), busy, plan)

    def steps(
        self,
        rows: NDArray[np.float64],
        tokens: NDArray[np.float64],
        sent: NDArray[np.float64],
        sent_pieces: NDArray[np.float64],
        layer_us: NDArray[np.float64],
        *,
        waits: NDArray[np.float64],
        looks: NDArray[np.uint8],
        until_ms: float = np.inf,
    ) -> RunTimes:
        """Steps in a row: see `StepClock.steps`."""
        found: list[tuple[float, ...]] = []
        looked = False
        for n in range(len(rows)):
            if n and not looked and self.now / 1e3 >= until_ms:
                break
            if waits[n] >= 0:
                self.advance(float(waits[n]))
            looked = bool(looks[n])
            one = (rows[n], float(tokens[n]), float(sent[n]), float(sent_pieces[n]))
            times = (self.peek if looked else self.step)(*one, float(layer_us[n]))
            figures = (times.us, times.serve_us, times.exposed_us, times.link_us)
            found.append((*figures, self.now, times.plan_us))
        return RunTimes(*np.array(found).T)

    def peek(
        self,
        rows: NDArray[np.float64],
        tokens: float,
        sent: float,
        sent_pieces: float,
        layer_us: float,
    ) -> StepTimes:
        """What `step` would take now; the time line stays as it is."""
        now = self.now
        times = self.step(rows, tokens, sent, sent_pieces, layer_us)
        self.now = now
        return times
