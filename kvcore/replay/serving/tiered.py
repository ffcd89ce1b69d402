# SPDX-License-Identifier: Apache-2.0
"""Serve a trace with the prefixes of its prompts in tiers: device memory, host, disk, remote.

All caches of a request are on the device while it runs, as without offload (`OnDevice`).  Blocks of
prompts are kept in slower tiers too, and a request that finds blocks there loads them instead of
computing them:

1. When it is admitted, its leading blocks that are in device memory are taken.  Each block behind
   them is taken from the fastest tier that has it, to the first that none has.
2. They are loaded into the request's own blocks.  It waits until all are there; others go on.
3. The rest of its prompt is computed, which attends to what was loaded.

Time is the model's: `ComputeTime` for steps, `PrefillTime` for prompts, and the links of
`kvcore.replay.tiers.lower` for loads.  When every running request waits for its load, the device
is idle, and that time is called exposed.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

from kvcore.offload.blocks.pool import BlockPool
from kvcore.replay.clock.capacity import decode_bytes
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.report.report import Outcome
from kvcore.replay.serving.on_device import OnDevice
from kvcore.replay.serving.runs import Run
from kvcore.replay.tiers.figures import TierFigures
from kvcore.replay.tiers.fit import FittedTiers, fit_tiers
from kvcore.replay.tiers.lower import Block, LowerTiers
from kvcore.replay.tiers.policies import make_policy
from kvcore.replay.tiers.pool import LAST_PLACE, TierPool

if TYPE_CHECKING:
    from kvcore.replay.report.offloaded import OffloadReport
    from kvcore.replay.serving.scheduler import Running, Step

__all__ = ["Tiered"]


class Tiered(OnDevice):
    """Prefixes are kept in the tiers of ``options.tiers``."""

    how = "with prefixes in tiers"
    loads = True

    def __init__(self, model: ModelProfile | Deployment, options: OffloadOptions) -> None:
        super().__init__(model, options)
        self.fitted: FittedTiers = fit_tiers(self.model, options, self.profile)
        self.lower: LowerTiers = LowerTiers(
            self.fitted.make(), write_back=options.write_policy == "write_back"
        )
        self._token_bytes = decode_bytes(self.model, 1, 1)
        self._moving: list[tuple[float, int, Running, int]] = []
        self._admissions = 0
        self.figures: TierFigures = TierFigures(self.fitted, self.lower)

    def _num_blocks(self) -> int:
        return self.fitted.blocks

    def _pool(self) -> BlockPool:
        hbm, blocks = self.fitted.hbm, self._num_blocks()
        gives = self.lower.write_back and bool(self.lower.tiers)
        self._named = hbm.policy == "length" or (
            gives and any(tier.spec.policy == "length" for tier in self.lower.tiers)
        )
        if hbm.policy == "lru" and hbm.keeps and not gives:
            return BlockPool(blocks)
        policy = make_policy(hbm.policy, blocks)
        evicted = self._give if gives else None
        return TierPool(blocks, policy, keeps=hbm.keeps, evicted=evicted)

    # -- a request comes and goes -----------------------------------------------------------

    def _load(self, running: Running, found: int) -> bool:
        """Find the blocks behind those that device memory has, and begin to load them."""
        keys, size, now = running.keys, self.options.block_size, self.now_us
        pool = self._scheduler.pool
        if self._named and isinstance(pool, TierPool):
            pool.places.update(zip(keys, range(len(keys)), strict=True))
        sources = self.lower.find(keys, found, now)
        end = found + len(sources)
        first = not running.preemptions
        if first:
            self.figures.add(running.known, len(keys), found, sources, size)
        if not self.lower.tiers:
            return False
        self.lower.use(keys[:end])
        if not sources:
            return False
        blocks = self._blocks(running, found, end)
        done = self.lower.load(list(zip(sources, blocks, strict=True)), now)
        self._admissions += 1
        tokens = min(end * size, running.known)
        heapq.heappush(self._moving, (done, self._admissions, running, tokens))
        self.figures.wait(done - now)
        return True

    def _blocks(self, running: Running, start: int, end: int) -> list[Block]:
        """The request's blocks from one place to another, as tiers know them."""
        size, each = self.options.block_size, self._token_bytes
        return [
            Block(running.keys[place], place, min(size, running.known - place * size) * each)
            for place in range(start, end)
        ]

    def _give(self, keys: Mapping[Hashable, int]) -> None:
        """Give the content of an evicted block of device memory to the tier below."""
        pool = self._scheduler.pool
        assert isinstance(pool, TierPool)
        for key, filled in keys.items():
            place = pool.places.get(key, LAST_PLACE)
            self.lower.give(Block(key, place, filled * self._token_bytes), self.now_us)

    def _preempted(self, running: Running) -> None:
        if running.loading:
            self._moving = [one for one in self._moving if one[2] is not running]
            heapq.heapify(self._moving)

    def left(self, running: Running, *, finished: bool) -> None:
        """Forget the request."""
        super().left(running, finished=finished)
        pool = self._scheduler.pool
        if self._named and isinstance(pool, TierPool):
            for key in running.keys:
                if not pool.knows(key):
                    pool.places.pop(key, None)

    # -- a step -----------------------------------------------------------------------------

    def serve(self, step: Step) -> list[int]:
        """Serve the step, or wait where no request takes part; then note which loads are done."""
        until = -math.inf
        accepted: list[int] = []
        if step.prefill or step.decode:
            accepted = super().serve(step)
        else:
            until = self._wait_for_a_load()
        self._served(step, 1, until)
        return accepted

    def serve_run(self, run: Run) -> int:
        """Serve steps that repeat one another, until a load is done."""
        if not run.step.decode:
            self.serve(run.step)
            return 1
        if self._moving:
            run = dataclasses.replace(run, until_ms=min(run.until_ms, self._moving[0][0] / 1e3))
        if run.new and self.lower.write_back:
            # An evicted block is written to the tier below at once, not at the end of the run.
            count = run.new[0][0]
            run = dataclasses.replace(run, count=count, new=[], used=run.used[:count])
        count = super().serve_run(run)
        self._served(run.step, count)
        return count

    def _served(self, step: Step, count: int, until: float = -math.inf) -> None:
        """After ``count`` steps: store prompts that are whole in the tiers, and end loads."""
        if self.lower.tiers and not self.lower.write_back:
            for running, start, tokens in step.prefill:
                if start + count * tokens >= running.known:
                    places = len(running.keys)
                    self.lower.store(self._blocks(running, 0, places), self.now_us)
        while self._moving and self._moving[0][0] <= max(self.now_us, until):
            _, _, running, tokens = heapq.heappop(self._moving)
            self._scheduler.loaded(running, tokens)

    def _wait_for_a_load(self) -> float:
        """Let the device wait for the first load, or for a request that arrives before."""
        if not self._moving:
            return -math.inf
        until, arrival, now = self._moving[0][0], self._scheduler.next_arrival_ms, self.now_ms
        if now is not None and arrival is not None and now < arrival < until / 1e3:
            until = arrival * 1e3 + 1.0  # (past it, whatever is rounded)
        us = max(0.0, until - self.now_us)
        self.figures.exposed_us += us
        self._wait(us)
        return until

    def report(self, outcome: Outcome) -> OffloadReport:
        """The figures so far, with those of the tiers."""
        return dataclasses.replace(super().report(outcome), tiers=self.figures)
