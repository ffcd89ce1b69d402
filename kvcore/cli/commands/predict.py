# SPDX-License-Identifier: Apache-2.0
"""``kvcore predict``: measured steps beside what the replay says of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvcore.cli import status
from kvcore.cli.outputs import refuse_unwritable, refuse_unwritable_folder, write_json
from kvcore.cli.parser import Parser, Subparsers
from kvcore.cli.printing import say

if TYPE_CHECKING:
    from kvcore.replay.prediction.predict import Predicted, Prediction

DESCRIPTION = """\
Serve measured steps with the replay, by a deployment's figures, and print what it says beside what
was measured: rows that figures were fitted to and rows that are predicted apart, two models that
know next to nothing, how far each assumed figure moves the predictions, and how many of them are
independent."""

EPILOG = """\
Exit status: 0; 2 for measurements that cannot be read and for what cannot be written; 130 after
Ctrl-C."""


def register(subparsers: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "predict",
        help="measured steps beside what the replay says of them",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "measurements", nargs="?", default="glm-5.2", metavar="MEASUREMENTS",
        help="a .toml file, or measurements that ship: docs/predicting.md lists them"
        " (default: glm-5.2)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all of it as JSON; - prints it alone")
    parser.add_argument(
        "--traces", metavar="DIR",
        help="write each row's requests as a trace, for kvcore replay with the row's command",
    )  # fmt: skip
    parser.set_defaults(run=run, parser=parser)


def run(namespace: argparse.Namespace) -> int:
    """Serve, print, write."""
    from kvcore.replay.prediction.measurements import PUBLISHED, Measurements
    from kvcore.replay.prediction.predict import predict

    named = namespace.measurements
    refuse_unwritable(namespace.json, reads=[] if named in PUBLISHED else [named])
    if namespace.traces is not None:
        refuse_unwritable_folder(namespace.traces)
    measurements = Measurements.find(named)
    if namespace.traces is not None:
        _write_traces(Path(namespace.traces), measurements)
    found = predict(measurements)
    if namespace.json != "-":
        _print(found)
    if namespace.json is not None:
        write_json(namespace.json, found.to_dict())
    return status.OK


def _write_traces(folder: Path, measurements: object) -> None:
    from kvcore.files import write_whole
    from kvcore.replay.prediction.measurements import Measurements
    from kvcore.replay.prediction.rows import row_lines

    assert isinstance(measurements, Measurements)
    folder.mkdir(parents=True, exist_ok=True)
    for place, row in enumerate(measurements.rows):
        lines = b"\n".join(row_lines(row)).decode()
        write_whole(folder / f"row{place}.jsonl", lines + "\n")


def _print(found: Prediction) -> None:
    of = found.measurements
    say(f"kvcore predict: {of.name}")
    say(f"  deployment {of.deployment.name} ({of.deployment.digest}); {of.source}")
    _rows("rows that figures are fitted to", found.of("table", "fit"), nulls=False)
    _rows("rows that are predicted", found.of("predict"), nulls=True)
    _rows("rows that are shown, not judged", found.of("show"), nulls=True)
    _sensitivity(found)
    for one in found.rows:
        outside = one.report.deployment_dict()["extrapolated"]
        if outside is not None:
            say(
                f"  {one.row.name}: steps are extrapolated, to {outside['batch']:.2g} times the"
                f" table's batch and {outside['context']:.2g} times its context"
            )
    say(f"  {found.verdict}")
    for one in found.of("predict"):
        kind = "independent" if one.row.independent else "not independent"
        say(f"  {one.row.name}: {kind}: {one.row.because or 'no reason is given'}")
    for what, taken in of.assumed.items():
        say(f"  assumed, {what}: {taken}")


def _rows(title: str, rows: list[Predicted], *, nulls: bool) -> None:
    from rich import box
    from rich.table import Table

    from kvcore.cli.console import cell, show

    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    names = ["row", "batch", "measured, ms", "replay, ms", "error", "compute", "plan", "serve"]
    names += ["hits of queries", "ratio, measured", "ratio"]
    names += ["misses only", "same as", "2 points more hits"] if nulls else []
    for name in names:
        table.add_column(name, justify="left" if name == "row" else "right", overflow="fold")
    for one in rows:
        parts, rate = one.parts_ms, one.hit_rate_of_queries
        cells = [
            one.row.name, str(one.row.batch), f"{one.row.ms:.2f}", f"{one.ms:.2f}",
            f"{one.error:+.1%}", f"{parts['compute']:.2f}", f"{parts['plan']:.2f}",
            f"{parts['serve']:.2f}", "-" if rate is None else f"{rate:.1%}",
            "-" if one.row.ratio is None else f"{one.row.ratio:.3g}",
            "-" if one.ratio is None else f"{one.ratio:.3g}",
        ]  # fmt: skip
        if nulls:
            both = [(name, ms / one.row.ms - 1) for name, ms in one.nulls.items()]
            cells += [f"{error:+.1%}" for _, error in both] or ["-", "-"]
            cells.append("-" if one.points is None else f"{one.points:+.2%}")
        table.add_row(*map(cell, cells))
    show(table)


def _sensitivity(found: Prediction) -> None:
    from rich import box
    from rich.table import Table

    from kvcore.cli.console import cell, show
    from kvcore.replay.prediction.predict import FACTOR

    rows = found.of("predict")
    if not rows:
        return
    title = f"how a prediction moves with each assumed figure, by {FACTOR:g} and times {FACTOR:g}"
    table = Table(box=box.SIMPLE_HEAD, title=title + " (fitted anew)", title_justify="left")
    table.add_column("figure", overflow="fold")
    for one in rows:
        table.add_column(one.row.name, justify="right", overflow="fold")
    keys = list(dict.fromkeys(key for one in rows for key in one.moved))
    keys.sort(key=lambda key: -max(max(map(abs, one.moved[key])) for one in rows))
    for key in keys:
        both = (one.moved[key] for one in rows)
        table.add_row(cell(key), *(f"{low:+.1%} {high:+.1%}" for low, high in both))
    show(table)
