# SPDX-License-Identifier: Apache-2.0
"""rich's console, with this program's manners."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvcore.cli.printing import printable, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["cell", "output", "show"]

#: Of lines where nobody folds them.
UNFOLDED = 10_000


def output() -> Console:
    """A console on standard output that leaves a broken pipe to `kvcore.cli.main`."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich calls this while it handles the BrokenPipeError, and would exit with 1

    return Output()


def cell(value: str) -> Text:
    """A table's cell with nothing in it that rich takes for markup or a terminal for a command."""
    from rich.text import Text

    return Text(printable(value, lines=True))


def show(table: Table) -> None:
    """Print a table: as wide as the terminal is; a line each row in a pipe or a file."""
    console = output()
    if console.is_terminal or "COLUMNS" in os.environ:
        console.print(table)
        return
    console.width = UNFOLDED
    with console.capture() as captured:
        console.print(table)
    say("\n".join(line.rstrip() for line in captured.get().splitlines()), lines=True)
