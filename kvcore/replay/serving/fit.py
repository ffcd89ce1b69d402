# SPDX-License-Identifier: Apache-2.0
"""Whether a model with these options fits a device: checked before any work."""

from __future__ import annotations

from kvcore.errors import fail
from kvcore.replay.metrics.latency import Slo
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.runtime.profile import SHIPPED, DeviceProfile

__all__ = ["device_bytes", "fit"]

STEP_FIGURES = ("step_fixed", "step_request", "step_attended", "step_indexed")
GIB = 2**30


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
    each = device_bytes(model, options, pool, 0)
    if options.batch * each > device.capacity_bytes:
        fail(
            "batch",
            f"at most {device.capacity_bytes // each} requests:"
            f" {device.capacity_bytes / GIB:.0f} GiB of {device.name}"
            f" for pools and selections of {each / GIB:.2f} GiB",
            options.batch,
        )
    return device, pool


def _pool(model: ModelProfile, options: OffloadOptions) -> int:
    rows = (1 + options.drafts) * model.topk
    pool = options.pool
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
