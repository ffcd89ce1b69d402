# SPDX-License-Identifier: Apache-2.0
"""``kvcore calibrate``: fit a deployment's free figures to measurements."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvcore.cli import status
from kvcore.cli.outputs import refuse_unwritable, write_json
from kvcore.cli.parser import Parser, Subparsers
from kvcore.cli.printing import say

if TYPE_CHECKING:
    from kvcore.replay.prediction.calibration import Calibration

DESCRIPTION = """\
Fit what is free in a deployment to measured steps, which the replay serves; print the free
figures, the rows, what is left of each, and what no row determines. docs/predicting.md describes
the file."""

EPILOG = """\
Exit status: 0; 2 for measurements that cannot be read or that determine nothing of what is free,
and for what cannot be written; 130 after Ctrl-C."""


def register(subparsers: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="fit a deployment's free figures to measured steps",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "measurements", metavar="MEASUREMENTS",
        help="a .toml file, or measurements that ship: docs/predicting.md lists them",
    )  # fmt: skip
    parser.add_argument("--write", metavar="FILE", help="write the fitted deployment as TOML")
    parser.add_argument("--json", metavar="FILE", help="write the fit as JSON; - prints it alone")
    parser.set_defaults(run=run, parser=parser)


def run(namespace: argparse.Namespace) -> int:
    """Fit, print, write."""
    from kvcore.files import write_whole
    from kvcore.replay.deployments.write import as_toml
    from kvcore.replay.prediction.calibration import calibrated
    from kvcore.replay.prediction.measurements import PUBLISHED, Measurements

    named = namespace.measurements
    reads = [] if named in PUBLISHED else [named]
    refuse_unwritable(namespace.write, namespace.json, reads=reads)
    measurements = Measurements.find(named)
    found = calibrated(measurements)
    if namespace.json != "-":
        _print(found)
    if namespace.write is not None:
        text = as_toml(found.deployment)
        if namespace.write == "-":
            say(text, lines=True)
        else:
            write_whole(namespace.write, text)
    if namespace.json is not None:
        write_json(namespace.json, _figures(found))
    return status.OK


def _figures(found: Calibration) -> dict[str, Any]:
    of = found.measurements
    return {
        "kind": "calibration", "name": of.name, "source": of.source,
        "deployment": of.deployment.name, "hash": found.deployment.digest,
        "free": {
            str(p): {"value": value, "start": start}
            for p, value, start in zip(found.parameters, found.values, found.start, strict=True)
        },
        "rows": [
            {"name": row.name, "measured_ms": row.ms, "residual": residual}
            for row, residual in zip(found.rows, found.residuals, strict=True)
        ],
        "table_rows": [row.name for row in found.table_rows],
        "determined": found.rank, "not_determined": list(found.loose),
        "assumed": dict(of.assumed),
    }  # fmt: skip


def _print(found: Calibration) -> None:
    from rich import box
    from rich.table import Table

    from kvcore.cli.console import cell, show

    of = found.measurements
    say(f"kvcore calibrate: {of.name}")
    say(f"  deployment {of.deployment.name}; {of.source or 'no source is given'}")
    if found.parameters:
        table = Table(box=box.SIMPLE_HEAD, title="free figures", title_justify="left")
        for name in ("figure", "fitted", "began at", "determined"):
            table.add_column(name, justify="left" if name == "figure" else "right", overflow="fold")
        for p, value, start in zip(found.parameters, found.values, found.start, strict=True):
            loose = "not by itself" if str(p) in found.loose else "yes"
            table.add_row(cell(str(p)), f"{value:.6g}", f"{start:.6g}", loose)
        show(table)
        table = Table(box=box.SIMPLE_HEAD, title="rows they are fitted to", title_justify="left")
        for name in ("row", "measured, ms", "fitted, ms", "residual"):
            table.add_column(name, justify="left" if name == "row" else "right", overflow="fold")
        for row, left in zip(found.rows, found.residuals, strict=True):
            ms = row.ms * (1 + left)
            table.add_row(cell(row.name), f"{row.ms:.2f}", f"{ms:.2f}", f"{left:+.2%}")
        show(table)
    for line in _words(found):
        say(f"  {line}")


def _words(found: Calibration) -> list[str]:
    free, rows = len(found.parameters), len(found.rows)
    lines = []
    if found.table_rows:
        names = ", ".join(row.name for row in found.table_rows)
        lines.append(f"the table of steps has {len(found.table_rows)} rows: {names}")
    if free:
        lines.append(f"{free} free figures, {rows} rows, {found.rank} combinations determined")
    if found.rank < free:
        lines.append(
            f"no row determines {', '.join(found.loose)}: only what they come to together, and the"
            " rest is where the fit began"
        )
    if free and free >= rows:
        lines.append("as many free figures as rows: fitted, predicts nothing of these rows")
    if found.rank:
        worst = max(map(abs, found.residuals))
        lines.append(f"largest residual {worst:.2%}")
    return lines
