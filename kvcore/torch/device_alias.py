# SPDX-License-Identifier: Apache-2.0
"""device="npu" read as "cpu", for programs that write it out."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["DeviceAlias"]


class DeviceAlias(TorchFunctionMode):  # type: ignore[misc]
    """While entered, in this thread: ``device="npu"`` and ``.to("npu")`` mean the CPU.

    torch.device("npu") is made by no function that can be overridden, and stays an error.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function with the device replaced."""
        keywords = dict(kwargs or {})
        if _is_npu(keywords.get("device")):
            keywords["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _is_npu(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **keywords)


def _is_npu(device: Any) -> bool:
    return isinstance(device, str) and device.partition(":")[0] == "npu"
