# SPDX-License-Identifier: Apache-2.0
"""Connectors that keep KV caches outside of the device, as vllm-ascend registers them."""

from __future__ import annotations

from typing import Any

#: Bytes of host memory that a connector may use.
_HOST = 1 << 28
_KV_OFFLOAD = "vllm_ascend.distributed.kv_transfer.kv_pool.kv_offload"

CONNECTORS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "simple": {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": _HOST},
    },
    "simple-lazy": {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": _HOST, "lazy_offload": True},
    },
    "offloading": {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": _HOST,
            "block_size": 128,
            "spec_name": "NPUOffloadingSpec",
            "spec_module_path": f"{_KV_OFFLOAD}.native.npu",
        },
    },
    "recompute": {
        "kv_connector": "RecomputeCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": _HOST, "cpu_swap_space_gb": 0.25},
    },
}

#: Those that bring back a prefix that the engine has forgotten.  "simple-lazy" stores blocks when
#: the device runs short of them, and "recompute" those of preempted requests.
RELOADS = ("simple", "offloading")


def transfer(name: str) -> dict[str, Any] | None:
    """The configuration that the engine takes, None without a connector."""
    found = CONNECTORS[name]
    return None if found is None else {"kv_role": "kv_both", **found}
