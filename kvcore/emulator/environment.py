# SPDX-License-Identifier: Apache-2.0
"""Variables of the environment: the machine's own, a real CANN's, and what children read.

``settings`` are variables from which a child process starts the same machine again; the
others are what torch_npu and its operators read of an installed CANN.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from kvcore.emulator.installed import HOME
from kvcore.errors import fail

__all__ = [
    "CHECKS",
    "CLOCKS",
    "DEFAULT_TOOLS",
    "SOCS",
    "TOOLS",
    "Settings",
    "apply",
    "foreign",
    "from_environment",
    "tools_of",
    "variables",
]

SOCS = ("A2", "A3", "950")
CHECKS = ("off", "report", "raise")
CLOCKS = ("wall", "model")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck", "leakcheck")
#: The tools that run by default; the two others suit finished programs, and cost more.
DEFAULT_TOOLS = TOOLS[:3]

SOC = "KVCORE_EMULATE"
DEVICES = "KVCORE_EMULATE_DEVICES"
MEMORY = "KVCORE_EMULATE_MEMORY"
CHECK = "KVCORE_EMULATE_CHECK"
TOOL = "KVCORE_EMULATE_TOOL"
REPORT = "KVCORE_EMULATE_REPORT"
CLOCK = "KVCORE_EMULATE_CLOCK"
PROFILE = "KVCORE_EMULATE_PROFILE"
TRACE = "KVCORE_EMULATE_TRACE"
#: A file of ``kvcore emulate``, into which each process below it writes how many reports it made.
STATUS = "KVCORE_EMULATE_STATUS"

#: Of a sourced set_env.sh: names of folders, and search paths that hold folders of a CANN.
_FOLDERS = (
    "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "ASCEND_AICPU_PATH",
    "ASCEND_RUNTIME_PATH", "ASCEND_CUSTOM_OPP_PATH", "TOOLCHAIN_HOME", "ATB_HOME_PATH",
)  # fmt: skip
_SEARCH_PATHS = ("LD_LIBRARY_PATH", "PYTHONPATH")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a machine is started with.

    soc:     "A2", "A3" or "950".
    devices: how many.
    memory:  bytes of each device, None for the default of kvcore.emulator.memory.
    check:   "off", "report" or "raise".
    tools:   what is looked for, of TOOLS.
    report:  a file for reports, of which each process makes one of its own; None: none.
    clock:   "wall" or "model", by which events measure time.
    profile: a TOML file with the model clock's figures, None for the SoC's own.
    trace:   a file for the model clock's trace, of which each process makes one; None: none.
    """

    soc: str = "A3"
    devices: int = 1
    memory: int | None = None
    check: str = "report"
    tools: tuple[str, ...] = DEFAULT_TOOLS
    report: str | None = None
    clock: str = "wall"
    profile: str | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        if self.soc not in SOCS:
            fail("soc", "one of " + ", ".join(SOCS), repr(self.soc))
        if isinstance(self.devices, bool) or not isinstance(self.devices, int):
            fail("devices", "an int from 1 to 16", repr(self.devices))
        if not 1 <= self.devices <= 16:
            fail("devices", "an int from 1 to 16", self.devices)
        if self.memory is not None and (
            isinstance(self.memory, bool)
            or not isinstance(self.memory, int)
            or not 1 << 20 <= self.memory <= 1 << 40
        ):
            fail("memory", "bytes of a device, an int from 1 MiB to 1 TiB, or None", self.memory)
        if self.check not in CHECKS:
            fail("check", "one of " + ", ".join(CHECKS), repr(self.check))
        if not all(tool in TOOLS for tool in self.tools):
            fail("tools", "names among " + ", ".join(TOOLS), repr(self.tools))
        if self.clock not in CLOCKS:
            fail("clock", "one of " + ", ".join(CLOCKS), repr(self.clock))
        for name in ("report", "profile", "trace"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                fail(name, "the name of a file, or None", repr(value))
            if value is not None and name != "report" and self.clock != "model":
                fail(name, "None with clock='wall'", repr(value))


def tools_of(text: str) -> tuple[str, ...]:
    """The tools of a list with commas; an unknown one is refused by Settings."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """The settings that a parent process left for its children; None if there are none."""
    soc = environ.get(SOC, "").strip()
    if not soc:
        return None

    def number(name: str, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            fail(name, "an integer", repr(text))

    memory = environ.get(MEMORY, "").strip()
    return Settings(
        soc,
        number(DEVICES, environ.get(DEVICES, "1")),
        number(MEMORY, memory) if memory else None,
        environ.get(CHECK, "report"),
        tools_of(environ.get(TOOL, ",".join(DEFAULT_TOOLS))),
        environ.get(REPORT) or None,
        environ.get(CLOCK) or "wall",
        environ.get(PROFILE) or None,
        environ.get(TRACE) or None,
    )


def variables(settings: Settings) -> dict[str, str]:
    """The variables with which a process, and its children, are such a machine."""
    home = str(HOME)
    made = {
        "ASCEND_HOME_PATH": home,
        "ASCEND_TOOLKIT_HOME": home,
        "ASCEND_OPP_PATH": str(HOME / "opp"),
        "ASCEND_RUNTIME_PATH": str(HOME / "runtime"),
        "ASCEND_CUSTOM_OPP_PATH": str(HOME / "opp" / "vendors" / "customize"),
        SOC: settings.soc,
        DEVICES: str(settings.devices),
        CHECK: settings.check,
        TOOL: ",".join(settings.tools),
    }
    if settings.memory is not None:
        made[MEMORY] = str(settings.memory)
    if settings.clock != "wall":
        made[CLOCK] = settings.clock
    for name, value in (
        (REPORT, settings.report), (PROFILE, settings.profile), (TRACE, settings.trace)
    ):  # fmt: skip
        if value is not None:
            made[name] = str(Path(value).absolute())
    return made


def library_path(environ: Mapping[str, str] = os.environ) -> str:
    """LD_LIBRARY_PATH for child processes: torch may load torch_npu before it starts the machine.

    The order in which torch loads what is installed for ``torch.backends`` is the file system's.
    """
    own = [str(HOME / "lib64"), str(HOME / "opp" / "vendors" / "customize" / "op_api" / "lib")]
    rest = [part for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part not in own]
    return ":".join(own + [part for part in rest if part])


def _is_cann(folder: str) -> bool:
    """Whether a folder of a search path is one that set_env.sh of a CANN puts there."""
    if folder.startswith(str(HOME)):
        return False
    parts = folder.lower().split("/")
    return any(part == "ascend" or part.startswith(("ascend-toolkit", "cann")) for part in parts)


def foreign(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that name a real CANN, with what of each does."""
    found = {
        name: environ[name]
        for name in _FOLDERS
        if environ.get(name) and not environ[name].startswith(str(HOME))
    }
    for name in _SEARCH_PATHS:
        parts = [part for part in environ.get(name, "").split(":") if _is_cann(part)]
        if parts:
            found[name] = ":".join(parts)
    return found


def apply(settings: Settings, environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Put the machine's variables in place of a real CANN's; returns what was set aside."""
    aside = foreign(environ)
    for name, value in aside.items():
        if name not in _SEARCH_PATHS:
            del environ[name]
            continue
        gone = value.split(":")
        environ[name] = ":".join(p for p in environ[name].split(":") if p not in gone)
        if name == "PYTHONPATH" and environ is os.environ:
            sys.path[:] = [path for path in sys.path if path not in gone]
    for name in (MEMORY, REPORT, CLOCK, PROFILE, TRACE):
        environ.pop(name, None)
    environ.update(variables(settings))
    environ["LD_LIBRARY_PATH"] = library_path(environ)
    return aside
