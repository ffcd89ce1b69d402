# SPDX-License-Identifier: Apache-2.0
"""What commands print: no character of an input reaches a terminal as a command to it.

Names of files, keys of JSON and lines of logs may hold escape sequences, which a terminal obeys,
and characters that turn the direction of writing.  Whatever has no picture of its own is printed
as Python writes it in a string: ``\\x1b``.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import IO, Any

__all__ = ["STANDARD_OUTPUT", "drop", "flush", "printable", "say", "tell"]

STANDARD_OUTPUT = "standard output"
#: ASCII needs no look at each character.
PLAIN = re.compile(r"[ -~]*")


def printable(text: str, *, lines: bool = False) -> str:
    """The text with escapes in place of what a terminal would not show as it is.

    lines: ends of lines stay.
    """
    if PLAIN.fullmatch(text):
        return text
    kept = "\n" if lines else ""
    return "".join(c if c.isprintable() or c in kept else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def say(text: str, *, lines: bool = False, end: str = "\n") -> None:
    """Print to standard output.  Raises OSError that names it, BrokenPipeError as it is."""
    _write(sys.stdout, printable(text, lines=lines) + end)


def tell(text: str, *, lines: bool = False) -> None:
    """Print to standard error.  Without a standard error it does nothing."""
    stream = sys.stderr
    with suppress(OSError):
        if stream is not None:
            stream.write(printable(text, lines=lines) + "\n")
            stream.flush()
            return
    drop(stream)


def _write(stream: IO[str] | None, text: str) -> None:
    if stream is None:  # a process may be started without it
        return
    with _Named():
        stream.write(text)


def flush() -> None:
    """Send off what was said.  Raises as ``say`` does."""
    if sys.stdout is not None:
        with _Named():
            sys.stdout.flush()


class _Named:
    """Errors of standard output get its name: those of a file have theirs."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            code = error.errno or 0
            raise OSError(code, error.strerror or str(error), STANDARD_OUTPUT) from error


def drop(stream: IO[str] | None) -> None:
    """Let what the stream still holds go nowhere: Python flushes it again when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError, AttributeError):
        assert stream is not None
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
