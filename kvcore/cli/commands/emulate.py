# SPDX-License-Identifier: Apache-2.0
"""``kvcore emulate``: run a command with the vendor's torch_npu on the emulated machine."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvcore.cli import status
from kvcore.cli.parser import Parser, Subparsers, integer
from kvcore.cli.printing import say, tell

DESCRIPTION = """\
Run a command in which the vendor's own torch_npu works without an NPU: every Python process below
it is an emulated machine."""

EPILOG = """\
  kvcore emulate --soc A3 -- pytest tests/
  kvcore emulate                           what would be started, and what is missing
  eval "$(kvcore emulate --soc A3 --shell)"   the same for everything that this shell starts

Exit status: COMMAND's; 3 if that is 0 and a process below made a report; 2 when the machine
cannot start. A report goes to stderr when it is found; the last line says how many there were."""


def register(subparsers: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "emulate",
        usage="kvcore emulate [options] [-- COMMAND ...]",
        help="run a command with torch_npu on an emulated machine",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "program", metavar="COMMAND", nargs="*", help="after --, with its arguments"
    )
    parser.add_argument(
        "--soc", choices=("A2", "A3", "950"), default="A3", help="default: %(default)s"
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        type=integer(1, 16),
        default=1,
        help="how many, 1 to 16 (default: 1)",
    )
    parser.add_argument(
        "--memory",
        metavar="MIB",
        type=integer(1, 1 << 20),
        help="MiB of each device (default: the SoC's, but all devices together no more than half "
        "of what a process may still have)",
    )
    parser.add_argument(
        "--check",
        choices=("off", "report", "raise"),
        default="report",
        help="say on stderr what is found, or raise it in the program as well "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--tool",
        metavar="NAMES",
        type=_tools,
        default=("memcheck", "racecheck", "synccheck"),
        help="what to look for, with commas between: memcheck, racecheck, synccheck (these three "
        "by default), initcheck, leakcheck",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="also write a JSON file for each process: %%p in its name is the number of the "
        "process, which otherwise stands before the suffix",
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "model"),
        default="wall",
        help="events measure how long this computer took, or what the device of a profile would "
        "take (default: %(default)s)",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="figures for --clock model, as a TOML file (default: the SoC's own)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write a trace for Perfetto with the times of --clock model, named as --report is",
    )
    parser.add_argument(
        "--shell", action="store_true", help="print the environment for a shell, and run nothing"
    )
    parser.set_defaults(run=run, parser=parser)


def _tools(text: str) -> tuple[str, ...]:
    from kvcore.emulator import environment

    names = environment.tools_of(text)
    for name in names or ("",):
        if name not in environment.TOOLS:
            raise argparse.ArgumentTypeError(
                f"expected names among {', '.join(environment.TOOLS)}, got {name!r}"
            )
    return names


def run(namespace: argparse.Namespace) -> int:
    """Print the environment, say what there is, or run the command."""
    from kvcore.emulator import environment, installed

    memory = None if namespace.memory is None else namespace.memory << 20
    clock = namespace.clock
    for name in ("profile", "trace"):
        value = getattr(namespace, name)
        if value is not None and clock != "model":
            tell(f"kvcore emulate: --{name}: needs --clock model")
            return status.USAGE
    settings = environment.Settings(
        namespace.soc,
        namespace.devices,
        memory,
        namespace.check,
        namespace.tool,
        namespace.report,
        clock,
        namespace.profile,
        namespace.trace,
    )
    fault = _profile_fault(namespace.profile)
    if fault is not None:
        tell(f"kvcore emulate: --profile: {fault}")
        return status.USAGE
    faults = [
        fault
        for fault in (installed.platform_fault(), installed.build_fault())
        if fault is not None
    ]
    fault = installed.wheels().fault()
    if fault is not None:
        faults.append(fault)
    if namespace.shell and namespace.program:
        tell("kvcore emulate: --shell prints the environment and runs no COMMAND")
        return status.USAGE
    if not namespace.shell and not namespace.program:
        return _tell(settings, faults)
    if faults:
        tell(f"kvcore emulate: {faults[0]}")
        return status.USAGE
    environ = dict(os.environ)
    aside = environment.apply(settings, environ)
    if namespace.shell:
        for line in _shell(os.environ, environ):
            say(line)
        return status.OK
    for name, value in aside.items():
        tell(f"kvcore emulate: {name}={value} of an installed CANN is set aside")
    for name in ("report", "trace"):
        value = getattr(namespace, name)
        if value is not None and not Path(value).absolute().parent.is_dir():
            tell(f"kvcore emulate: --{name} {value}: there is no such folder")
            return status.USAGE
    with tempfile.NamedTemporaryFile("r", prefix="kvcore-emulate-") as counts:
        environ[environment.STATUS] = counts.name
        code = _run(namespace.program, environ)
        reports = _count(counts.read()) if settings.check != "off" else 0
    return status.REPORTED if code == 0 and reports else code


def _profile_fault(name: str | None) -> str | None:
    """Why a file of figures cannot be used."""
    from kvcore.errors import ParamInvalidError
    from kvcore.runtime.profile import DeviceProfile

    if name is None:
        return None
    try:
        DeviceProfile.load(name)
    except ParamInvalidError as error:
        return str(error)
    return None


def _count(text: str) -> int:
    """How many reports the processes made; says it where any of them used the device."""
    lines = [line.split() for line in text.splitlines()]
    if not lines:
        return 0
    reports, tasks = (sum(int(line[i]) for line in lines) for i in (0, 1))
    tell(
        f"kvcore emulate: {reports} report{'' if reports == 1 else 's'}; "
        f"{tasks} task{'' if tasks == 1 else 's'} of {len(lines)} "
        f"process{'' if len(lines) == 1 else 'es'} looked at"
    )
    return reports


def _tell(settings: object, faults: list[str]) -> int:
    from kvcore.emulator import environment, installed, machine, memory

    assert isinstance(settings, environment.Settings)
    wheels = installed.wheels()
    size = settings.memory or memory.default(settings.soc, settings.devices)
    say(f"soc        {settings.soc} ({machine.PRODUCTS[settings.soc]})")
    say(f"devices    {settings.devices}, {size >> 20} MiB each")
    say(f"clock      {settings.clock}")
    say(f"check      {settings.check}: {', '.join(settings.tools) or 'rules'}")
    built = len(installed.LIBRARIES) - len(installed.missing_libraries())
    say(f"libraries  {built} of {len(installed.LIBRARIES)} in {installed.HOME}")
    say(f"cann       {installed.CANN_VERSION}, for which they stand")
    say(f"torch      {wheels.torch or 'not installed'}")
    say(f"torch_npu  {wheels.torch_npu or 'not installed'}")
    say(f"tested     torch {installed.PAIR[0]} with torch_npu {installed.PAIR[1]}")
    for name, value in environment.foreign(os.environ).items():
        say(f"set aside  {name}={value}")
    for fault in faults:
        say(f"missing    {fault}")
    if not faults:
        say("start it with: kvcore emulate [options] -- COMMAND")
    return status.FAILED if faults else status.OK


def _shell(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Lines for a POSIX shell that turn one environment into the other."""
    lines = [f"unset {name}" for name in before if name not in after]
    return lines + [
        f"export {name}={shlex.quote(value)}"
        for name, value in after.items()
        if before.get(name) != value
    ]


def _run(program: list[str], environ: dict[str, str]) -> int:
    if shutil.which(program[0], path=environ.get("PATH")) is None:
        tell(f"kvcore emulate: {program[0]}: command not found")
        return status.USAGE
    # Ctrl-C reaches the command by itself: it decides how to end.  A signal that is ignored here
    # would be ignored there too; one with a handler is the command's as it always is.
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    if before[0] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _: None)
    try:
        with subprocess.Popen(program, env=environ, restore_signals=True) as child:
            signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
            code = child.wait()
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    return 128 - code if code < 0 else code
