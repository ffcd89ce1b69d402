# SPDX-License-Identifier: Apache-2.0
"""Random numbers: the device's generator decides, a generator of the host makes them.

They are repeatable (the same seed gives the same numbers) and not those of the hardware.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found,unused-ignore]

__all__ = ["continued"]

#: How far a call moves the device's generator on; its offsets are multiples of four.
_STEP = 4


def continued(generator: Any, device: int) -> Any:
    """A host generator for one call, from where the device's stands; that one moves on.

    generator: the caller's, None for the device's default.
    """
    own = generator
    if own is None:
        if not torch_npu.npu.is_initialized():
            torch_npu.npu.init()
        own = torch_npu.npu.default_generators[device]
    if own.device.type == "cpu":
        return own
    seed, offset = own.initial_seed(), own.get_offset()
    own.set_offset(offset + _STEP)
    made = torch.Generator()
    made.manual_seed((seed * 0x9E3779B97F4A7C15 + offset) & ((1 << 64) - 1))
    return made
