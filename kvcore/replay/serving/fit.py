# SPDX-License-Identifier: Apache-2.0
"""Whether a model with these options fits a device: checked before any work."""

from __future__ import annotations

from pathlib import Path

from kvcore.errors import fail
from kvcore.offload.rows.policy import POLICIES as POOL_POLICIES
from kvcore.replay.clock.capacity import decode_bytes
from kvcore.replay.deployments.deployment import Deployment, find_device
from kvcore.replay.metrics.latency import Slo
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.tiers.fit import check_figures, check_tier_options, fit_tiers
from kvcore.replay.traces.made_ids import MadeIds
from kvcore.replay.traces.recorded_ids import RecordedIds, parse_turnover, read_recordings
from kvcore.runtime.profile import DeviceProfile

__all__ = [
    "POLICIES", "deployment_of", "device_blocks", "device_bytes", "fit", "held_bytes",
    "host_blocks_of", "ids_of", "weight_bytes",
]  # fmt: skip

#: Policies of the pool on the device; none: the full caches are there, and nothing is offloaded.
POLICIES = (*POOL_POLICIES, "none")

#: The device of a model without a deployment, where the options name none.
DEFAULT_DEVICE = "A3"
GIB = 2**30
#: GiB of host memory for one device's blocks by default, and of a whole node: 2 TiB for 16 dies.
#: Assumed: 32 modules of 64 GiB in an Atlas 800T A3.
HOST_GIB, NODE_GIB = 128.0, 2048.0
HOST_BLOCKS = 65_536
MOST_BLOCKS = 2**24


def deployment_of(model: ModelProfile | Deployment, options: OffloadOptions) -> Deployment:
    """The deployment whose figures give a replay's times: as given, or of a model and a device.

    Raises ParamInvalidError for a model that has nothing to offload or no figures of a step, and
    for a device that there are no figures for.
    """
    if isinstance(model, Deployment):
        found = model.on(options.device)
        _check_topk(found.model, options)
        return found
    if not isinstance(model, ModelProfile):
        fail("model", "a ModelProfile or a Deployment", type(model).__name__)
    _check_topk(model, options)
    device = find_device(DEFAULT_DEVICE if options.device is None else options.device, Path())
    return Deployment.of(model, device).on(options.device)


def ids_of(deployment: Deployment, options: OffloadOptions) -> MadeIds | RecordedIds | None:
    """The source of a replay's ids; None: the generator with its defaults.

    Raises ParamInvalidError for a file of ids that is not the model's.
    """
    made = deployment.ids if options.turnover is None else parse_turnover(options.turnover)
    if options.ids is None or not deployment.model.topk:
        return made
    found = read_recordings(options.ids, deployment.model)
    return found if options.turnover is None else RecordedIds(found.recordings, made or MadeIds())


def _check_topk(model: ModelProfile, options: OffloadOptions) -> None:
    if not model.topk and options.policy != "none":
        fail("model", "one with a top-k to offload, or policy none", f"{model.name}, with none")


def fit(model: ModelProfile | Deployment, options: OffloadOptions) -> tuple[DeviceProfile, int]:
    """The device's profile and the pool's entries.

    Raises ParamInvalidError for an option that cannot be, a model that has nothing to offload or
    no figures of a step, a pool that is smaller than what a step selects, and a batch whose pools
    do not fit the device.
    """
    options.check_values()
    if options.slo is not None:
        Slo.parse(options.slo)
    if options.search is not None and options.slo is None:
        fail("search", "limits that are to hold (slo)", "none")
    if options.search is not None and options.arrivals != "time":
        fail("search", "requests that arrive by time (arrivals)", repr(options.arrivals))
    check_tier_options(options)
    if options.tiers is not None:
        check_figures(model, options)
    deployment = deployment_of(model, options)
    model, device = deployment.model, deployment.device
    ids_of(deployment, options)
    pool = _pool(model, options)
    if options.tiers is not None:
        fit_tiers(model, options, device)
        return device, 0
    if options.policy == "none":
        device_blocks(model, options, device)
        return device, 0
    _check_host(model, options)
    weights = weight_bytes(model, options) or 0
    room = max(0, device.capacity_bytes - weights)
    each = held_bytes(deployment, options, pool, 1, 0)
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


def host_blocks_of(model: ModelProfile, block_size: int, gib: float | None) -> int:
    """Blocks of the default pool of the host: what its memory holds, at most `HOST_BLOCKS`."""
    held = (HOST_GIB if gib is None else gib) * GIB
    return max(1, min(HOST_BLOCKS, int(held // (block_size * model.row_bytes * model.layers))))


def _check_host(model: ModelProfile, options: OffloadOptions) -> None:
    """Raise for blocks that exceed the host's memory: as given, or else a whole node's."""
    block = options.block_size * model.row_bytes * model.layers
    gib = NODE_GIB if options.host_gib is None else options.host_gib
    whose = "all that a node has; --host-gib says more" if options.host_gib is None else "host_gib"
    if options.host_blocks * block > gib * GIB:
        fail(
            "host_blocks",
            f"at most {int(gib * GIB // block):,} blocks of {block / GIB:.4f} GiB in"
            f" {gib:,.0f} GiB ({whose})",
            f"{options.host_blocks:,}, which take {options.host_blocks * block / GIB:,.0f} GiB",
        )


def weight_bytes(model: ModelProfile, options: OffloadOptions) -> int | None:
    """Bytes that weights and activations take on the device; None: not given."""
    gib = options.weights_gib if options.weights_gib is not None else model.weights_gib
    return None if gib is None else int(gib * GIB)


def device_blocks(model: ModelProfile, options: OffloadOptions, device: DeviceProfile) -> int:
    """Blocks of the full caches (indexers' and draft layers' too) that the device has room for.

    Raises ParamInvalidError when the size of the weights is not given, or leaves no room.
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


def held_bytes(
    deployment: Deployment, options: OffloadOptions, pool: int, requests: int, tokens: int
) -> int:
    """Bytes of device memory of requests that have ``tokens`` tokens together, without weights.

    Where layers are served in order each has a selection of its own, those that make drafts too,
    unless the deployment says how many have one; else two selections serve all layers in turn.
    """
    model = deployment.model
    if deployment.serve == "in order":
        selections = deployment.own("selection_layers", model.layers + model.draft_layers)
        rows = (1 + options.drafts) * model.topk * int(selections) + pool * model.layers
        index = model.token_index_bytes
        index += model.draft_layers * (index // len(model.groups))
        return requests * rows * model.row_bytes + tokens * index
    each = device_bytes(model, options, pool, 0)
    return requests * each + tokens * model.token_index_bytes


def device_bytes(model: ModelProfile, options: OffloadOptions, pool: int, context: int) -> int:
    """Bytes of device memory of a request: pools, the selections of two layers, and indexers."""
    selected = 2 * (1 + options.drafts) * model.topk
    recent = 2 * (1 + options.drafts) * model.layers
    rows = pool * model.layers + selected + recent
    return rows * model.row_bytes + context * model.token_index_bytes
