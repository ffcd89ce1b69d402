# SPDX-License-Identifier: Apache-2.0
"""The figures of a replay into real caches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvcore.replay.models.profile import ModelShape
from kvcore.replay.report.report import Report
from kvcore.replay.serving.strategy import Timings

__all__ = ["ReplayReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport(Report):
    """What a replay into real caches did.

    written_tokens, written_bytes: passed to the operator, recomputed tokens included;
    copied_bytes: copied on write, not part of written_bytes.
    """

    shape: ModelShape
    layout: str
    block_size: int
    cache_bytes: int
    pool_capacity: int
    pool_used: int
    pool_peak_used: int
    pool_evictions: int
    times: Timings

    @property
    def written_tokens(self) -> int:
        """Tokens passed to the operator."""
        counters = self.counters
        return counters.prefill_tokens + counters.decode_tokens + counters.recomputed_tokens

    @property
    def written_bytes(self) -> int:
        """Bytes passed to the operator, of all layers and lanes."""
        return self.written_tokens * self.shape.token_bytes

    @property
    def scatter_gb_per_s(self) -> float | None:
        """Bytes written by time in the operator, in 10**9 bytes a second; None before any."""
        nanoseconds = self.times.scatter_ns
        return self.written_bytes / nanoseconds if nanoseconds else None

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
            "verified": self.verified_dict(),
            "interrupted": self.interrupted,
        }

    @property
    def title(self) -> str:
        """The title of the table."""
        return "kvcore replay"

    def table(self, source: str) -> list[tuple[str, str]]:
        """The table's rows, as names and values; ``source`` says where the trace is from."""
        counters, times, shape = self.counters, self.times, self.shape
        speed, rate = self.scatter_gb_per_s, self.prefix_hit_rate
        seconds = {
            "scatter": times.scatter_ns,
            "making bytes": times.generate_ns,
            "scheduling": times.schedule_ns,
            "verifying": times.verify_ns,
        }
        return [
            ("trace", source),
            (
                "model",
                f"{shape.name}: {shape.num_layers} layers, {shape.num_heads} heads of"
                f" {shape.head_size} + {shape.value_head_size} {shape.dtype},"
                f" {shape.token_bytes:,} bytes a token",
            ),
            (
                "cache",
                f"{self.pool_capacity:,} blocks of {self.block_size} tokens, {self.layout},"
                f" {self.cache_bytes / 2**20:,.0f} MiB",
            ),
            ("requests", f"{self.finished_requests:,} of {self.total_requests:,} finished"),
            (
                "tokens written",
                f"{self.written_tokens:,}: {counters.prefill_tokens:,} prefill,"
                f" {counters.decode_tokens:,} decode, {counters.recomputed_tokens:,} recomputed",
            ),
            ("bytes written", f"{self.written_bytes:,} in {counters.steps:,} steps"),
            (
                "speed",
                f"{speed:.2f} GB/s in scatter" if speed is not None else "-",
            ),
            (
                "time",
                f"{times.elapsed_ns / 1e9:.2f} s: "
                + ", ".join(f"{name} {value / 1e9:.2f}" for name, value in seconds.items()),
            ),
            (
                "prefix hits",
                f"{counters.prefix_hit_tokens:,} of {counters.prompt_tokens:,} prompt tokens"
                + (f" ({rate:.1%})" if rate is not None else ""),
            ),
            (
                "preemptions",
                f"{counters.preemptions:,}"
                + (
                    f" ({counters.recovered_tokens:,} tokens were still cached after them)"
                    if counters.preemptions
                    else ""
                ),
            ),
            ("copy on write", f"{counters.copies:,} blocks, {self.copied_bytes:,} bytes"),
            (
                "pool use",
                f"peak {self.pool_peak_used:,} of {self.pool_capacity:,} blocks"
                f" ({self.pool_peak_used / self.pool_capacity:.0%}), {self.pool_used:,} now,"
                f" {self.pool_evictions:,} evictions",
            ),
            ("verified", self.verdict),
        ]
