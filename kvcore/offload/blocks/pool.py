# SPDX-License-Identifier: Apache-2.0
"""Which request holds which block of a paged cache, and what each block holds.

The pool never sees a byte.  A block is in one of three states:

- *held*: referenced by one or more owners;
- *cached*: referenced by nobody, its content still known by one or more keys, and so taken
  again by a request for that content; the least recently released is given away first;
- *clean*: neither; given away before any cached block.

``used`` counts held blocks and ``free`` the others, so ``used + free == capacity`` at any time.
Running out is a value (``allocate`` returns None): the pool never waits and never takes a block
from an owner; who must give way is the scheduler's affair.  Every call checks all it was given
before it changes anything.

A key says: "the first ``filled`` tokens of this block are those".  One block may have several,
since a block whose first 60 tokens end one prompt goes on to be filled with what is generated.
Keys make a block findable; they do not make it read-only.  What does is a second owner:
`prepare_write` refuses a block held twice (copy it first), and drops the keys that the write
makes untrue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from kvcore.errors import fail
from kvcore.offload.checks import check_identity, check_integer, each_key, each_of

__all__ = ["BlockPool"]


class BlockPool:
    """``capacity`` blocks, numbered from 0; all clean at first."""

    def __init__(self, capacity: int) -> None:
        check_integer("capacity", capacity, 1)
        self._references = [0] * capacity
        self._clean = list(range(capacity - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[Hashable, int] = {}
        self._keys_of: dict[int, dict[Hashable, int]] = {}
        self._peak_used = 0
        self._evictions = 0

    # -- what it says ---------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of blocks, used and free together."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return len(self._clean) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks held by at least one owner."""
        return self.capacity - self.free

    @property
    def cached(self) -> int:
        """Blocks that no request holds and whose content can still be met again."""
        return len(self._cached)

    @property
    def peak_used(self) -> int:
        """The most blocks that were held at one time."""
        return self._peak_used

    @property
    def evictions(self) -> int:
        """Cached blocks that were given away, their content forgotten."""
        return self._evictions

    def references(self, block: int) -> int:
        """How many owners hold the block."""
        return self._references[self._checked(block)]

    def keys(self, block: int) -> dict[Hashable, int]:
        """The block's keys, and how many of its tokens each describes; a copy."""
        return dict(self._keys_of.get(self._checked(block), {}))

    def match(self, keys: Iterable[Hashable]) -> list[int]:
        """The blocks of the longest run of known keys, from the first; changes nothing."""
        found: list[int] = []
        for key in each_key("keys", keys):
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    # -- taking and giving back -----------------------------------------------------------

    def allocate(self, num_blocks: int = 1) -> list[int] | None:
        """``num_blocks`` blocks of no content, held once each; None when fewer are free.

        Clean blocks go first, then cached ones, the least recently released first.
        """
        check_integer("num_blocks", num_blocks, 0)
        if num_blocks > self.free:
            return None
        taken: list[int] = []
        for _ in range(num_blocks):
            if self._clean:
                block = self._clean.pop()
            else:
                block, _nothing = self._cached.popitem(last=False)
                self._evictions += 1
                for key in self._keys_of.pop(block):
                    del self._block_of[key]
            self._references[block] = 1
            taken.append(block)
        self._peak_used = max(self._peak_used, self.used)
        return taken

    def acquire(self, blocks: Sequence[int]) -> None:
        """Hold each of these blocks once more; they are held or cached (see `match`)."""
        blocks = self._checked_once_each(blocks)
        for place, block in enumerate(blocks):
            if not self._references[block] and block not in self._cached:
                fail(f"blocks[{place}]", "a block that is held or cached", f"clean block {block}")
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        self._peak_used = max(self._peak_used, self.used)

    def release(self, blocks: Sequence[int]) -> None:
        """Give each of these blocks back once.

        The last owner's release makes a block cached when it has keys and clean when not.
        Blocks named first are given away first: pass a request's blocks from its end.
        """
        blocks = self._checked_once_each(blocks)
        for place, block in enumerate(blocks):
            if not self._references[block]:
                fail(f"blocks[{place}]", "a block that is held", f"free block {block}")
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._keys_of:
                self._cached[block] = None
            else:
                self._clean.append(block)

    # -- what the blocks hold -------------------------------------------------------------

    def register(self, block: int, key: Hashable, filled: int) -> bool:
        """Note that the first ``filled`` tokens of a held block are what ``key`` stands for.

        Returns False, and changes nothing, when the key is known already (two requests
        computed the same block at the same time: the first one keeps the key).
        """
        if not self._references[self._checked(block)]:
            fail("block", "a block that is held", f"free block {block}")
        check_integer("filled", filled, 1)
        check_identity("key", key)
        if key in self._block_of:
            return False
        self._block_of[key] = block
        self._keys_of.setdefault(block, {})[key] = filled
        return True

    def prepare_write(self, block: int, row: int) -> bool:
        """Ask to write token ``row`` of a held block and those behind it.

        Returns False, and changes nothing, when the block is shared: copy it and write there.
        Else the keys that describe ``row`` or a later token are dropped, and it returns True.
        """
        owners = self._references[self._checked(block)]
        if not owners:
            fail("block", "a block that is held", f"free block {block}")
        check_integer("row", row, 0)
        if owners > 1:
            return False
        keys = self._keys_of.get(block)
        if keys is not None:
            for key in [key for key, filled in keys.items() if filled > row]:
                del keys[key], self._block_of[key]
            if not keys:
                del self._keys_of[block]
        return True

    # -- checks ---------------------------------------------------------------------------

    def _checked(self, block: object, argument: str = "block") -> int:
        # To a list, a negative index is a block too, and so is True.
        if type(block) is not int or not 0 <= block < len(self._references):
            fail(argument, f"a block from 0 to {self.capacity - 1}", repr(block))
        return block

    def _checked_once_each(self, blocks: Sequence[int]) -> list[int]:
        blocks = list(each_of("blocks", blocks))
        for place, block in enumerate(blocks):
            self._checked(block, f"blocks[{place}]")
        if len(set(blocks)) != len(blocks):
            fail("blocks", "each block once", blocks)
        return blocks
