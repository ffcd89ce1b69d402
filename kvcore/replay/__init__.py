# SPDX-License-Identifier: Apache-2.0
"""The lab behind ``kvcore replay``: request traces served on this machine, and what that cost.

    answer     whether offload is worth it: a run beside its baseline, and the highest rate
    traces     requests, their tokens and the rows they choose: read from files or generated
    models     models as data: what a token keeps, and what a step costs
    deployments  what a step takes of a model on one device, in one set-up and software
    serving    what is scheduled, and what is really moved
    clock      times of steps from figures, without running them
    report     what a replay found: data, tables, pages, comparisons
    options    what a replay is asked to do; sweep: many of them

Names are imported when they are asked for, so that the command line starts without an event loop.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.replay.answer.answer import Answer
    from kvcore.replay.answer.run import Served, serve
    from kvcore.replay.deployments.deployment import DEPLOYMENTS, Deployment
    from kvcore.replay.models.profile import MODELS, ModelFigure, ModelProfile, ModelShape
    from kvcore.replay.options import OffloadOptions
    from kvcore.replay.report.offloaded import OffloadReport
    from kvcore.replay.report.report import Mismatch
    from kvcore.replay.report.resident import ReplayReport
    from kvcore.replay.serving.caches import LAYOUTS, PagedCaches
    from kvcore.replay.serving.in_full import OffloadedInFull
    from kvcore.replay.serving.on_device import OnDevice
    from kvcore.replay.serving.replay import OffloadReplay, Replay
    from kvcore.replay.serving.resident import Resident, slot_mapping
    from kvcore.replay.serving.sampled import OffloadedSampled
    from kvcore.replay.serving.scheduler import Scheduler
    from kvcore.replay.serving.strategy import Strategy
    from kvcore.replay.traces.ids import hit_rate, read_ids, write_ids
    from kvcore.replay.traces.reader import TraceRequest, read_trace
    from kvcore.replay.traces.synthetic import generate_trace
    from kvcore.replay.traces.synthetic_ids import (
        ScoreIds,
        ScoreModel,
        TurnoverIds,
        score_trace,
    )

#: Module -> the names that it has for users.
_HOMES = {
    "answer.answer": ("Answer",),
    "answer.run": ("Served", "serve"),
    "deployments.deployment": ("DEPLOYMENTS", "Deployment"),
    "models.profile": ("MODELS", "ModelFigure", "ModelProfile", "ModelShape"),
    "options": ("OffloadOptions",),
    "report.offloaded": ("OffloadReport",),
    "report.report": ("Mismatch",),
    "report.resident": ("ReplayReport",),
    "serving.caches": ("LAYOUTS", "PagedCaches"),
    "serving.in_full": ("OffloadedInFull",),
    "serving.on_device": ("OnDevice",),
    "serving.replay": ("OffloadReplay", "Replay"),
    "serving.resident": ("Resident", "slot_mapping"),
    "serving.sampled": ("OffloadedSampled",),
    "serving.scheduler": ("Scheduler",),
    "serving.strategy": ("Strategy",),
    "traces.ids": ("hit_rate", "read_ids", "write_ids"),
    "traces.reader": ("TraceRequest", "read_trace"),
    "traces.synthetic": ("generate_trace",),
    "traces.synthetic_ids": ("ScoreIds", "ScoreModel", "TurnoverIds", "score_trace"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "DEPLOYMENTS",
    "LAYOUTS",
    "MODELS",
    "Answer",
    "Deployment",
    "Mismatch",
    "ModelFigure",
    "ModelProfile",
    "ModelShape",
    "OffloadOptions",
    "OffloadReplay",
    "OffloadReport",
    "OffloadedInFull",
    "OffloadedSampled",
    "OnDevice",
    "PagedCaches",
    "Replay",
    "ReplayReport",
    "Resident",
    "Scheduler",
    "ScoreIds",
    "ScoreModel",
    "Served",
    "Strategy",
    "TraceRequest",
    "TurnoverIds",
    "generate_trace",
    "hit_rate",
    "read_ids",
    "read_trace",
    "score_trace",
    "serve",
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
