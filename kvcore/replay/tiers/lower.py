# SPDX-License-Identifier: Apache-2.0
"""The tiers below device memory: what each holds, and when its links are done.

A block of a prompt is in any number of tiers.  What is loaded from a slower tier passes through the
faster ones below the device, stays there, and takes the time of each link on its way: a link serves
one load after the other, each in ``latency + bytes / bandwidth``, and a load is done when the last
of its links is.  Loads and writes do not delay each other.  A block can be found in a tier once it
is written there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvcore.replay.tiers.policies import make_policy
from kvcore.replay.tiers.spec import TierSpec

__all__ = ["Block", "LowerTier", "LowerTiers"]


@dataclass(frozen=True, slots=True)
class Block:
    """What a tier knows of a block: its key, its place in its prompt, its bytes."""

    key: Hashable
    place: int
    nbytes: int


class LowerTier:
    """One tier.

    capacity:      blocks it holds.
    hit_blocks, hit_tokens: found here by the requests, which took them from here.
    read_bytes:    loaded from here; passed_bytes: from slower tiers, through the link of this one.
    written_bytes: written here, blocks that were loaded from slower tiers not counted.
    read_us, write_us: that its link was busy, in each direction.
    evictions, peak: blocks given away; the most it held.
    """

    def __init__(self, spec: TierSpec, capacity: int, read: float, write: float) -> None:
        self.spec: TierSpec = spec
        self.capacity: int = capacity
        self.read_rate: float = read
        self.write_rate: float = write
        self._policy = make_policy(spec.policy, capacity)
        self._blocks: dict[Hashable, tuple[Block, float]] = {}
        self._read_free = self._write_free = 0.0
        self.hit_blocks: int = 0
        self.hit_tokens: int = 0
        self.read_bytes: int = 0
        self.passed_bytes: int = 0
        self.written_bytes: int = 0
        self.read_us: float = 0.0
        self.write_us: float = 0.0
        self.evictions: int = 0
        self.peak: int = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def has(self, key: Hashable, now: float) -> bool:
        """Whether the block is there and written."""
        found = self._blocks.get(key)
        return found is not None and found[1] <= now

    def use(self, key: Hashable) -> None:
        """A request uses the block, if it is here."""
        if key in self._blocks:
            self._policy.use(key)

    def put(self, block: Block, ready: float) -> Block | None:
        """Put in a block that is not here, written at ``ready``; returns the one that goes."""
        gone = None
        self._policy.expect(block.key)
        if len(self._blocks) == self.capacity:
            gone, _ = self._blocks.pop(self._policy.evict())
            self.evictions += 1
        self._policy.add(block.key, block.place)
        self._blocks[block.key] = block, ready
        self.peak = max(self.peak, len(self._blocks))
        return gone

    def load(self, now: float, own: int, passing: int) -> float:
        """Load bytes of its own and let others pass; returns when that is done."""
        self.read_bytes += own
        self.passed_bytes += passing
        us = self.spec.latency_us + (own + passing) / self.read_rate
        self._read_free = max(now, self._read_free) + us
        self.read_us += us
        return self._read_free

    def write(self, nbytes: int, now: float) -> float:
        """Write bytes; returns when they are there."""
        self.written_bytes += nbytes
        us = nbytes / self.write_rate
        self._write_free = max(now, self._write_free) + us
        self.write_us += us
        return self._write_free


class LowerTiers:
    """The tiers below the device, from the fastest on.

    write_back: False: a prompt's blocks are written to every tier once they are computed; True: a
                block goes down when it is given away above.
    """

    def __init__(self, tiers: Sequence[LowerTier], *, write_back: bool) -> None:
        self.tiers: tuple[LowerTier, ...] = tuple(tiers)
        self.write_back: bool = write_back

    def find(self, keys: Sequence[Hashable], start: int, now: float) -> list[int]:
        """Of the keys from place ``start`` on the fastest tier of each, to the first not there."""
        found: list[int] = []
        for place in range(start, len(keys)):
            key = keys[place]
            for number, tier in enumerate(self.tiers):
                if tier.has(key, now):
                    found.append(number)
                    break
            else:
                break
        return found

    def use(self, keys: Sequence[Hashable]) -> None:
        """A request uses these blocks: in every tier that has them, the first of them the last."""
        for tier in self.tiers:
            for key in reversed(keys):
                tier.use(key)

    def load(self, blocks: Sequence[tuple[int, Block]], now: float) -> float:
        """Load blocks, each from the tier of that number; returns when all are there."""
        own = [0] * len(self.tiers)
        for number, block in blocks:
            own[number] += block.nbytes
        done, passing = now, 0
        for number in range(len(self.tiers) - 1, -1, -1):
            if own[number] or passing:
                done = max(done, self.tiers[number].load(now, own[number], passing))
                passing += own[number]
        for number, block in reversed(blocks):
            for above in range(number - 1, -1, -1):
                if block.key not in self.tiers[above]:
                    self._put(above, block, done)
        return done

    def store(self, blocks: Sequence[Block], now: float) -> None:
        """Write a prompt's blocks to every tier that lacks them, the last of them first."""
        for block in reversed(blocks):
            at = now
            for number, tier in enumerate(self.tiers):
                if block.key not in tier:
                    at = tier.write(block.nbytes, at)
                    self._put(number, block, at)

    def give(self, block: Block, now: float, number: int = 0) -> None:
        """A block was given away above that tier: it goes into it, or on down from there."""
        if number == len(self.tiers):
            return
        tier = self.tiers[number]
        if block.key not in tier:
            self._put(number, block, tier.write(block.nbytes, now))

    def _put(self, number: int, block: Block, ready: float) -> None:
        gone = self.tiers[number].put(block, ready)
        if gone is not None and self.write_back:
            self.give(gone, ready, number + 1)
