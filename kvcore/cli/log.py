# SPDX-License-Identifier: Apache-2.0
"""The lines of a log, read one by one: calls in them, and how many lines were not understood."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from kvcore.cli.calls import call_in, names_arrays
from kvcore.errors import KVCoreError, fail

if TYPE_CHECKING:
    from kvcore.ops.questions import Question

__all__ = ["Log", "bounded_lines", "opened", "standard_input"]

#: Characters of a line that is looked at; a call of any operator takes some hundreds.
MAX_LINE = 2**16
#: Of a line at all: what has no end by then is no log.
MAX_SKIPPED = 2**26
#: Stands for a line that is too long to be looked at.
LONG = "(a line that is too long)"


class Log:
    """``for number, call in log``: lines that hold a call, numbered from 1.

    While it is iterated: ``lines`` that were read and are not blank, ``calls`` among them, and
    ``close``, the first line that names arrays of the operator and is no call, with the number of
    such lines.
    """

    lines: int
    calls: int
    close: int

    def __init__(self, lines: Iterable[str], question: Question, order: str = "auto") -> None:
        self._lines, self._question, self._order = lines, question, order
        self.lines = self.calls = self.close = 0
        self.first_close: int | None = None
        self.reason: str | None = None

    @property
    def not_understood(self) -> int:
        """Lines that hold no call, as far as this program can tell."""
        return self.lines - self.calls

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(self._lines, 1):
            if not line.strip():
                continue
            self.lines += 1
            call, reason = self._call(line)
            if call is not None:
                self.calls += 1
                yield number, call
            elif reason is not None or names_arrays(line, self._question):
                self._note(number, reason)

    def refuse(self, number: int, reason: str) -> None:
        """That line holds no call after all: an array is missing."""
        self.calls -= 1
        self._note(number, reason)

    def _call(self, line: str) -> tuple[dict[str, Any] | None, str | None]:
        try:
            return call_in(line, self._question, self._order), None
        except KVCoreError as error:
            return None, str(error)

    def _note(self, number: int, reason: str | None) -> None:
        self.close += 1
        if self.first_close is None:
            self.first_close = number
            self.reason = reason or "no shape and dtype for each of its arrays"

    def summary(self) -> str:
        """How much of it was understood, in a sentence."""
        read = (
            f"{_many(self.lines, 'line')} read, {self.calls} with a call,"
            f" {self.not_understood} not understood"
        )
        if self.first_close is None:
            return read
        return (
            f"{read}; {self.close} of these name{'s' * (self.close == 1)} arrays of"
            f" {self._question.operator.name}, first line {self.first_close}: {self.reason}"
        )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def standard_input() -> IO[Any]:
    """Of bytes where there are any.  Raises ParamInvalidError in a process without it."""
    if sys.stdin is None:
        fail("-", "standard input", "none")
    found: IO[Any] = getattr(sys.stdin, "buffer", sys.stdin)
    return found


@contextmanager
def opened(path: str) -> Iterator[Iterator[str]]:
    """The lines of a file, or of standard input for "-"; bytes that are no UTF-8 are replaced."""
    if path == "-":
        yield bounded_lines(standard_input())
        return
    with open(path, "rb") as file:
        yield bounded_lines(file)


def bounded_lines(file: IO[Any]) -> Iterator[str]:
    """Lines of at most MAX_LINE characters; a longer one is replaced by LONG.

    Raises ParamInvalidError for a line of more than MAX_SKIPPED characters.
    """
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        skipped = len(line)
        newline = b"\n" if isinstance(line, bytes) else "\n"
        whole = line.endswith(newline) or skipped < MAX_LINE
        if not whole:
            while rest := file.readline(MAX_LINE):
                skipped += len(rest)
                if rest.endswith(newline):
                    break
                if skipped > MAX_SKIPPED:
                    fail(f"--log, line {number}", f"at most {MAX_SKIPPED} bytes", "more")
            yield LONG
            continue
        yield line.decode("utf-8", "replace") if isinstance(line, bytes) else line
