# SPDX-License-Identifier: Apache-2.0
"""Whether tiers fit a model and a device: checked before any work."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcore.errors import fail
from kvcore.offload.checks import check_integer
from kvcore.replay.clock.capacity import decode_bytes
from kvcore.replay.clock.prefill_time import by_figures
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.models.profile import PREFILL, STEP, ModelProfile
from kvcore.replay.options import PREFILL_TOKENS_PER_S, OffloadOptions
from kvcore.replay.tiers.lower import LowerTier
from kvcore.replay.tiers.spec import TierSpec, parse_tiers
from kvcore.runtime.profile import DeviceProfile

__all__ = ["FittedTiers", "alone", "check_figures", "check_tier_options", "fit_tiers"]

MAX_DEVICE_BLOCKS = 2**24
GIB = 2**30


@dataclass(frozen=True, slots=True)
class FittedTiers:
    """Tiers as one die has them.

    hbm, blocks:  device memory, and the blocks that it has room for.
    lower:        the others, as (tier, blocks, read and write bytes a microsecond): of what a node
                  has, an equal part for each of its dies.
    basis:        where the bandwidth of host memory comes from; "" where it is given.
    """

    hbm: TierSpec
    blocks: int
    lower: tuple[tuple[TierSpec, int, float, float], ...]
    basis: str

    def make(self) -> list[LowerTier]:
        """The tiers below the device, empty."""
        return [LowerTier(*each) for each in self.lower]


def alone(options: OffloadOptions) -> OffloadOptions:
    """The options without the tiers below the device."""
    hbm = parse_tiers(str(options.tiers), options.tier_policy)[0]
    parts = str(options.tiers).split(",")
    written = next(part for part in parts if part.strip().startswith("hbm="))
    return replace(options, tiers=written, tier_policy=hbm.policy, node_dies=1)


def check_tier_options(options: OffloadOptions) -> tuple[TierSpec, ...]:
    """The tiers of the options.

    Raises ParamInvalidError for tiers that cannot be, and for options that need them or that they
    rule out.
    """
    if options.tiers is None:
        if options.tier_policy != "lru":
            fail("tier_policy", "tiers (tiers) whose policy it is", "none")
        if options.node_dies != 1:
            fail("node_dies", "tiers (tiers) that the dies of a node share", "none")
        return ()
    specs = parse_tiers(options.tiers, options.tier_policy)
    if options.policy != "none":
        fail("policy", "none together with tiers: the caches of a request are on the device",
             repr(options.policy))  # fmt: skip
    return specs


def fit_tiers(model: ModelProfile, options: OffloadOptions, device: DeviceProfile) -> FittedTiers:
    """The tiers in blocks of the model, for one die.

    Raises ParamInvalidError for a model whose figures are missing (all are named), for device
    memory that the device has not got beside its weights, and for a tier that is smaller than a
    block.
    """
    hbm, *lower = check_tier_options(options)
    check_integer("node_dies", options.node_dies, 1)
    gib = options.weights_gib if options.weights_gib is not None else model.weights_gib
    room = device.capacity_bytes - int((gib or 0.0) * GIB)
    if hbm.capacity_bytes > room:
        beside = f" beside {gib:g} of weights" if gib else ""
        fail("tiers", f"hbm of at most {room / GIB:.1f} GiB: {device.capacity_bytes / GIB:.0f} GiB"
             f" of {device.name}{beside}", f"{hbm.capacity_bytes / GIB:.1f} GiB")  # fmt: skip
    basis = ""
    found = []
    dies = options.node_dies
    for spec in lower:
        blocks = _blocks(spec, model, options, dies)
        read, write = spec.read_bytes_per_us, spec.write_bytes_per_us
        if read is None or write is None:
            # The profile's figures are of one die already.
            figure = device["h2d_bandwidth"]
            basis = f"{figure.value:g} GB/s a die, {figure.basis}: {figure.source}"
            read, write = (device.value(f"{way}_bandwidth") * 1e3 for way in ("h2d", "d2h"))
        else:
            read, write = read / dies, write / dies
        found.append((spec, blocks, read, write))
    blocks = _blocks(hbm, model, options, 1)
    return FittedTiers(hbm, min(blocks, MAX_DEVICE_BLOCKS), tuple(found), basis)


def _blocks(spec: TierSpec, model: ModelProfile, options: OffloadOptions, share: int) -> int:
    block = decode_bytes(model, 1, options.block_size)
    blocks = spec.capacity_bytes // share // block
    if not blocks:
        dies = f" for each of {share} dies" if share > 1 else ""
        fail("tiers", f"{spec.name} of at least a block of {block:,} bytes{dies}",
             f"{spec.capacity_bytes // share:,}")  # fmt: skip
    return blocks


def check_figures(model: ModelProfile | Deployment, options: OffloadOptions) -> None:
    """Raise ParamInvalidError that names at once every figure without which there is no time."""
    table = None
    if isinstance(model, Deployment):
        table, model = model.table, model.model
    if not isinstance(model, ModelProfile):
        return  # (which is refused by its name later)
    missing = [] if table is not None else [key for key in STEP if key not in model.figures]
    rate = options.prefill_tokens_per_s
    if not model.topk and rate == PREFILL_TOKENS_PER_S and not by_figures(model, rate):
        # (the default rate was published for a model with a top-k)
        missing += [key for key in PREFILL if key not in model.figures]
    if missing:
        expected = (
            "figures of the time that steps and prompts take, in a TOML profile (for prompts"
            " prefill_tokens_per_s does too)"
        )
        fail("model", expected, f"{model.name} without {', '.join(missing)}")
