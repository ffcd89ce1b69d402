# SPDX-License-Identifier: Apache-2.0
"""The figures of a replay, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvcore.replay.models.profile import ModelShape
from kvcore.replay.serving.scheduler import Counters

__all__ = ["Mismatch", "ReplayReport", "Timings"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A row that does not hold what it must: whose, which token, and where it lies."""

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


@dataclass(slots=True)
class Timings:
    """Nanoseconds: scheduling and slots, making bytes, the operator, checking, and in all."""

    schedule_ns: int = 0
    generate_ns: int = 0
    scatter_ns: int = 0
    verify_ns: int = 0
    elapsed_ns: int = 0


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay did.

    written_tokens, written_bytes: given to the operator, recomputed tokens included;
    copied_bytes: by copy on write, beside them.  A verified sample is one token in one layer,
    both lanes; each lane that is wrong is a mismatch.
    """

    shape: ModelShape
    layout: str
    block_size: int
    cache_bytes: int
    total_requests: int
    finished_requests: int
    total_tokens: int
    counters: Counters
    pool_capacity: int
    pool_used: int
    pool_peak_used: int
    pool_evictions: int
    copied_bytes: int
    verified_samples: int
    mismatches: tuple[Mismatch, ...]
    times: Timings
    interrupted: bool

    @property
    def written_tokens(self) -> int:
        """Tokens given to the operator."""
        counters = self.counters
        return counters.prefill_tokens + counters.decode_tokens + counters.recomputed_tokens

    @property
    def written_bytes(self) -> int:
        """Bytes given to the operator, all layers and lanes."""
        return self.written_tokens * self.shape.token_bytes

    @property
    def scatter_gb_per_s(self) -> float | None:
        """Bytes written by time in the operator, in 10**9 bytes a second; None before any."""
        nanoseconds = self.times.scatter_ns
        return self.written_bytes / nanoseconds if nanoseconds else None

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of the prompt tokens that were found in the cache; None before any."""
        counters = self.counters
        if not counters.prompt_tokens:
            return None
        return counters.prefix_hit_tokens / counters.prompt_tokens

    @property
    def ok(self) -> bool:
        """True when every sample held what was written."""
        return not self.mismatches

    def to_dict(self) -> dict[str, Any]:
        """Everything, of types that JSON has; times in seconds."""
        return {
            "model": {**asdict(self.shape), "token_bytes": self.shape.token_bytes},
            "cache": {
                "layout": self.layout,
                "block_size": self.block_size,
                "num_blocks": self.pool_capacity,
                "bytes": self.cache_bytes,
            },
            "requests": {"total": self.total_requests, "finished": self.finished_requests},
            "tokens": {
                "total": self.total_tokens,
                "written": self.written_tokens,
                "prefill": self.counters.prefill_tokens,
                "decode": self.counters.decode_tokens,
                "recomputed": self.counters.recomputed_tokens,
                "recovered": self.counters.recovered_tokens,
            },
            "bytes": {"written": self.written_bytes, "copied": self.copied_bytes},
            "prefix": {
                "prompt_tokens": self.counters.prompt_tokens,
                "hit_tokens": self.counters.prefix_hit_tokens,
                "hit_rate": self.prefix_hit_rate,
            },
            "steps": self.counters.steps,
            "preemptions": self.counters.preemptions,
            "copy_on_write_blocks": self.counters.copies,
            "pool": {
                "capacity": self.pool_capacity,
                "used": self.pool_used,
                "peak_used": self.pool_peak_used,
                "evictions": self.pool_evictions,
            },
            "seconds": {
                name.removesuffix("_ns"): value / 1e9 for name, value in asdict(self.times).items()
            },
            "scatter_gb_per_s": self.scatter_gb_per_s,
            "verified": {
                "samples": self.verified_samples,
                "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
            },
            "interrupted": self.interrupted,
        }
