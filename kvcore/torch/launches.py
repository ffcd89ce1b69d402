# SPDX-License-Identifier: Apache-2.0
"""What a device is given of a call: work that was done already, or that runs later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import _getframe
from typing import TYPE_CHECKING, Any

from kvcore.errors import KVCoreError, ParamInvalidError

if TYPE_CHECKING:
    from kvcore.runtime import Device
    from kvcore.torch.calls import Call

__all__ = ["Done", "Later", "call_site", "is_watched", "renamed"]

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

    def __init__(self, call: Call, name: str) -> None:
        self.name = name
        self.bytes_moved: int = call.bytes_moved
        self.num_descriptors: int = call.num_descriptors
        self._touched = call.touched()
        _take_cost(self, call.plan)

    def run(self) -> None:
        """Nothing is left to do."""

    def touched(self) -> Any:
        """What the call touched."""
        return self._touched


class Later:
    """A call that runs in stream order: in a graph, or behind an event that is not recorded yet.

    It reads its arguments when it runs.  names: the core's argument names and the operator's,
    where they differ, for errors.
    """

    def __init__(self, call: Call, name: str, names: Mapping[str, str]) -> None:
        if call.choice is not None:
            call.choice.prepare()
        self.call = call
        self.name = name
        self._names = names
        self.touched: Callable[[], tuple[tuple[Any, ...], tuple[Any, ...]]] = call.touched
        _take_cost(self, call.plan)

    @property
    def bytes_moved(self) -> int:
        """As the call has it."""
        return self.call.bytes_moved

    @property
    def num_descriptors(self) -> int:
        """As the call has it."""
        return self.call.num_descriptors

    def run(self) -> None:
        """Run the call, and put what it returns where the caller has it."""
        try:
            self.call.run()
        except KVCoreError as error:
            own = renamed(error, self._names)
            if own is error:
                raise
            raise own from None


def _take_cost(launched: Any, plan: Any) -> None:
    """A plan that says what it asks of the device's resources says so for its launch."""
    for name in ("demands", "host_bytes", "h2d_bytes", "d2h_bytes"):
        if hasattr(plan, name):
            setattr(launched, name, getattr(plan, name))


def renamed(error: KVCoreError, names: Mapping[str, str]) -> KVCoreError:
    """The error with the argument's name as the operator that was called has it."""
    name = names.get(error.argument or "")
    text = str(error)
    if name is None or error.argument is None or not text.startswith(error.argument):
        return error
    made = type(error)(name + text[len(error.argument) :])
    made.__dict__.update(error.__dict__, argument=name)
    return made


def call_site() -> str:
    """File and line of the caller's program."""
    frame = _getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
