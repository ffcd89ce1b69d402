# SPDX-License-Identifier: Apache-2.0
"""How far a replay is, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from kvcore.cli.printing import tell

__all__ = ["progress_of"]

LINES = 10
SECONDS_BETWEEN_UPDATES = 0.1


class Served(Protocol):
    """How far a replay is."""

    @property
    def seen_tokens(self) -> int:
        """Tokens served, of ``total_tokens``."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the trace."""

    @property
    def finished_requests(self) -> int:
        """Requests that have left, of ``total_requests``."""

    @property
    def total_requests(self) -> int:
        """Requests of the trace."""


class Update(Protocol):
    """Called after each step with the replay; ``label`` says which, where there are several."""

    def __call__(self, replay: Served, label: str = "replay", /) -> None: ...


@contextmanager
def progress_of(kind: str) -> Iterator[Update | None]:
    """A function to call after each step, for "auto", "bar", "lines" or "none"."""
    if kind == "auto":
        kind = "bar" if sys.stderr is not None and sys.stderr.isatty() else "none"
    if kind == "bar":
        with _bar() as update:
            yield update
    else:
        yield _Lines().update if kind == "lines" else None


@contextmanager
def _bar() -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[done]}"),
        Remaining(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=None, done="")
        last = 0.0

        def update(replay: Served, label: str = "replay", /) -> None:
            nonlocal last
            now = monotonic()
            # A step can take microseconds, drawing takes hundreds of them.
            if now - last >= SECONDS_BETWEEN_UPDATES:
                last = now
                bar.update(
                    task,
                    description=label,
                    completed=replay.seen_tokens,
                    total=replay.total_tokens,
                    done=f"{replay.finished_requests}/{replay.total_requests} requests",
                )

        yield update


class _Lines:
    """A line at the first step and at every tenth of the tokens."""

    def __init__(self) -> None:
        self._next = 0
        self._label = ""

    def update(self, replay: Served, label: str = "replay", /) -> None:
        if label != self._label:
            self._label, self._next = label, 0
        if replay.seen_tokens * LINES >= self._next * replay.total_tokens:
            self._next = replay.seen_tokens * LINES // replay.total_tokens + 1
            tell(
                f"{label}: {replay.seen_tokens} of {replay.total_tokens} tokens,"
                f" {replay.finished_requests} of {replay.total_requests} requests"
            )
