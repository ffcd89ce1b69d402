# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine that keeps the full KV cache on the host: what a server imports.

    blocks     paged blocks: who holds which, and the manager of those that are offloaded
    rows       rows that sparse attention selects, kept on the device in front of the full cache
    decode     the decode engine
    prefill    prefill whose rows leave layer by layer

Names are imported when they are asked for, so that the command line starts without an event loop.
The lab that replays request traces is kvcore.replay; its names are still found here, with a
DeprecationWarning, until version 0.4.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.offload.blocks.manager import (
        OffloadEvent,
        OffloadManager,
        OffloadManagerStatistics,
        OffloadStats,
        StorePlan,
    )
    from kvcore.offload.blocks.pool import BlockPool
    from kvcore.offload.decode.engine import DecodeEngine, DecodeStep
    from kvcore.offload.decode.layer_events import LayerEvents
    from kvcore.offload.decode.moves import AttentionInput
    from kvcore.offload.decode.result import (
        DecodeFailed,
        DecodeStatistics,
        DecodeTotals,
        RequestStep,
        StepResult,
    )
    from kvcore.offload.decode.write_policy import WRITE_POLICIES
    from kvcore.offload.prefill import PrefillOffloader
    from kvcore.offload.rows.device_pool import DevicePool, DevicePoolStatistics, Selection
    from kvcore.offload.rows.selection import SelectionCache

#: Module -> the names that it has for users.
_HOMES = {
    "blocks.manager": (
        "OffloadEvent", "OffloadManager", "OffloadManagerStatistics", "OffloadStats", "StorePlan",
    ),
    "blocks.pool": ("BlockPool",),
    "decode.engine": ("DecodeEngine", "DecodeStep"),
    "decode.layer_events": ("LayerEvents",),
    "decode.moves": ("AttentionInput",),
    "decode.result": (
        "DecodeFailed", "DecodeStatistics", "DecodeTotals", "RequestStep", "StepResult",
    ),
    "decode.write_policy": ("WRITE_POLICIES",),
    "prefill": ("PrefillOffloader",),
    "rows.device_pool": ("DevicePool", "DevicePoolStatistics", "Selection"),
    "rows.selection": ("SelectionCache",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

#: Names that were here before kvcore.replay had a package of its own.
_MOVED_TO_REPLAY = frozenset(
    {
        "LAYOUTS", "MODELS", "Mismatch", "ModelFigure", "ModelProfile", "ModelShape",
        "OffloadOptions", "OffloadReplay", "OffloadReport", "PagedCaches", "Replay",
        "ReplayReport", "Scheduler", "ScoreModel", "TraceRequest", "TurnoverIds",
        "generate_trace", "hit_rate", "read_ids", "read_trace", "score_trace", "slot_mapping",
        "write_ids",
    }
)  # fmt: skip

__all__ = [
    "WRITE_POLICIES",
    "AttentionInput",
    "BlockPool",
    "DecodeEngine",
    "DecodeFailed",
    "DecodeStatistics",
    "DecodeStep",
    "DecodeTotals",
    "DevicePool",
    "DevicePoolStatistics",
    "LayerEvents",
    "OffloadEvent",
    "OffloadManager",
    "OffloadManagerStatistics",
    "OffloadStats",
    "PrefillOffloader",
    "RequestStep",
    "Selection",
    "SelectionCache",
    "StepResult",
    "StorePlan",
]


if not TYPE_CHECKING:  # a checker of types would take any name for one that this knows

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
            globals()[name] = value
            return value
        if name in _MOVED_TO_REPLAY:
            warnings.warn(
                f"kvcore.offload.{name} is kvcore.replay.{name} now; the old place goes with 0.4",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(importlib.import_module("kvcore.replay"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
