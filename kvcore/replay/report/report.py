# SPDX-License-Identifier: Apache-2.0
"""What the reports of every replay have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvcore.replay.serving.scheduler import Counters

__all__ = ["Mismatch", "Outcome", "Report"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A row with wrong bytes: its request and token, and where it lies."""

    request: int
    position: int
    layer: int
    lane: str
    block: int
    row: int

    def __str__(self) -> str:
        return (
            f"request {self.request}, token {self.position}, layer {self.layer}, {self.lane}: "
            f"block {self.block} row {self.row} does not hold what was written"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a replay, of whatever strategy.

    copied_bytes:     bytes copied because a shared block was written (copy on write).
    verified_samples: a sample is a token in one layer, both lanes; each wrong lane is a mismatch.
    interrupted:      whether it was stopped before all requests had left.
    """

    total_requests: int
    finished_requests: int
    aborted_requests: int
    total_tokens: int
    counters: Counters
    copied_bytes: int
    verified_samples: int
    mismatches: tuple[Mismatch, ...]
    interrupted: bool

    def fields(self) -> dict[str, Any]:
        """The fields of an outcome by name, for the report that takes them over."""
        return {field.name: getattr(self, field.name) for field in fields(Outcome)}

    @property
    def ok(self) -> bool:
        """True when every sample held what was written."""
        return not self.mismatches

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of the prompt tokens that were found in the cache; None before any."""
        counters = self.counters
        if not counters.prompt_tokens:
            return None
        return counters.prefix_hit_tokens / counters.prompt_tokens

    @property
    def verdict(self) -> str:
        """The result of the samples, as a sentence."""
        if not self.verified_samples:
            return "nothing"
        found = "all right" if self.ok else f"{len(self.mismatches):,} ROWS WRONG"
        return f"{self.verified_samples:,} samples, {found}"

    def verified_dict(self) -> dict[str, Any]:
        """Samples and mismatches, of types that JSON has."""
        return {
            "samples": self.verified_samples,
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Outcome, ABC):
    """The figures of a replay: its outcome, and what the strategy adds."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The title of the table."""

    @abstractmethod
    def table(self, source: str) -> list[tuple[str, str]]:
        """The table's rows, as names and values; ``source`` says where the trace is from."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything, of types that JSON has."""
