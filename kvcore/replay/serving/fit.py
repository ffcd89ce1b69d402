# SPDX-License-Identifier: Apache-2.0
"""Whether a model with these options fits a device: checked before any work."""

from __future__ import annotations

from kvcore.errors import fail
from kvcore.offload.rows.policy import POLICIES as POOL_POLICIES
from kvcore.replay.clock.capacity import decode_bytes
from kvcore.replay.metrics.latency import Slo
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.runtime.profile import SHIPPED, DeviceProfile

__all__ = ["POLICIES", "device_blocks", "device_bytes", "fit", "weight_bytes"]

#: Of the pool on the device; none: the full caches are there, and nothing is offloaded.
POLICIES = (*POOL_POLICIES, "none")

STEP_FIGURES = ("step_fixed", "step_request", "step_attended", "step_indexed")
GIB = 2**30
MOST_BLOCKS = 2**24


def fit(model: ModelProfile, options: OffloadOptions) -> tuple[DeviceProfile, int]:
    """The device's profile and the pool's entries.

    Raises ParamInvalidError for an option that cannot be, a model that has nothing to offload or
    no figures of a step, a pool that is smaller than what a step selects, and a batch whose pools
    do not fit the device.
    """
    options.check_values()
    if options.slo is not None:
        Slo.parse(options.slo)
    if not isinstance(model, ModelProfile):
        fail("model", "a ModelProfile", type(model).__name__)
    if not model.topk:
        fail("model", "one with a top-k to offload", f"{model.name}, with none")
    for figure in STEP_FIGURES:
        if figure not in model.figures:
            model.step_us(1, 1)  # raises the error that names what is missing
    pool = _pool(model, options)
    if options.device.endswith(".toml"):
        device = DeviceProfile.load(options.device)
    elif options.device in SHIPPED:
        device = DeviceProfile.named(options.device)
    else:
        fail("device", f"one of {', '.join(SHIPPED)}, or a .toml file", repr(options.device))
    if model.device and model.device not in (device.name, device.like):
        # Half of a prediction would be another device's.
        note = f": {model.note}" if model.note else ""
        fail("device", f"{model.device}, of which {model.name}'s step is{note}", device.name)
    if options.policy == "none":
        device_blocks(model, options, device)
        return device, 0
    weights = weight_bytes(model, options) or 0
    room = max(0, device.capacity_bytes - weights)
    each = device_bytes(model, options, pool, 0)
    if options.batch * each > room:
        less = f", less {weights / GIB:.1f} of weights," if weights else ""
        fail(
            "batch",
            f"at most {room // each} requests:"
            f" {device.capacity_bytes / GIB:.0f} GiB of {device.name}{less}"
            f" for pools and selections of {each / GIB:.2f} GiB",
            options.batch,
        )
    return device, pool


def weight_bytes(model: ModelProfile, options: OffloadOptions) -> int | None:
    """Bytes that weights and activations take on the device; None: nobody said."""
    gib = options.weights_gib if options.weights_gib is not None else model.weights_gib
    return None if gib is None else int(gib * GIB)


def device_blocks(model: ModelProfile, options: OffloadOptions, device: DeviceProfile) -> int:
    """Blocks of the full caches (indexers' and draft layers' too) that the device has room for.

    Raises ParamInvalidError when nobody said what the weights take, or when they leave no room.
    """
    weights = weight_bytes(model, options)
    if weights is None:
        fail(
            "weights_gib",
            "GiB of weights and activations on the device, without which policy none has no"
            " capacity",
            f"nothing, nor a figure 'weights' of {model.name}",
        )
    block = decode_bytes(model, 1, options.block_size)
    blocks = (device.capacity_bytes - weights) // block
    if blocks < 1:
        fail(
            "weights_gib",
            f"room for a block of {block / GIB:.3f} GiB in {device.capacity_bytes / GIB:.0f} GiB of"
            f" {device.name}",
            f"{weights / GIB:g}",
        )
    return min(int(blocks), MOST_BLOCKS)


def _pool(model: ModelProfile, options: OffloadOptions) -> int:
    rows = (1 + options.drafts) * model.topk
    pool = options.pool
    if options.policy == "none":
        if pool is not None:
            fail("pool", "none: without offload there is no pool", pool)
        return 0
    if pool is None:
        pool = rows if options.policy == "previous" else 4 * rows
    if pool < rows:
        tokens = f"{1 + options.drafts} tokens a step" if options.drafts else "a token a step"
        fail("pool", f"at least {rows} entries: top-k {model.topk}, {tokens}", pool)
    if options.policy == "previous" and pool != rows:
        fail("pool", f"{rows} entries for the previous selection", pool)
    return pool


def device_bytes(model: ModelProfile, options: OffloadOptions, pool: int, context: int) -> int:
    """Device memory of a request: its pools, its selection (of two layers), its indexers."""
    selected = 2 * (1 + options.drafts) * model.topk
    recent = 2 * (1 + options.drafts) * model.layers
    rows = pool * model.layers + selected + recent
    return rows * model.row_bytes + context * model.token_index_bytes
