# SPDX-License-Identifier: Apache-2.0
"""What an offloaded replay is asked to do, checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcore.errors import fail
from kvcore.offload.checks import check_choice, check_integer
from kvcore.offload.rows.policy import POLICIES
from kvcore.replay.models.profile import ModelProfile
from kvcore.runtime.profile import SHIPPED, DeviceProfile

__all__ = ["FIDELITIES", "PREFILL_SOURCE", "PREFILL_TOKENS_PER_S", "OffloadOptions"]

FIDELITIES = ("full", "sampled")
WRITE_POLICIES = ("write_through", "write_back")
#: Prompt tokens a second of one die.
PREFILL_TOKENS_PER_S = 3344.0
PREFILL_SOURCE = (
    "6,688 tokens/s a package of two dies, DeepSeek-R1, 4K prompts: Zuo et al., Serving Large"
    " Language Models on Huawei CloudMatrix384, arXiv:2506.12708; for other models an assumption"
)
MAX_BATCH = 4096
MAX_DRAFTS = 63
MAX_BLOCKS = 2**24
GIB = 2**30


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Options of a run; see ``docs/replay.md`` for what each does.

    pool:       entries of a request and group on the device; None: four times the top-k.
    device:     "A2", "A3", "950", or the path of a profile.
    batch:      requests at a time; drafts: draft tokens of each a step.
    accept:     the chance that a draft stands, when those before it do.
    prefill_tokens_per_s: of the device; None: another device computes prompts.
    host_blocks, block_size: the host's pool of blocks of tokens.
    chunk:      prompt tokens computed beside a step.
    sample_requests, sample_layers: of the sampled fidelity, most that are real.
    abort_share: share of requests that are aborted somewhere in their output.
    arrivals:   "order": all are there at once; "time": each at its timestamp.
    """

    fidelity: str = "sampled"
    policy: str = "lru"
    pool: int | None = None
    device: str = "A3"
    batch: int = 32
    drafts: int = 0
    accept: float = 0.8
    prefill_tokens_per_s: float | None = PREFILL_TOKENS_PER_S
    host_blocks: int = 65_536
    block_size: int = 128
    chunk: int = 2048
    write_policy: str = "write_through"
    seed: int = 0
    sample_requests: int = 64
    sample_layers: int = 2
    verify_samples: int = 1000
    abort_share: float = 0.0
    arrivals: str = "order"
    max_trace_events: int = 0

    def check(self, model: ModelProfile) -> tuple[DeviceProfile, int]:
        """The device's profile and the pool's entries.  Raises ParamInvalidError."""
        for name, value, allowed in (
            ("fidelity", self.fidelity, FIDELITIES),
            ("policy", self.policy, POLICIES),
            ("write_policy", self.write_policy, WRITE_POLICIES),
            ("arrivals", self.arrivals, ("order", "time")),
        ):
            check_choice(name, value, allowed)
        if not isinstance(model, ModelProfile):
            fail("model", "a ModelProfile", type(model).__name__)
        if not isinstance(self.device, str):
            fail("device", "the name of a device, or a .toml file", repr(self.device))
        for name, low, high in (
            ("batch", 1, MAX_BATCH), ("drafts", 0, MAX_DRAFTS), ("host_blocks", 1, MAX_BLOCKS),
            ("block_size", 1, 65_536), ("chunk", 1, 2**20), ("sample_requests", 1, 2**31),
            ("sample_layers", 1, 2**31), ("verify_samples", 0, 10**9), ("seed", 0, 2**64 - 1),
            ("max_trace_events", 0, 10**8),
        ):  # fmt: skip
            check_integer(name, getattr(self, name), low, high)
        for name in ("accept", "abort_share"):
            check_share(name, getattr(self, name))
        rate = self.prefill_tokens_per_s
        if rate is not None and not (
            type(rate) in (int, float) and math.isfinite(rate) and rate > 0
        ):
            fail("prefill_tokens_per_s", "a number above 0, or none", repr(rate))
        if not model.topk:
            fail("model", "one with a top-k to offload", f"{model.name}, with none")
        for figure in ("step_fixed", "step_request", "step_attended", "step_indexed"):
            if figure not in model.figures:
                model.step_us(1, 1)  # words the error
        rows = (1 + self.drafts) * model.topk
        pool = self.pool
        if pool is None:
            pool = rows if self.policy == "previous" else 4 * rows
        check_integer("pool", pool, 1, 2**28 - 1)
        if pool < rows:
            tokens = f"{1 + self.drafts} tokens a step" if self.drafts else "a token a step"
            fail("pool", f"at least {rows} entries: top-k {model.topk}, {tokens}", pool)
        if self.policy == "previous" and pool != rows:
            fail("pool", f"{rows} entries for the previous selection", pool)
        if self.device.endswith(".toml"):
            device = DeviceProfile.load(self.device)
        elif self.device in SHIPPED:
            device = DeviceProfile.named(self.device)
        else:
            fail("device", f"one of {', '.join(SHIPPED)}, or a .toml file", repr(self.device))
        fixed = self.batch * self.device_bytes(model, pool, 0)
        if fixed > device.capacity_bytes:
            most = device.capacity_bytes // self.device_bytes(model, pool, 0)
            fail(
                "batch",
                f"at most {most} requests: {device.capacity_bytes / GIB:.0f} GiB of {device.name}"
                f" for pools and selections of {self.device_bytes(model, pool, 0) / GIB:.2f} GiB",
                self.batch,
            )
        return device, pool

    def device_bytes(self, model: ModelProfile, pool: int, context: int) -> int:
        """Device memory of a request: its pools, its selection (of two layers), its indexers."""
        selected = 2 * (1 + self.drafts) * model.topk
        recent = 2 * (1 + self.drafts) * model.layers
        return (
            pool * model.layers + selected + recent
        ) * model.row_bytes + context * model.token_index_bytes


def check_share(name: str, value: object) -> None:
    """Raise ParamInvalidError unless it is a number from 0 to 1."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value <= 1:  # type: ignore[operator]
        fail(name, "a number from 0 to 1", repr(value))
