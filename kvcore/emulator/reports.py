# SPDX-License-Identifier: Apache-2.0
"""What the machine found wrong with the program that runs on it, and where that is reported.

A report is printed on stderr when it is found, kept for ``reports()``, written into the JSON file
of ``--report``, and counted for the status of ``kvcore emulate``.  Equal ones are counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvcore.errors import RaceError, StreamError

__all__ = ["Collector", "Report", "collector", "expected", "reports"]

MAX_REPORTS = 1000


@dataclass(frozen=True, slots=True)
class Report:
    """One thing that was found; equal ones are counted.

    kind:    "racecheck", "memcheck", "synccheck", "initcheck", "leakcheck", or "rule": a call that
             breaks a rule of the runtime's interface.
    symbol:  the operator or the function of the interface; of a race the later of the two.
    text:    what was wrong, in a sentence.
    lines:   where in the program, as (file, line): of a race the place of the earlier launch and of
             the later.  Line 0: the "file" says what it was instead, such as torch_npu's own call.
    streams: of a race, on which stream each of the two ran; "the host" where it is no task.
    start, end: the first range of bytes that is concerned, 0 and 0 where there is none.
    count:   how often.
    """

    kind: str
    symbol: str
    text: str
    lines: tuple[tuple[str, int], ...] = ()
    streams: tuple[str, ...] = ()
    start: int = 0
    end: int = 0
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.kind}: {self.text}{times}"


def at(place: tuple[str, int]) -> str:
    """A place in brackets, as texts have it."""
    file, line = place
    if line:
        return f" ({file}:{line})"
    return f" ({file})" if file else ""


class Collector:
    """The reports of one process, by what makes them equal."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._found: dict[Any, Report] = {}
        self._to_raise: list[tuple[Report, tuple[str, int]]] = []
        self._expected: list[dict[Any, Report]] = []
        self.check = "report"
        self.file: Path | None = None
        self.tasks = 0
        self.left_out: int = 0

    def begin(self) -> None:
        """Forget what a parent process found."""
        self._lock = threading.RLock()
        self._found = {}
        self._to_raise = []
        self._expected = []
        self.left_out = 0

    def add(self, key: object, report: Report, *, raising: bool = True) -> None:
        """Add what was found, or count it when it is known already.

        key:     equal for reports that are one and the same.
        raising: whether check="raise" raises it; False where the call has failed already.
        """
        with self._lock:
            found = self._expected[-1] if self._expected else self._found
            known = found.get(key)
            if known is not None:
                found[key] = dataclasses.replace(known, count=known.count + report.count)
                return
            if len(found) >= MAX_REPORTS:
                self.left_out += 1
                return
            found[key] = report
            if self.check == "raise" and raising:
                self._to_raise.append((report, report.lines[-1] if report.lines else ("", 0)))
            if self._expected:
                return
        self._say(f"kvcore.emulator: {report}")
        self.write()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(text, file=sys.stderr, flush=True)

    @property
    def raises(self) -> bool:
        """Whether something waits to be raised."""
        return bool(self._to_raise)

    def raise_found(self, place: tuple[str, int] | None) -> None:
        """Raise what was found: with a place only what a call from there did, else everything."""
        with self._lock:
            mine = [r for r, line in self._to_raise if place is None or line == place]
            if not mine:
                return
            self._to_raise = (
                [] if place is None else [(r, p) for r, p in self._to_raise if p != place]
            )
        _fail(mine)

    def all(self) -> list[Report]:
        """The reports in order of first appearance."""
        with self._lock:
            return list(self._found.values())

    @contextlib.contextmanager
    def expected(self) -> Iterator[list[Report]]:
        """Collect what is found in the block in the list that this yields, and nowhere else."""
        found: dict[Any, Report] = {}
        made: list[Report] = []
        with self._lock:
            self._expected.append(found)
        try:
            yield made
        finally:
            with self._lock:
                self._expected.remove(found)
                made += found.values()

    # -- files

    def write(self) -> None:
        """Write the JSON file of this process, whole or not at all."""
        if self.file is None:
            return
        data = {
            "process": os.getpid(),
            "command": sys.argv,
            "tasks": self.tasks,
            "reports": [dataclasses.asdict(report) for report in self.all()],
        }
        new = self.file.with_name(f"{self.file.name}.new")
        try:
            new.write_text(json.dumps(data, indent=2) + "\n")
            new.replace(self.file)
        except OSError as error:
            self._say(f"kvcore.emulator: {self.file}: {error.strerror}")
            self.file = None

    def summary(self) -> str:
        """The summary that is printed when the process ends."""
        number = sum(report.count for report in self.all())
        left_out = f", {self.left_out} more left out" if self.left_out else ""
        return (
            f"kvcore.emulator: {number} report{'' if number == 1 else 's'}{left_out}; "
            f"{self.tasks} task{'' if self.tasks == 1 else 's'} looked at"
        )


def _fail(found: list[Report]) -> NoReturn:
    kinds = {report.kind for report in found}
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raised = RaceError if kinds == {"racecheck"} else StreamError
    error = raised(f"{found[0]}{more}", argument="stream", seen=tuple(found))
    for report in found[1:10]:
        error.add_note(str(report))
    raise error


collector: Collector = Collector()


def reports() -> list[Report]:
    """What was found in this process since the machine started, in order of first appearance."""
    _settle()
    return collector.all()


@contextlib.contextmanager
def expected() -> Iterator[list[Report]]:
    """For tests of wrong programs: what is found inside is put into the list that this yields.

    It is filled when the block ends, is in no other place (``reports()``, stderr, the status of
    ``kvcore emulate``), and fails no test.  Work that is still queued at the end is not waited for:
    synchronise inside.  With check="raise" what is found is raised as well.
    """
    _settle()
    with collector.expected() as made:
        try:
            yield made
        finally:
            _settle()


def _settle() -> None:
    """Read what the machine has entered so far."""
    checking = sys.modules.get("kvcore.emulator.checking")
    if checking is not None:
        checking.settle()
