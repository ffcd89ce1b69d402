# SPDX-License-Identifier: Apache-2.0
"""What a decode step tells: per request and group, and in all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvcore.errors import StreamError

__all__ = [
    "DecodeFailed", "DecodeStatistics", "DecodeTotals", "Moved", "RequestStep", "StepResult",
    "decode_failed",
]  # fmt: skip


class DecodeFailed(StreamError):
    """An operation of the engine failed: its requests are out, and nothing runs any more.

    lost: how many leading tokens of each request the host has for certain.
    """

    lost: Mapping[Hashable, int]


def decode_failed(lost: Mapping[Hashable, int], cause: BaseException) -> DecodeFailed:
    """The error for requests that are out, from the first cause."""
    error = DecodeFailed(
        f"engine: expected every operation to run, got {cause}; its requests are out",
        argument="engine",
        seen=str(cause),
    )
    error.lost = dict(lost)
    error.__cause__ = cause
    return error


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request's part of a step.

    outcome: "stepped", or "exhausted": its block table has no block for its next token (or it has
             reached the engine's most tokens); nothing of it was written or served.
    first, tokens: positions [first, first + tokens) were written; fewer drafts than asked for
             when there was no room for all.
    hits, misses, recent: rows a group: held by the pool, read from the host, and served from the
             device rows of the newest tokens (neither of both).
    """

    outcome: Literal["stepped", "exhausted"]
    first: int
    tokens: int
    hits: tuple[int, ...]
    misses: tuple[int, ...]
    recent: tuple[int, ...]


class Moved(NamedTuple):
    """What the layers of one step move: rows, and bytes to and from the device."""

    hits: int
    misses: int
    recent: int
    hit_bytes: int
    h2d_bytes: int
    d2h_bytes: int

    @property
    def rows(self) -> int:
        """Rows of all selections."""
        return self.hits + self.misses + self.recent


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step.

    start_us, end_us: of the computing stream, on the device's clock.
    hits, misses, recent: rows, summed over requests, groups and the layers of each group.
    hit_bytes, h2d_bytes, d2h_bytes: of hits, of misses, of rows sent to the host.
    rows:   of the selections in all layers: hits, misses and recent.
    Layers that are not in ``full`` have none.
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
    exhausted: int = 0
    cut_drafts: int = 0
    preempted: int = 0
    evicted: int = 0
    aborted: int = 0
    failed: int = 0

    def add(self, moved: Moved) -> None:
        """Add what a step moves."""
        self.hits += moved.hits
        self.misses += moved.misses
        self.recent += moved.recent
        self.hit_bytes += moved.hit_bytes
        self.h2d_bytes += moved.h2d_bytes
        self.d2h_bytes += moved.d2h_bytes
        self.rows += moved.rows


@dataclass(frozen=True, slots=True)
class DecodeStatistics:
    """What `DecodeEngine.statistics` returns: the engine at one moment, and its sums until then.

    max_batch:    places of the batch; free_places: those that no request has.
    requests:     that have a place, those that are leaving included; leaving: of them.
    open_steps:   launched, and not yet seen to end by a wait.
    closed:       whether the engine was closed and has given its memory back.
    The other fields are those of `DecodeTotals`.
    """

    max_batch: int
    free_places: int
    requests: int
    leaving: int
    open_steps: int
    closed: bool
    steps: int
    tokens: int
    accepted: int
    hits: int
    misses: int
    recent: int
    hit_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    rows: int
    exhausted: int
    cut_drafts: int
    preempted: int
    evicted: int
    aborted: int
    failed: int
