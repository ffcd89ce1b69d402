# SPDX-License-Identifier: Apache-2.0
"""When the rows of new tokens go to the full cache on the host.

New rows are written into a ring of a request's own on the device (`moves.Ring`).  A policy
says, behind each step, up to which position they must be on the host:

``write_through``  all of them, the step's drafts too: the host is never behind, each row goes
                   alone, and a draft that is rejected has gone for nothing.
``write_back``     none until the next step would not find room in the ring; then all that are
                   accepted, as a few long pieces.  Rows leave too when they are asked for
                   (``flush``), when a request is preempted or has finished.
"""

from __future__ import annotations

from typing import Protocol

from kvcore.offload.checks import check_choice

__all__ = ["WRITE_POLICIES", "WriteBack", "WritePolicy", "WriteThrough", "make_write_policy"]


class WritePolicy(Protocol):
    """What the engine asks."""

    name: str

    def rows_needed(self, most: int) -> int:
        """The smallest ring, when a step writes at most ``most`` tokens a request."""

    def default_rows(self, most: int) -> int:
        """The ring's rows where the caller does not say."""

    def due(self, clean: int, accepted: int, end: int, rows: int, most: int) -> int:
        """The position before which rows must be sent to the host now; ``clean`` for none.

        clean:    positions below are there already.
        accepted: positions below were accepted; those up to ``end`` were just written.
        rows:     of the ring; most: tokens of a step.
        """

    def pieces(self, tokens: int, requests: int) -> float:
        """Contiguous pieces in which the rows of a step leave, for an estimate of their cost.

        tokens: that a step writes; requests: that write them.
        """


class WriteThrough:
    """Every row at once."""

    name = "write_through"

    def rows_needed(self, most: int) -> int:
        """One step's."""
        return most

    def default_rows(self, most: int) -> int:
        """Two steps': what was just accepted is served from the ring, not read back."""
        return 2 * most

    def due(self, clean: int, accepted: int, end: int, rows: int, most: int) -> int:
        """All that there is."""
        return end

    def pieces(self, tokens: int, requests: int) -> float:
        """One a request: its rows of the step are neighbours."""
        return requests


class WriteBack:
    """Rows stay until the ring has no room for another step."""

    name = "write_back"
    #: Rows that leave together, as an estimate has it.
    ROWS_TOGETHER = 100

    def rows_needed(self, most: int) -> int:
        """One step's that may be rejected, and room for the next."""
        return 2 * most

    def default_rows(self, most: int) -> int:
        """So that some hundred rows leave together."""
        return max(128, 2 * most)

    def pieces(self, tokens: int, requests: int) -> float:
        """On average over many steps: the same rows in the end, a hundred at a time."""
        return max(1.0, tokens / self.ROWS_TOGETHER)

    def due(self, clean: int, accepted: int, end: int, rows: int, most: int) -> int:
        """What was accepted, when the next step would overwrite the oldest that is not clean."""
        return accepted if end + most - clean > rows else clean


WRITE_POLICIES: tuple[str, ...] = (WriteThrough.name, WriteBack.name)


def make_write_policy(name: str) -> WritePolicy:
    """The policy of that name.  Raises ParamInvalidError with the list."""
    check_choice("write_policy", name, WRITE_POLICIES)
    return WriteThrough() if name == WriteThrough.name else WriteBack()
