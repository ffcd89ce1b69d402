# SPDX-License-Identifier: Apache-2.0
"""What a decode step tells: per request and group, and in all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvcore.errors import StreamError

__all__ = ["DecodeFailed", "DecodeTotals", "RequestStep", "StepResult"]


class DecodeFailed(StreamError):
    """An operation of the engine failed: its requests are out, and nothing runs any more.

    lost: how many leading tokens of each request the host has for certain.
    """

    lost: Mapping[Hashable, int]


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request's part of a step.

    outcome: "stepped", or "exhausted": its block table has no block for its next token (or it has
             reached the engine's most tokens); nothing of it was written or served.
    first, tokens: positions [first, first + tokens) were written; fewer drafts than asked for
             when there was no room for all.
    real:    its rows were moved, not only accounted.
    hits, misses, recent: rows a group: held by the pool, read from the host, and served from the
             device rows of the newest tokens (neither of both).
    """

    outcome: Literal["stepped", "exhausted"]
    first: int
    tokens: int
    real: bool
    hits: tuple[int, ...]
    misses: tuple[int, ...]
    recent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step.

    start_us, end_us: of the computing stream, on the device's clock.
    hits, misses, recent: rows, summed over requests, groups and the layers of each group.
    hit_bytes, h2d_bytes, d2h_bytes: of hits, of misses, of rows sent to the host.
    rows, real_rows: rows of the selections in all layers, and those that were really moved.
    """

    number: int
    start_us: float
    end_us: float
    requests: Mapping[Hashable, RequestStep]
    hits: int
    misses: int
    recent: int
    hit_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    rows: int
    real_rows: int

    @property
    def us(self) -> float:
        """Microseconds the step took on the computing stream."""
        return self.end_us - self.start_us


@dataclass(slots=True)
class DecodeTotals:
    """Sums over all steps launched; rows and bytes as in `StepResult`, flushes included.

    tokens:      written; accepted: of them, so far.
    exhausted:   times a request could not go on for want of a block; cut_drafts: drafts not made
                 for want of room.
    preempted, evicted, aborted, failed: requests that left.
    """

    steps: int = 0
    tokens: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    recent: int = 0
    hit_bytes: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    rows: int = 0
    real_rows: int = 0
    exhausted: int = 0
    cut_drafts: int = 0
    preempted: int = 0
    evicted: int = 0
    aborted: int = 0
    failed: int = 0
