# SPDX-License-Identifier: Apache-2.0
"""What a replay with tiers reports of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.replay.tiers.fit import FittedTiers
from kvcore.replay.tiers.lower import LowerTiers

__all__ = ["TierFigures"]


class TierFigures:
    """Hits by tier, bytes moved, and the time that loads took.

    prompt_tokens, prompt_blocks: of requests that were admitted, each once.
    hbm_blocks, hbm_tokens:       of them in device memory.
    loads, waited_us:   requests that waited for a load, and how long in all.
    exposed_us:         that the device stood idle since everybody waited for a load.
    """

    def __init__(self, fitted: FittedTiers, lower: LowerTiers) -> None:
        self.fitted: FittedTiers = fitted
        self.lower: LowerTiers = lower
        self.prompt_tokens: int = 0
        self.prompt_blocks: int = 0
        self.hbm_tokens: int = 0
        self.hbm_blocks: int = 0
        self.share_sum: float = 0.0
        self.requests: int = 0
        self.loads: int = 0
        self.waited_us: float = 0.0
        self.exposed_us: float = 0.0

    def add(self, tokens: int, blocks: int, found: int, sources: Sequence[int], size: int) -> None:
        """A request is admitted for the first time.

        tokens, blocks: of its prompt; found: its leading blocks in device memory; sources: the
        tiers of the blocks behind them; size: tokens of a block.
        """
        self.prompt_tokens += tokens
        self.prompt_blocks += blocks
        self.hbm_blocks += found
        held = min(found * size, tokens)
        self.hbm_tokens += held
        for place, number in enumerate(sources, start=found):
            tier = self.lower.tiers[number]
            tier.hit_blocks += 1
            tier.hit_tokens += min(size, tokens - place * size)
        self.requests += 1
        self.share_sum += min((found + len(sources)) * size, tokens) / tokens

    def wait(self, us: float) -> None:
        """A request begins to wait for its load."""
        self.loads += 1
        self.waited_us += us

    def to_dict(self) -> dict[str, Any]:
        """Everything, of types that JSON has."""
        found: dict[str, Any] = {
            "prompt": {"tokens": self.prompt_tokens, "blocks": self.prompt_blocks},
            "hit_share_of_a_request": self.share_sum / self.requests if self.requests else None,
            "tiers": [
                {
                    "name": "hbm",
                    "policy": self.fitted.hbm.policy,
                    "capacity_blocks": self.fitted.blocks,
                    "hit_tokens": self.hbm_tokens,
                    "hit_blocks": self.hbm_blocks,
                }
            ],
            "loads": self.loads,
            "waited_ms": self.waited_us / self.loads / 1e3 if self.loads else None,
            "exposed_us": self.exposed_us,
        }
        for tier in self.lower.tiers:
            found["tiers"].append({
                "name": tier.spec.name,
                "policy": tier.spec.policy,
                "capacity_blocks": tier.capacity,
                "peak_blocks": tier.peak,
                "hit_tokens": tier.hit_tokens,
                "hit_blocks": tier.hit_blocks,
                "evictions": tier.evictions,
                "read_bytes": tier.read_bytes,
                "passed_bytes": tier.passed_bytes,
                "written_bytes": tier.written_bytes,
                "read_busy_us": tier.read_us,
                "write_busy_us": tier.write_us,
            })  # fmt: skip
        return found

    def rows(self, end_us: float) -> list[tuple[str, str]]:
        """Rows of the table; end_us: how long the run took."""
        rows = [
            ("hbm", _tier_row(self, "hbm", self.fitted.blocks, self.hbm_tokens, self.hbm_blocks))
        ]
        for tier in self.lower.tiers:
            said = _tier_row(self, tier.spec.name, tier.capacity, tier.hit_tokens, tier.hit_blocks)
            passed = f" and {tier.passed_bytes / 1e9:,.1f} passed" if tier.passed_bytes else ""
            busy = tier.read_us / end_us if end_us else 0.0
            writing = tier.write_us / end_us if end_us else 0.0
            behind = ", it cannot keep up" if writing > 1 else ""
            rows.append((
                tier.spec.name,
                f"{said}; {tier.read_bytes / 1e9:,.1f} GB loaded{passed}"
                f" ({busy:.1%} of the time), {tier.written_bytes / 1e9:,.1f} GB written"
                f" ({writing:.1%}{behind}), {tier.evictions:,} evictions",
            ))  # fmt: skip
        if self.loads:
            rows.append((
                "loads",
                f"{self.loads:,} requests waited {self.waited_us / self.loads / 1e3:,.1f} ms on"
                f" average; the device stood idle for them {self.exposed_us / 1e6:,.2f} s",
            ))  # fmt: skip
        if self.fitted.basis:
            rows.append(("host link", self.fitted.basis))
        return rows


def _tier_row(all_of: TierFigures, name: str, capacity: int, tokens: int, blocks: int) -> str:
    share = tokens / all_of.prompt_tokens if all_of.prompt_tokens else 0.0
    of_blocks = blocks / all_of.prompt_blocks if all_of.prompt_blocks else 0.0
    return (
        f"{share:.2%} of the prompts' tokens, {of_blocks:.2%} of their blocks; room for"
        f" {capacity:,} blocks"
    )
