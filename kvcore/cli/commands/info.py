# SPDX-License-Identifier: Apache-2.0
"""``kvcore info``: what was found on this machine, and why something is not usable."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvcore.cli import status
from kvcore.cli.parser import Parser, Subparsers
from kvcore.cli.printing import say

#: What None means in a group of `kvcore.info()`.
NOTHING = {
    "backends ": "usable",
    "packages ": "not installed",
    "emulator usable": "yes",
    "emulator torch": "not installed",
    "emulator torch_npu": "not installed",
}


def register(subparsers: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "info",
        help="what this machine has: libraries, backends, threads, dtypes, the emulated machine",
        description="Say which libraries, backends, threads, instruction sets and dtypes were "
        "found, and why a backend or the emulated machine is not usable.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    # It still says what is in force where a setting cannot be used.
    parser.set_defaults(run=run, parser=parser, shows_settings=True)


def run(namespace: argparse.Namespace) -> int:
    """Print ``kvcore.info()``."""
    import kvcore

    facts: dict[str, Any] = kvcore.info()
    if namespace.json:
        say(json.dumps(facts, indent=2, default=str), lines=True)
        return status.OK

    from rich import box
    from rich.table import Table

    from kvcore.cli.console import cell, output

    rows = list(_rows(facts))
    console = output()
    if not console.is_terminal:  # a line each: a path that is folded cannot be searched for
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            say(f"{name:{width}}  {value}")
        return status.OK
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(cell(name), cell(value))
    console.print(table)
    return status.OK


def _rows(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _rows(value, f"{name} ")
        elif isinstance(value, list | tuple):
            yield name, ", ".join(map(str, value)) or "none"
        elif value is None:
            yield name, NOTHING.get(name) or NOTHING.get(prefix, "none")
        else:
            yield name, str(value)
