# SPDX-License-Identifier: Apache-2.0
"""The state of one request in the decode engine: what is accepted, where its newest rows are.

Positions of a request, in order::

    0 .......... clean ........ context ........ end
    |  on host   |  on the device only           |
                       |  accepted   |  written, not (yet) accepted
    window ..................................... end : in the ring on the device

``clean <= context`` between steps; rows from ``window`` on are in the ring, position p in row
``p % rows``.  The ring is served before the pool and before the host, so a row that may still be
rejected or rewritten is never held by the pool.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.checks import read_indices

if TYPE_CHECKING:
    from kvcore.offload.rows.device_pool import DevicePool

__all__ = ["DecodeRequest"]


class DecodeRequest:
    """One request.

    place:     its place of the rings and pools; -1 once it has given it back.
    table:     the block table, shared: what its owner writes there is seen.
    pools:     its pool for each group that has rows, by group index.
    confirmed: leading tokens the host has for certain (``clean``: copies launched).
    leaving:   it is out of the batch, and operations may still use its place.
    last:      when nobody waits for those: marks behind them, one a stream.
    epoch:     grows when positions that were clean are rolled back.
    """

    __slots__ = (
        "_table",
        "aborted",
        "clean",
        "confirmed",
        "context",
        "end",
        "epoch",
        "failed",
        "last",
        "leaving",
        "name",
        "place",
        "pools",
        "window",
    )  # fmt: skip
    aborted: bool
    clean: int
    confirmed: int
    context: int
    end: int
    leaving: bool
    name: Hashable
    place: int
    pools: dict[int, DevicePool]
    window: int

    def __init__(
        self,
        name: Hashable,
        table: Any,
        context: int,
        place: int,
        pools: dict[int, DevicePool],
    ) -> None:
        self.name, self.place, self.pools = name, place, pools
        self._table = table
        self.context = self.end = self.clean = self.confirmed = self.window = context
        self.epoch: int = 0
        self.aborted = self.leaving = False
        self.last: Sequence[Any] = ()
        self.failed: BaseException | None = None

    @property
    def table(self) -> NDArray[Any]:
        """int32 or int64 [columns], as it is now: other packages' arrays can move or grow."""
        return read_indices("table", self._table)

    def room(self, want: int, block_size: int, num_blocks: int, max_tokens: int) -> int:
        """How many of ``want`` tokens from ``context`` on have a block, up to max_tokens.

        Raises ParamInvalidError for a block that the full cache does not have.
        """
        want = max(0, min(want, max_tokens - self.context))
        first, last = self.context // block_size, (self.context + want - 1) // block_size
        table = self.table
        for column in range(first, last + 1):
            block = int(table[column]) if column < len(table) else -1
            if block >= num_blocks:
                fail(f"table[{column}]", f"a block below {num_blocks}", block)
            if block < 0:
                return max(0, column * block_size - self.context)
        return want

    def host_rows(
        self, first: int, end: int, block_size: int, num_blocks: int
    ) -> NDArray[np.int64]:
        """Rows of the full cache of positions [first, end).

        Raises ParamInvalidError when one has no block: its row would be lost.
        """
        positions = np.arange(first, end)
        columns, rows = np.divmod(positions, block_size)
        table = self.table
        if first < end and columns[-1] >= len(table):
            fail("table", f"a block for token {end - 1}", f"{len(table)} columns")
        blocks = table[columns].astype(np.int64)
        bad = np.flatnonzero((blocks < 0) | (blocks >= num_blocks))
        if len(bad):
            column = int(columns[bad[0]])
            expected = f"a block below {num_blocks} for token {int(positions[bad[0]])}"
            fail(f"table[{column}]", expected, int(table[column]))
        return blocks * block_size + rows

    # -- changes --------------------------------------------------------------------------

    def wrote(self, tokens: int, rows: int) -> None:
        """A step has written ``tokens`` positions from ``context`` on into a ring of ``rows``."""
        self.end = self.context + tokens
        self.window = max(self.window, self.end - rows)

    def accept(self, tokens: int) -> None:
        """Of the written positions the first ``tokens`` stand."""
        self.context += tokens
        self.forget_tail()

    def forget_tail(self) -> None:
        """What was written and never accepted counts as not written."""
        self.end = self.context
        self.clean = min(self.clean, self.context)

    def roll_back(self, position: int) -> None:
        """Positions from ``position`` on are no more."""
        self.context = min(self.context, position)
        self.forget_tail()
        self.window = min(self.window, self.context)
        self.confirmed = min(self.confirmed, self.context)
        self.epoch += 1

    def confirm(self, clean: int, epoch: int) -> None:
        """The copies launched when ``clean`` was that are over: done, if nothing says otherwise.

        Of a request that was aborted those that had not begun did not run, and after a failure
        nobody knows.
        """
        if epoch == self.epoch and not self.aborted and self.failed is None:
            self.confirmed = max(self.confirmed, min(clean, self.clean, self.context))
