# SPDX-License-Identifier: Apache-2.0
"""Starting the machine in this process: its conditions, in order, each with its error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.emulator import environment, hooks, installed, machine, memory, modules
from kvcore.emulator.environment import Settings
from kvcore.errors import BackendUnavailableError, KVCoreError

__all__ = ["Running", "StartError", "begin", "begin_as_asked", "running", "start"]


@dataclass(frozen=True, slots=True)
class Running:
    """The machine of this process.

    soc, devices, check, tools, clock: as started.
    product:             what torch.npu.get_device_name() says.
    memory:              bytes of each device.
    limited:             the SoC has more; this is half of what the process may still have.
    set_aside:           variables of a real CANN that do not hold in this process.
    from_environment:    begun for a child process, by the variables that its parent set.
    """

    soc: str
    devices: int
    check: str
    tools: tuple[str, ...]
    clock: str
    product: str
    memory: int
    limited: bool
    set_aside: dict[str, str]
    from_environment: bool
    process: int


_running: Running | None = None


class StartError(BackendUnavailableError):
    """The emulated machine cannot start, or runs already."""


def running() -> Running | None:
    """The machine of this process, None if none was started."""
    return _running


def start(
    soc: str = "A3",
    devices: int = 1,
    memory: int | None = None,
    check: str = "report",
    *,
    tools: Sequence[str] = environment.DEFAULT_TOOLS,
    report: str | None = None,
    clock: str = "wall",
    profile: str | None = None,
    trace: str | None = None,
) -> Running:
    """Start the emulated machine in this process, before torch_npu is imported.

    soc:     "A2", "A3" or "950".
    devices: how many, 1 to 16.
    memory:  bytes of each device; None: the SoC's, but all devices together no more than half of
             what this process may still have (control group and RLIMIT_AS counted).  It is a
             promise: memory is used when it is touched.
    check:   "off": the program is only run.  "report": what is found is printed on stderr and kept
             for ``reports()``.  "raise": it is also raised, at the call that launches the later
             task of a race where a Python thread made that call, otherwise at the next wait for
             the device; RaceError for races, StreamError for what else is found.
    tools:   what is looked for: "memcheck" (freed or foreign device memory), "racecheck" (tasks and
             the host on one byte without order), "synccheck" (waits that a capture or a host
             function forbids), "initcheck" (device bytes read that nothing wrote), "leakcheck"
             (tensors that are still there at the end).  Broken rules of the runtime's interface
             are reported with any of them.
    report:  a JSON file of the reports: ``%p`` in its name is the process, whose number otherwise
             stands before the suffix; children write their own.
    clock:   "wall": events measure how long this computer took.  "model": they measure what the
             device of a profile would take, which is the same on every run; a task costs its bytes.
    profile: a TOML file of figures for the model clock (kvcore.runtime.DeviceProfile.load); None:
             those that ship for the SoC.
    trace:   a JSON file for Perfetto with the model clock's times, named as ``report`` is.

    Sets the variables ASCEND_HOME_PATH, ASCEND_OPP_PATH and their like for this process and its
    children, which become machines of their own; those of a real CANN are set aside.
    Raises ParamInvalidError for arguments, BackendUnavailableError with what to do when torch_npu
    cannot run here, is imported already, or the machine runs already with other settings.  Where
    ``kvcore emulate`` started it with the same settings, a call changes nothing.
    """
    if isinstance(tools, str):  # a string would be read as one name for each character
        tools = (tools,)
    settings = Settings(soc, devices, memory, check, tuple(tools), report, clock, profile, trace)
    if _running is not None:
        asked = environment.from_environment()
        if _running.from_environment and asked == settings:
            return _running
        raise StartError(
            "the emulated machine runs already in this process "
            f"({_running.soc}, {_running.devices} devices, check={_running.check!r}, "
            f"clock={_running.clock!r}"
            + (", started by the environment" if _running.from_environment else "")
            + "); start it once, before torch"
        )
    return begin(settings, from_environment=False)


def begin_as_asked() -> None:
    """Start what the environment asks for, in a child process; nothing if it runs already."""
    settings = environment.from_environment()
    if settings is not None and _running is None:
        begin(settings, from_environment=True)


def begin(settings: Settings, *, from_environment: bool) -> Running:
    """Start the machine with settings that were checked."""
    global _running
    for fault in (
        installed.platform_fault(),
        installed.build_fault(),
        installed.wheels().fault(),
    ):
        if fault:
            raise StartError(f"the emulated machine cannot start: {fault}")
    if "torch_npu" in sys.modules and not from_environment:
        raise StartError(
            "the emulated machine must start before torch_npu is imported, and it is: call "
            "kvcore.emulator.start() before `import torch`, which imports torch_npu by itself"
        )
    library = machine.foreign_library()
    if library:
        raise StartError(
            f"this process has loaded {library} of an installed CANN; the emulated machine needs a "
            "process that has not"
        )
    default = memory.default(settings.soc, settings.devices)
    size = settings.memory or default
    try:
        loaded = machine.load()
    except KVCoreError as error:
        raise StartError(str(error)) from error
    # A limit for pinned memory and all devices, unless the caller named a size.
    budget = 0 if settings.memory else max(memory.available() // 2, size * settings.devices)
    loaded.become(settings, size, budget)
    from kvcore.emulator import checking, faults

    checking.begin(settings)
    faults.watch()
    aside = environment.apply(settings)
    _running = Running(
        settings.soc,
        settings.devices,
        settings.check,
        settings.tools,
        settings.clock,
        machine.PRODUCTS[settings.soc],
        size,
        settings.memory is None and size < memory.DEVICE_BYTES[settings.soc],
        aside,
        from_environment,
        os.getpid(),
    )
    modules.provide()
    hooks.when_imported()
    return _running
