# SPDX-License-Identifier: Apache-2.0
"""KV-cache operators of LLM inference on Ascend NPUs, exact and fast on a CPU.

Operators: scatter_pa_kv_cache, reshape_and_cache, kv_cache_update, gather_pa_kv_cache,
gather_selection_kv_cache, and a plan_* function of each (plan once, run many times).  For what a
caller keeps: kvcore.slots, permute_rows, invalidate.  Layouts: kvcore.layout.  Backends:
kvcore.backends.  The runtime (kvcore.runtime, kvcore.Device), the offload engine (kvcore.offload)
and the torch operators (kvcore.torch) are imported when they are asked for.
"""

# (the module signal, without the milliseconds that importing it takes)
import _signal  # type: ignore[import-not-found]
import sys as _sys


def _end_at_once(number: int, frame: object) -> None:
    """Answer Ctrl-C with one line and the status of an interrupted process.

    While numpy is imported an exception may end in a traceback, in another error or nowhere.
    """
    import os

    try:
        os.write(2, b"kvcore: interrupted\n")
    finally:
        os._exit(128 + number)


def _is_the_command() -> bool:
    """Whether this process was started as ``kvcore`` or ``python -m kvcore``."""
    word = _sys.argv[0] if _sys.argv else ""
    if word != "-m":
        return word.rpartition("/")[2] == "kvcore"
    module = _sys.orig_argv[-len(_sys.argv)]  # as a word of its own, or as in -Bmkvcore
    return module == "kvcore" or (module.startswith("-") and module.endswith("mkvcore"))


# Here, since most of the time of a short command is spent below; kvcore.cli takes over.
if _is_the_command() and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _end_at_once)

from typing import TYPE_CHECKING, Any

try:
    from kvcore import backends, errors, isa, layout
except ModuleNotFoundError as _missing:
    if not (_missing.name or "").startswith("kvcore."):
        raise
    # Python looks in the directory it is started in first, so a clone hides what is installed.
    raise ModuleNotFoundError(
        f"{_missing.name}: not compiled for this Python in {__path__[0]}; run `pip install -e .`"
        " beside that folder, or start Python in another directory if kvcore is installed",
        name=_missing.name,
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
from kvcore.ops.derived import (
    plan_gather_pa_kv_cache,
    plan_gather_selection_kv_cache,
    plan_kv_cache_update,
    plan_scatter_pa_cache,
    plan_scatter_pa_kv_cache,
    scenario_of,
)
from kvcore.ops.gather_pa import gather_pa_kv_cache
from kvcore.ops.gather_selection import gather_selection_kv_cache
from kvcore.ops.kv_cache_update import kv_cache_update
from kvcore.ops.scatter_pa import (
    reshape_and_cache,
    scatter_pa_cache,
    scatter_pa_kv_cache,
)
from kvcore.ops.scenario import Scenario
from kvcore.ops.selection_rows import invalidate, permute_rows
from kvcore.soc import SoC, use_soc
from kvcore.threads import get_num_threads, set_num_threads

__version__ = "0.2.0"

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
_LAZY = frozenset(
    ("Buffer", "Device", "DeviceProfile", "Event", "Graph", "Stream", "current_stream")
)
_LAZY_MODULES = frozenset(
    ("benchmarks", "hifloat8", "offload", "replay", "runtime", "testing", "torch")
)

isa.apply_environment()

# A checker of types sees every name at its place, and would take any name for one that the
# function below knows.
if TYPE_CHECKING:
    from kvcore import benchmarks as benchmarks
    from kvcore import dtypes as dtypes
    from kvcore import float4 as float4
    from kvcore import hifloat8 as hifloat8
    from kvcore import offload as offload
    from kvcore import replay as replay
    from kvcore import runtime as runtime
    from kvcore import soc as soc
    from kvcore import testing as testing
    from kvcore import threads as threads
    from kvcore import torch as torch
    from kvcore.runtime import Buffer as Buffer
    from kvcore.runtime import Device as Device
    from kvcore.runtime import DeviceProfile as DeviceProfile
    from kvcore.runtime import Event as Event
    from kvcore.runtime import Graph as Graph
    from kvcore.runtime import Stream as Stream
    from kvcore.runtime import current_stream as current_stream
else:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _LAZY:
            value = getattr(import_module("kvcore.runtime"), name)
        elif name in _LAZY_MODULES:
            value = import_module(f"kvcore.{name}")
        else:
            raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})
