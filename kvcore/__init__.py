# SPDX-License-Identifier: Apache-2.0
"""KV-cache operators of LLM inference on Ascend NPUs, exact and fast on a CPU."""

from kvcore import errors
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
from kvcore.ops.kv_cache_update import kv_cache_update, plan_kv_cache_update
from kvcore.ops.scatter_pa import (
    plan_scatter_pa_kv_cache,
    reshape_and_cache,
    scatter_pa_kv_cache,
)
from kvcore.soc import SoC, use_soc
from kvcore.threads import get_num_threads, set_num_threads

__version__ = "0.1.0"
