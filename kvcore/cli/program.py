# SPDX-License-Identifier: Apache-2.0
"""From the command line to an exit status."""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress

import kvcore
from kvcore.about import unusable_settings
from kvcore.cli import commands, status
from kvcore.cli.parser import Parser
from kvcore.errors import KVCoreError

__all__ = ["build_parser", "main"]


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
    """Run one command; returns the exit status, and never raises for what a user did."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files may be anything, and the terminal may know less than they need.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(arguments)
        _flush()
    except BrokenPipeError:
        # Who read our output has gone.  Python flushes again at exit: let that go nowhere.
        _drop_output()
        return status.BROKEN_PIPE
    except KeyboardInterrupt:
        print("kvcore: interrupted", file=sys.stderr)
        return status.INTERRUPTED
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        namespace = build_parser().parse_all(arguments)
    except SystemExit as end:  # argparse has printed help, the version or what is wrong
        return end.code if isinstance(end.code, int) else status.USAGE
    faults = unusable_settings()
    for fault in faults:
        _complain(namespace, fault)
    if faults and not getattr(namespace, "shows_settings", False):
        return status.USAGE
    try:
        code: int = namespace.run(namespace)
    except BrokenPipeError:
        raise
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        _complain(namespace, f"{error.filename}: {error.strerror}" if named else str(error))
        return status.USAGE
    except (KVCoreError, MemoryError) as error:
        _complain(namespace, str(error) or "more memory was asked for than there is")
        return status.USAGE
    return status.USAGE if faults else code


def _complain(namespace: Namespace, message: str) -> None:
    print(f"kvcore {namespace.command}: {message}", file=sys.stderr)


def _flush() -> None:
    # A process started without streams has None there.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _drop_output() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
