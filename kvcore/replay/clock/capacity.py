# SPDX-License-Identifier: Apache-2.0
"""What the caches of a decode take of a device's memory, and how many requests fit."""

from __future__ import annotations

from kvcore.replay.models.profile import ModelProfile

__all__ = ["decode_bytes", "most_requests"]


def decode_bytes(
    model: ModelProfile, requests: int, context: int, *, drafts: int = 0, pool: int | None = None
) -> int:
    """Bytes of device memory the caches of a decode take.

    pool: entries of a request and layer with offload; 0: the selection alone; None: the full
          cache is on the device.
    Weights and activations are not counted.  A selection has a row a query and wanted token.
    """
    index = requests * context * model.token_index_bytes
    if model.token_index_bytes:
        # The layer that makes drafts has an indexer of its own.
        index += (
            requests * context * model.draft_layers * (model.token_index_bytes // len(model.groups))
        )
    if pool is None:
        return index + requests * context * model.token_bytes
    selected = (1 + drafts) * min(model.topk, context)
    layers = model.layers + model.draft_layers
    rows = selected * layers + pool * model.layers
    return index + requests * rows * model.row_bytes


def most_requests(
    model: ModelProfile, budget: int, context: int, *, drafts: int = 0, pool: int | None = None
) -> int:
    """Requests of ``context`` tokens that ``budget`` bytes of device memory hold."""
    return budget // decode_bytes(model, 1, context, drafts=drafts, pool=pool)
