# SPDX-License-Identifier: Apache-2.0
"""Request traces served over a paged cache, and the parts of an engine that offloads it.

Names are imported when they are asked for: the command line starts without an event loop.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.offload.caches import LAYOUTS, PagedCaches
    from kvcore.offload.decode import DecodeEngine, DecodeStep
    from kvcore.offload.decode_moves import AttentionInput
    from kvcore.offload.decode_result import DecodeFailed, DecodeTotals, RequestStep, StepResult
    from kvcore.offload.device_pool import DevicePool, Selection
    from kvcore.offload.id_traces import hit_rate, read_ids, write_ids
    from kvcore.offload.id_traces_synthetic import ScoreModel, TurnoverIds, score_trace
    from kvcore.offload.layer_events import LayerEvents
    from kvcore.offload.manager import OffloadEvent, OffloadManager, OffloadStats, StorePlan
    from kvcore.offload.models import MODELS, ModelFigure, ModelProfile, ModelShape
    from kvcore.offload.offload_options import OffloadOptions
    from kvcore.offload.offload_replay import OffloadReplay
    from kvcore.offload.offload_report import OffloadReport
    from kvcore.offload.pool import BlockPool
    from kvcore.offload.prefill import PrefillOffloader
    from kvcore.offload.replay import Replay, slot_mapping
    from kvcore.offload.report import Mismatch, ReplayReport
    from kvcore.offload.scheduler import Scheduler
    from kvcore.offload.selection import SelectionCache
    from kvcore.offload.synthetic import generate_trace
    from kvcore.offload.traces import TraceRequest, read_trace
    from kvcore.offload.write_policy import WRITE_POLICIES

#: Module -> what it has for everybody.
_HOMES = {
    "caches": ("LAYOUTS", "PagedCaches"),
    "decode": ("DecodeEngine", "DecodeStep"),
    "decode_moves": ("AttentionInput",),
    "decode_result": ("DecodeFailed", "DecodeTotals", "RequestStep", "StepResult"),
    "device_pool": ("DevicePool", "Selection"),
    "id_traces": ("hit_rate", "read_ids", "write_ids"),
    "id_traces_synthetic": ("ScoreModel", "TurnoverIds", "score_trace"),
    "layer_events": ("LayerEvents",),
    "manager": ("OffloadEvent", "OffloadManager", "OffloadStats", "StorePlan"),
    "models": ("MODELS", "ModelFigure", "ModelProfile", "ModelShape"),
    "offload_options": ("OffloadOptions",),
    "offload_replay": ("OffloadReplay",),
    "offload_report": ("OffloadReport",),
    "pool": ("BlockPool",),
    "prefill": ("PrefillOffloader",),
    "replay": ("Replay", "slot_mapping"),
    "report": ("Mismatch", "ReplayReport"),
    "scheduler": ("Scheduler",),
    "selection": ("SelectionCache",),
    "synthetic": ("generate_trace",),
    "traces": ("TraceRequest", "read_trace"),
    "write_policy": ("WRITE_POLICIES",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LAYOUTS",
    "MODELS",
    "WRITE_POLICIES",
    "AttentionInput",
    "BlockPool",
    "DecodeEngine",
    "DecodeFailed",
    "DecodeStep",
    "DecodeTotals",
    "DevicePool",
    "LayerEvents",
    "Mismatch",
    "ModelFigure",
    "ModelProfile",
    "ModelShape",
    "OffloadEvent",
    "OffloadManager",
    "OffloadOptions",
    "OffloadReplay",
    "OffloadReport",
    "OffloadStats",
    "PagedCaches",
    "PrefillOffloader",
    "Replay",
    "ReplayReport",
    "RequestStep",
    "Scheduler",
    "ScoreModel",
    "Selection",
    "SelectionCache",
    "StepResult",
    "StorePlan",
    "TraceRequest",
    "TurnoverIds",
    "generate_trace",
    "hit_rate",
    "read_ids",
    "read_trace",
    "score_trace",
    "slot_mapping",
    "write_ids",
]


if not TYPE_CHECKING:  # a checker of types would take any name for one that this knows

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
