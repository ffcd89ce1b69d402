# SPDX-License-Identifier: Apache-2.0
"""Which tokens a device pool keeps: the policies by name.

One plan of a policy takes the ids a step wants.  All that are held count as used first, in the
order given; then those that are not held take places, in the order given.

``previous``  what the last step wanted and nothing else; its size is top-k.
``lru``       the least recently wanted gives way.
``fifo``      set-associative: a token hashes to a set of ``ways`` places, where the oldest
              installed gives way.  The set's pointer moves when a token is installed and at no
              other time, so a plan changes nothing about a token that is found.
``arc``       adaptive replacement (Megiddo and Modha, FAST 2003): between the least recently and
              the least often wanted, by what it regrets having given away.

In ``fifo`` and ``arc`` a token that a plan installs may give way to a later one of the same plan;
it is then served and not kept.  A policy's state holds ids and places, never a byte.
"""

from __future__ import annotations

from kvcore._kernels.pool_books import Arc, Books, Fifo, Lru, Previous
from kvcore.errors import fail
from kvcore.offload.checks import check_choice, check_integer

__all__ = ["DEFAULT_WAYS", "POLICIES", "check_books", "make_books"]

POLICIES: tuple[str, ...] = ("previous", "lru", "fifo", "arc")
#: Places a set, as in cann-recipes-infer (models/glm_5_2/models/offload_cache.py).
DEFAULT_WAYS = 16
MAX_CAPACITY = 2**28 - 1
MAX_TOKENS = 2**31 - 1


def make_books(
    policy: str, capacity: int, max_tokens: int, topk: int, ways: int | None = None
) -> Books:
    """The state of a policy for an empty pool.

    capacity:   places, at least ``topk``; exactly that many for ``previous``.
    max_tokens: ids are below it.
    topk:       the most ids of a plan.
    ways:       places a set, of ``fifo`` alone; a divisor of ``capacity`` (default 16).
    Raises ParamInvalidError; DeviceOutOfMemoryError never: the state is host memory.
    """
    sets = check_books(policy, capacity, max_tokens, topk, ways)
    if policy == "fifo":
        return Fifo(capacity, max_tokens, topk, sets)
    return {"previous": Previous, "lru": Lru, "arc": Arc}[policy](capacity, max_tokens, topk)


def check_books(
    policy: str, capacity: int, max_tokens: int, topk: int, ways: int | None = None
) -> int:
    """Check the arguments of `make_books` and make nothing; returns the ways, 0 for none."""
    check_choice("policy", policy, POLICIES)
    check_integer("topk", topk, 1, MAX_CAPACITY)
    check_integer("capacity", capacity, 1, MAX_CAPACITY)
    check_integer("max_tokens", max_tokens, 1, MAX_TOKENS)
    if capacity < topk:
        fail("capacity", f"at least topk ({topk}) places", capacity)
    if policy == "previous" and capacity != topk:
        fail("capacity", f"topk ({topk}) places for the previous selection", capacity)
    if policy != "fifo":
        if ways is not None:
            fail("ways", f"none for {policy}", ways)
        return 0
    if ways is None:
        # A pool that 16 does not divide is made of smaller sets rather than refused.
        ways = next(w for w in range(DEFAULT_WAYS, 0, -1) if capacity % w == 0)
    check_integer("ways", ways, 1, capacity)
    if capacity % ways:
        fail("ways", f"a divisor of capacity ({capacity})", ways)
    return ways
