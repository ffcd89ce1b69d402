# SPDX-License-Identifier: Apache-2.0
"""A replay's report as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.replay.answer.answer import Answer
    from kvcore.replay.report.report import Report

__all__ = ["print_report"]


def print_report(
    report: Report,
    source: str,
    answer: Answer | None = None,
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Print a run to standard output: the answer and what decides it, then the table.

    source: where the trace is from; figures: as the JSON has them, for what is compared.
    """
    from rich import box
    from rich.table import Table

    from kvcore.cli.console import cell, show
    from kvcore.cli.printing import say
    from kvcore.replay.report.side_by_side import side_by_side

    if answer is not None:
        say(answer.sentence)
        for line in answer.because:
            say(f"- {line}.")
        say("")
        sides = side_by_side(figures or {})
        if sides:
            compared = Table(box=box.SIMPLE_HEAD)
            compared.add_column("", style="bold", overflow="fold")
            for name in ("with offload", "without"):
                compared.add_column(name, justify="right", overflow="fold")
            for row in sides:
                compared.add_row(*map(cell, row))
            show(compared)

    title = report.title + (" (interrupted: so far)" if report.interrupted else "")
    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in report.table(source):
        table.add_row(name, cell(value))
    show(table)
