# SPDX-License-Identifier: Apache-2.0
"""One call of a vendor's operator, from its arguments to its end.

A call may run at once or much later: in a graph at each replay, or behind an event.  What it reads
of memory it reads when it runs.  So besides a plan a call holds what has to be done first: copies
that an operator works on instead of its arguments, and a choice that depends on contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvcore._core.arrays import read
from kvcore._core.overlap import Access, merge
from kvcore.strides import coalesce

__all__ = ["Call", "Choice", "PrivateCopy", "as_tensor", "ranges_of"]


class PrivateCopy(NamedTuple):
    """A tensor that is filled with another's content when the call runs."""

    into: Tensor
    source: Tensor
    name: str


class Choice(Protocol):
    """Which plan a call runs depends on contents."""

    def plan(self) -> Any:
        """The plan that the contents ask for now."""

    def prepare(self) -> None:
        """Make every plan there is, since plan() may be called in another thread or later."""


@dataclass(slots=True)
class Call:
    """One call, ready to run.

    plan: what moves the bytes, and once the call began the plan that was chosen.  returned: what
    the operator returns, filled by the run.  into: a tensor that takes what the plan's run
    returns, or None.  copies: made before the plan runs.  choice: what chooses the plan, or None.
    """

    plan: Any
    returned: Any = None
    into: Tensor | None = None
    copies: tuple[PrivateCopy, ...] = ()
    choice: Choice | None = None

    def begin(self) -> Any:
        """Read what has to be read before the plan runs; the plan."""
        for copy in self.copies:
            copy.into.copy_(copy.source)
        if self.choice is not None:
            self.plan = self.choice.plan()
        return self.plan

    def deliver(self, result: Any) -> Any:
        """Put what the plan's run returned where the caller has it; what the operator returns."""
        if self.into is not None and result is not None:
            self.into.copy_(as_tensor(result))
        return self.returned

    def run(self) -> Any:
        """The whole call, now; what the operator returns."""
        return self.deliver(self.begin().run())

    @property
    def bytes_moved(self) -> int:
        """The plan's, and those of the copies."""
        moved: int = self.plan.bytes_moved
        for copy in self.copies:
            moved += copy.source.nbytes
        return moved

    @property
    def num_descriptors(self) -> int:
        """The plan's, and one for each copy."""
        pieces: int = self.plan.num_descriptors
        return pieces + len(self.copies)

    def touched(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(reads, writes) of the last run."""
        reads, writes = self.plan.touched()
        if self.copies:
            reads += tuple(Access(c.name, c.source, ranges_of(c.source)) for c in self.copies)
            writes += tuple(Access(c.name, c.into, ranges_of(c.into)) for c in self.copies)
        return reads, writes


def as_tensor(result: Any) -> Tensor:
    """What a run returned as a tensor: a backend with memory of its own may return one already."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, np.ndarray):
        return torch.from_numpy(result)
    return torch.from_dlpack(result)


def ranges_of(tensor: Tensor) -> Any:
    """int64 [n, 2]: the addresses [start, end) of the tensor's bytes, ascending and merged."""
    info = read(tensor)
    if 0 in info.shape:
        return np.empty((0, 2), np.int64)
    axes, piece = coalesce(zip(info.shape, info.strides, strict=True), info.itemsize)
    starts = np.array([info.address], np.int64)
    for count, step in axes:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return merge(starts, piece)
