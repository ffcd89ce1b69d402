# SPDX-License-Identifier: Apache-2.0
"""From the command line to an exit status."""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence

import kvcore
from kvcore.about import unusable_settings
from kvcore.cli import commands, status
from kvcore.cli.interrupt import CommandInterrupt
from kvcore.cli.parser import Parser
from kvcore.cli.printing import STANDARD_OUTPUT, drop, flush, tell
from kvcore.errors import KVCoreError

__all__ = ["build_parser", "main"]

#: Of the size of a terminal.
MAX_DIGITS = 5


def build_parser() -> Parser:
    """The parser of everything: whatever module is in ``kvcore.cli.commands`` has its say."""
    parser = Parser(prog="kvcore", description=kvcore.__doc__)
    parser.add_argument("--version", action="version", version=f"kvcore {kvcore.__version__}")
    subparsers = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", parser_class=Parser
    )
    for module in sorted(pkgutil.iter_modules(commands.__path__), key=lambda found: found.name):
        importlib.import_module(f"{commands.__name__}.{module.name}").register(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns one of ``kvcore.cli.status``, whatever a user did.

    arguments: None for those of the process, which then is the command: Ctrl-C is answered with
               one line until the process has ended, as it is while ``kvcore`` is imported, and a
               fault of kvcore's own has a status too instead of being raised.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files may be anything, and the terminal may know less than they need.
        sys.stdout.reconfigure(errors="backslashreplace")
    for name in ("COLUMNS", "LINES"):
        # rich and argparse read these as numbers, however long.
        if len(os.environ.get(name, "")) > MAX_DIGITS:
            del os.environ[name]
    own = CommandInterrupt()
    if arguments is None:
        own.install()
    try:
        own.raises = True
        code = _flushed(_run(arguments))
    except BrokenPipeError:
        # Who read our output has gone.
        drop(sys.stdout)
        code = status.BROKEN_PIPE
    except KeyboardInterrupt:
        code = _interrupted()
    except Exception as error:
        own.raises = False
        # Ctrl-C in the middle of an import may come out as another error.
        if arguments is not None and not own.pressed:
            raise
        code = _interrupted() if own.pressed else _failed(error)
    own.raises = False
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        namespace = build_parser().parse_all(arguments)
    except SystemExit as end:  # argparse has printed help, the version or what is wrong
        return end.code if isinstance(end.code, int) else status.USAGE
    except BrokenPipeError:
        raise
    except OSError as error:  # help that could not be printed
        return _refused("kvcore", error)
    command = f"kvcore {namespace.command}"
    faults = unusable_settings()
    for fault in faults:
        tell(f"{command}: {fault}")
    if faults and not getattr(namespace, "shows_settings", False):
        return status.USAGE
    try:
        code: int = namespace.run(namespace)
    except BrokenPipeError:
        raise
    except (KVCoreError, MemoryError, OSError) as error:
        return _refused(command, error)
    return status.USAGE if faults else code


def _flushed(code: int) -> int:
    try:
        flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk: what was to be printed is not
        refused = _refused("kvcore", error)
        return refused if code in (status.OK, status.FAILED) else code
    return code


def _refused(command: str, error: Exception) -> int:
    """Say why not: one line, and whatever is still to be printed is printed."""
    words = str(error) or "more memory was asked for than there is"
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        words = f"{error.filename}: {error.strerror}"
        if error.filename == STANDARD_OUTPUT:
            drop(sys.stdout)
    tell(f"{command}: {words}")
    return status.USAGE


def _interrupted() -> int:
    tell("kvcore: interrupted")
    return status.INTERRUPTED


def _failed(error: Exception) -> int:
    """A fault of kvcore's own: what is needed to mend it, and a status that says nothing else."""
    tell("".join(traceback.format_exception(error)).rstrip(), lines=True)
    tell("kvcore: this is a fault of kvcore, not of its input; please report the lines above")
    return status.FAULT
