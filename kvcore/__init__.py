# SPDX-License-Identifier: Apache-2.0
"""KV-cache operators of LLM inference on Ascend NPUs, exact and fast on a CPU.

Operators: scatter_pa_kv_cache, reshape_and_cache, kv_cache_update, gather_pa_kv_cache,
gather_selection_kv_cache, and a plan_* function of each (plan once, run many times).  Their books:
kvcore.slots, permute_rows, invalidate.  Layouts: kvcore.layout.  Backends: kvcore.backends.  The
runtime (kvcore.runtime, kvcore.Device), the offload engine (kvcore.offload) and the torch
operators (kvcore.torch) are imported when they are asked for.
"""

from typing import Any

try:
    from kvcore import backends, errors, isa, layout
except ModuleNotFoundError as missing:
    if not (missing.name or "").startswith("kvcore."):
        raise
    # Python looks in the directory it is started in first, so a clone hides what is installed.
    raise ModuleNotFoundError(
        f"{missing.name}: not compiled for this Python in {__path__[0]}; run `pip install -e .`"
        " beside that folder, or start Python in another directory if kvcore is installed",
        name=missing.name,
    ) from None
from kvcore.about import info
from kvcore.errors import (
    BackendUnavailableError,
    CaptureError,
    DeviceOutOfMemoryError,
    KVCoreError,
    KVPortabilityWarning,
    ParamInvalidError,
    ParamNullError,
    RaceError,
    SlotRangeError,
    StreamError,
)
from kvcore.float4 import pack_float4, unpack_float4
from kvcore.ops import slots
from kvcore.ops.gather_pa import gather_pa_kv_cache, plan_gather_pa_kv_cache
from kvcore.ops.gather_selection import (
    gather_selection_kv_cache,
    plan_gather_selection_kv_cache,
)
from kvcore.ops.kv_cache_update import kv_cache_update, plan_kv_cache_update
from kvcore.ops.scatter_pa import (
    plan_scatter_pa_cache,
    plan_scatter_pa_kv_cache,
    reshape_and_cache,
    scatter_pa_cache,
    scatter_pa_kv_cache,
)
from kvcore.ops.scenario import Scenario, scenario_of
from kvcore.ops.selection_rows import invalidate, permute_rows
from kvcore.soc import SoC, use_soc
from kvcore.threads import get_num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "CaptureError",
    "DeviceOutOfMemoryError",
    "KVCoreError",
    "KVPortabilityWarning",
    "ParamInvalidError",
    "ParamNullError",
    "RaceError",
    "Scenario",
    "SlotRangeError",
    "SoC",
    "StreamError",
    "backends",
    "errors",
    "gather_pa_kv_cache",
    "gather_selection_kv_cache",
    "get_num_threads",
    "info",
    "invalidate",
    "kv_cache_update",
    "layout",
    "pack_float4",
    "permute_rows",
    "plan_gather_pa_kv_cache",
    "plan_gather_selection_kv_cache",
    "plan_kv_cache_update",
    "plan_scatter_pa_cache",
    "plan_scatter_pa_kv_cache",
    "reshape_and_cache",
    "scatter_pa_cache",
    "scatter_pa_kv_cache",
    "scenario_of",
    "set_num_threads",
    "slots",
    "unpack_float4",
    "use_soc",
]

# Imported on first use: they bring anyio or torch, which the operators do not need.
_LAZY: dict[str, str] = dict.fromkeys(
    ("Buffer", "Device", "DeviceProfile", "Event", "Graph", "Stream", "current_stream"),
    "kvcore.runtime",
)
isa.apply_environment()

_LAZY_MODULES = ("offload", "runtime", "torch")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _LAZY_MODULES:
        return import_module(f"kvcore.{name}")
    raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
