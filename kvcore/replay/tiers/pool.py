# SPDX-License-Identifier: Apache-2.0
"""The blocks of device memory, when more than their last release decides which goes first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from kvcore.offload.blocks.pool import BlockPool
from kvcore.replay.tiers.policies import Policy

__all__ = ["LAST_PLACE", "TierPool"]

#: Of a block whose place nobody said: it was generated, after the prompt.
LAST_PLACE = 2**31
#: Called with the keys of a cached block that goes, and how many of its tokens each describes.
Evicted = Callable[[Mapping[Hashable, int]], None]


class TierPool(BlockPool):
    """A `BlockPool` with a policy of its own for the blocks that nobody holds.

    policy:  in what order they go; it knows a block by its first key.
    keeps:   whether blocks stay when nobody holds them.
    evicted: called with the keys of a block that is about to go; None: nobody asks.
    places:  key -> place in its prompt, for the policy; after all others where it is not said.
    """

    def __init__(
        self,
        capacity: int,
        policy: Policy,
        *,
        keeps: bool = True,
        evicted: Evicted | None = None,
    ) -> None:
        super().__init__(capacity)
        self._policy = policy
        self._keeps = keeps
        self._tell = evicted
        self._name: dict[int, Hashable] = {}  # block -> the key by which the policy knows it
        self._block_named: dict[Hashable, int] = {}
        self.places: dict[Hashable, int] = {}

    def match(self, keys: Iterable[Hashable]) -> list[int]:
        """The blocks of the longest run of known keys, from the first; changes nothing."""
        return super().match(keys) if self._keeps else []

    def knows(self, key: Hashable) -> bool:
        """Whether a block of that key is here, held or not."""
        return key in self._block_of

    def allocate(self, num_blocks: int = 1) -> list[int] | None:
        """As `BlockPool.allocate`; cached blocks go in the policy's order."""
        if type(num_blocks) is int and num_blocks <= self.free:
            going = [self._evict() for _ in range(num_blocks - len(self._clean))]
            for block in reversed(going):
                self._cached.move_to_end(block, last=False)
        return super().allocate(num_blocks)

    def _evict(self) -> int:
        name = self._policy.evict()
        block = self._block_named.pop(name)
        del self._name[block]
        if self._tell is not None:
            self._tell(self._keys_of[block])
        self.places.pop(name, None)
        return block

    def acquire(self, blocks: Sequence[int]) -> None:
        """As `BlockPool.acquire`; to the policy it is a use of each, the first one the last."""
        blocks = list(blocks)
        cached = [block for block in blocks if block in self._cached]
        super().acquire(blocks)
        for block in cached:
            self._policy.hold(self._name[block])
        for block in reversed(blocks):
            if block in self._name:
                self._policy.use(self._name[block])

    def release(self, blocks: Sequence[int]) -> None:
        """As `BlockPool.release`."""
        blocks = list(blocks)
        super().release(blocks)
        for block in blocks:
            if block in self._cached:
                self._policy.free(self._name[block])

    def register(self, block: int, key: Hashable, filled: int) -> bool:
        """As `BlockPool.register`; False, too, where blocks are not kept."""
        if not self._keeps or not super().register(block, key, filled):
            return False
        if block not in self._name:
            self._add(block, key)
        return True

    def prepare_write(self, block: int, row: int) -> bool:
        """As `BlockPool.prepare_write`."""
        good = super().prepare_write(block, row)
        name = self._name.get(block)
        if name is not None and name not in self._keys_of.get(block, ()):
            self._policy.drop(name)
            del self._name[block], self._block_named[name]
            for key in self._keys_of.get(block, ()):
                self._add(block, key)
                break
        return good

    def _add(self, block: int, key: Hashable) -> None:
        self._name[block] = key
        self._block_named[key] = block
        self._policy.expect(key)
        self._policy.add(key, self.places.get(key, LAST_PLACE))
        self._policy.hold(key)
