# SPDX-License-Identifier: Apache-2.0
"""What a device is given of a call: work that was done already, or that runs later."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvcore.errors import ParamInvalidError

if TYPE_CHECKING:
    from kvcore.runtime import Device
    from kvcore.torch.vendor import Call

__all__ = ["Done", "Later", "call_site", "deliver", "is_watched"]

#: Packages whose frames are not the caller's program.
_OURS = ("kvcore", "torch")


def is_watched(device: Device) -> bool:
    """Whether anything on the device wants to know what was touched."""
    if device.race_check != "off" or device.clock == "model":
        return True
    try:
        return device.trace is not None
    except ParamInvalidError:
        return False


class Done:
    """Work that was done already, for those who watch a device.

    No ``reads`` and ``writes``: a modelled device would refuse memory that is not its own.
    """

    def __init__(self, plan: Any, name: str) -> None:
        self.name = name
        self.bytes_moved = plan.bytes_moved
        self.num_descriptors = plan.num_descriptors
        self._touched = plan.touched()

    def run(self) -> None:
        """Nothing is left to do."""

    def touched(self) -> Any:
        """What the call touched."""
        return self._touched


class Later:
    """A call that runs in stream order: in a graph, or behind an event that is not recorded yet.

    It reads its arguments when it runs.
    """

    def __init__(self, call: Call, name: str) -> None:
        self.call = call
        self.name = name
        self.touched = call.plan.touched

    @property
    def bytes_moved(self) -> int:
        """As the plan has it."""
        return self.call.plan.bytes_moved

    @property
    def num_descriptors(self) -> int:
        """As the plan has it."""
        return self.call.plan.num_descriptors

    def run(self) -> None:
        """Run the plan, and put what it returns where the caller has it."""
        deliver(self.call, self.call.plan.run())


def deliver(call: Call, result: Any) -> Any:
    """Put what a plan returned where the call's caller has it; what the operator returns."""
    if call.into is not None and result is not None:
        import torch

        call.into.copy_(torch.from_numpy(result))
    return call.returned


def call_site() -> str:
    """File and line of the caller's program."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
