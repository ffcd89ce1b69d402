# SPDX-License-Identifier: Apache-2.0
"""``kvcore bench``: each operator compared with a plain copy of the same bytes, numpy and torch."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.cli import status
from kvcore.cli.outputs import refuse_unwritable
from kvcore.cli.parser import Parser, Subparsers
from kvcore.cli.printing import say, tell

if TYPE_CHECKING:
    from kvcore.benchmarks import Measurement


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds above 0 and up to 3600, got {text!r}")
    return value


def register(subparsers: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the operators and copyto, numpy and torch",
        description="Measure each case's functions in turn, many rounds, and print medians. A "
        "ratio is kvcore's time over the peer's: below 1 kvcore is faster. Peers that are not "
        "installed are left out.",
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="cases to run (default: all)")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument(
        "--seconds", type=_seconds, default=2.0, help="time for each case (default: 2)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="append the run to this file")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="show the change against the file's last run"
    )
    parser.add_argument(
        "--rows",
        metavar="OLD,NEW",
        help="run kvcore under these rows of its table of CPUs in turn; the ratio to a row is the "
        "last one's time over it (rows: kvcore info, docs/performance.md)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="say which path and border each case takes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)


def run(namespace: argparse.Namespace) -> int:
    """Measure and print; Ctrl-C ends it behind a case, and what was measured is printed."""
    from kvcore import cpus
    from kvcore.benchmarks import CASES, explain, history, measure
    from kvcore.cli.interrupt import Interrupt
    from kvcore.errors import fail

    if namespace.list:
        for case in CASES.values():
            say(f"{case.name:16} {case.summary}")
        return status.OK
    names = namespace.cases or list(CASES)
    for name in names:
        if name not in CASES:
            fail("CASE", f"one of {', '.join(CASES)}", repr(name))
    rows = namespace.rows.split(",") if namespace.rows is not None else []
    known = [row.name for row in cpus.ROWS]
    for row in rows:
        if row not in known or len(rows) < 2 or len(set(rows)) < len(rows):
            fail("--rows", f"two or more of {', '.join(known)}, each once", repr(namespace.rows))
    refuse_unwritable(namespace.save)
    if namespace.save:
        history.refuse_others(namespace.save)
    before = history.last(namespace.compare) if namespace.compare else {}
    measured = []
    with Interrupt() as interrupt:
        for name in _progress(names, quiet=namespace.json):
            measured.append(measure(CASES[name], namespace.seconds, rows))
            if interrupt.is_set():
                break
    if namespace.json:
        say(json.dumps([one.to_json() for one in measured], indent=2), lines=True)
    else:
        _print(measured, before)
        if namespace.explain:
            for one in measured:
                say(f"{one.name}: {explain(one.nbytes)}")
    if len(measured) < len(names):
        tell("kvcore bench: interrupted, what is done is above; nothing is saved")
        return status.INTERRUPTED
    if namespace.save:  # at last: what was measured is seen though the disk be full
        import kvcore

        history.append(namespace.save, kvcore.info()["cpu"], measured)
    return status.OK


def _progress(names: list[str], quiet: bool) -> Any:
    if quiet:
        return names
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(
        names, "measuring", console=console, transient=True, disable=not console.is_terminal
    )


def _print(measured: list[Measurement], before: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    from kvcore.cli.console import show

    table = Table(box=box.SIMPLE)
    table.add_column("case", overflow="fold")
    table.add_column("median", justify="right", overflow="fold")
    table.add_column("GB/s", justify="right", overflow="fold")
    table.add_column("kvcore's time over", overflow="fold")
    if before:
        table.add_column("before", justify="right", overflow="fold")
    for one in measured:
        row = [
            f"{one.name}: {one.summary}",
            _time(one.medians["kvcore"]),
            f"{one.gigabytes_per_second:.1f}",
            ", ".join(f"{peer} {one.ratio(peer):.2f}x" for peer in one.medians if peer != "kvcore"),
        ]
        if before:
            row.append(_change(one, before.get(one.name)))
        table.add_row(*row)
    show(table)


def _time(nanoseconds: float) -> str:
    for unit, size in (("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.2f} {unit}"
    return f"{nanoseconds:.0f} ns"


def _change(one: Measurement, before: Any) -> str:
    # Against the copy measured in the same run: the machine's own mood cancels.
    if before is None or "copyto" not in before["ratios"] or "copyto" not in one.medians:
        return "new"
    return f"{one.ratio('copyto') / before['ratios']['copyto'] - 1:+.0%}"
