# SPDX-License-Identifier: Apache-2.0
"""Who writes which block of the full caches: no two requests, and no row that stands.

A decode step writes the positions behind a request's accepted tokens.  Their blocks must be the
request's own: a block that two tables name may be read through both, and written through neither
before it was copied.  Two requests that write one block in a step, or a write over a row that
another request (or the same one, through another column) counts among its accepted tokens, would
serve one request the other's rows, so both are refused before anything is launched.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail

__all__ = ["BlockWriters"]


class Holder(Protocol):
    """What is asked of a request."""

    name: Hashable
    context: int

    @property
    def table(self) -> NDArray[np.integer]:
        """Blocks by column."""


class _Write(NamedTuple):
    """Rows [first, end) of the block that is in this column of the request's table."""

    request: Holder
    column: int
    first: int
    end: int


class BlockWriters:
    """Checks steps over full caches of ``num_blocks`` blocks of ``block_size`` rows."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._size = block_size
        # 1 for the blocks that are written by the step under check; 0 between checks.
        self._written = np.zeros(num_blocks, np.uint8)

    def check(self, steps: Sequence[tuple[Holder, int]], admitted: Iterable[Holder]) -> None:
        """Look at one step.

        steps:    requests and how many positions each writes, from its ``context`` on; all have
                  blocks of the full caches.
        admitted: requests whose accepted rows must stay what they are.
        Raises ParamInvalidError naming the column of the writer's table.
        """
        writes: dict[int, _Write] = {}
        for request, tokens in steps:
            self._collect(writes, request, tokens)
        if not writes:
            return
        marked = np.fromiter(writes, np.int64, len(writes))
        self._written[marked] = 1
        try:
            for holder in admitted:
                self._check_rows(writes, holder)
        finally:
            self._written[marked] = 0

    def _collect(self, writes: dict[int, _Write], request: Holder, tokens: int) -> None:
        table, size = request.table, self._size
        position, end = request.context, request.context + tokens
        while position < end:
            column, first = divmod(position, size)
            rows = min(size - first, end - position)
            block = int(table[column])
            other = writes.get(block)
            if other is not None:
                who = "itself" if other.request is request else f"request {other.request.name!r}"
                at = f"in column {other.column}"
                fail(
                    f"table[{column}]",
                    f"a block that only request {request.name!r} writes in the step, and once",
                    f"block {block}, which {who} writes too, {at}",
                )
            writes[block] = _Write(request, column, first, first + rows)
            position += rows

    def _check_rows(self, writes: dict[int, _Write], holder: Holder) -> None:
        """Raise when a row is written that is one of the holder's accepted ones."""
        size = self._size
        blocks = holder.table[: -(-holder.context // size)]
        # (what a table names outside of the caches is refused where it is used)
        met = np.flatnonzero(self._written.take(blocks, mode="clip"))
        for column in met.tolist():
            block = int(blocks[column])
            write = writes.get(block)
            if write is None or (write.request is holder and write.column == column):
                continue
            if write.first < min(size, holder.context - column * size):
                fail(
                    f"table[{write.column}]",
                    f"a block whose row {write.first} request {write.request.name!r} may write",
                    f"block {block}, where it is token {column * size + write.first} of request"
                    f" {holder.name!r}",
                )
