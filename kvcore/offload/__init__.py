# SPDX-License-Identifier: Apache-2.0
"""Request traces served over a paged cache, and the parts of an engine that offloads it."""

from kvcore.offload.caches import LAYOUTS, PagedCaches
from kvcore.offload.decode import DecodeEngine, DecodeStep
from kvcore.offload.decode_moves import AttentionInput
from kvcore.offload.decode_result import DecodeFailed, DecodeTotals, RequestStep, StepResult
from kvcore.offload.device_pool import DevicePool, Selection
from kvcore.offload.id_traces import hit_rate, read_ids, write_ids
from kvcore.offload.id_traces_synthetic import ScoreModel, TurnoverIds, score_trace
from kvcore.offload.layer_events import LayerEvents
from kvcore.offload.manager import OffloadEvent, OffloadManager, StorePlan
from kvcore.offload.models import MODELS, ModelFigure, ModelProfile, ModelShape
from kvcore.offload.pool import BlockPool
from kvcore.offload.prefill import PrefillOffloader
from kvcore.offload.replay import Replay, slot_mapping
from kvcore.offload.report import Mismatch, ReplayReport
from kvcore.offload.scheduler import Scheduler
from kvcore.offload.selection import SelectionCache
from kvcore.offload.synthetic import generate_trace
from kvcore.offload.traces import TraceRequest, read_trace
from kvcore.offload.write_policy import WRITE_POLICIES

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
