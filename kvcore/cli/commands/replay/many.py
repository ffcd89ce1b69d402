# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay --compare`` and ``--sweep``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.cli import status
from kvcore.cli.commands.replay.parsing import files_read, refuse_outputs
from kvcore.cli.printing import say, tell

if TYPE_CHECKING:
    from kvcore.replay.report.compared import Row
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["run_compare", "run_sweep"]

SHOWN = 100


def run_compare(namespace: argparse.Namespace) -> int:
    """Print the differences of two reports."""
    from kvcore.replay.report.compared import rows_of
    from kvcore.replay.report.comparison import compare, read_report

    refuse_outputs(namespace)
    first, second = namespace.compare
    differences = compare(read_report(first), read_report(second))
    beyond = [d for d in differences if d.relative > namespace.tolerance]
    rows = rows_of(differences)
    if rows:
        _print_compared(rows[:SHOWN], namespace.tolerance)
    if len(rows) > SHOWN:
        say(f"  and {len(rows) - SHOWN} more")
    say(f"{len(differences)} values differ, {len(beyond)} by more than {namespace.tolerance:.2%}")
    return status.FAILED if beyond else status.OK


def _print_compared(rows: Sequence[Row], tolerance: float) -> None:
    from rich import box
    from rich.table import Table

    from kvcore.cli.console import cell, show

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    table.add_column("figure", overflow="fold")
    table.add_column("before", justify="right", overflow="fold")
    table.add_column("after", justify="right", overflow="fold")
    table.add_column("", no_wrap=True)
    for row in rows:
        size = f"{row.relative:.2%}" if row.relative != float("inf") else "differs"
        mark = "!" if row.relative > tolerance else ""
        table.add_row(mark, size, *map(cell, (row.path, row.before, row.after)), row.reading)
    show(table)


def run_sweep(namespace: argparse.Namespace, requests: Sequence[TraceRequest]) -> int:
    """Run the points that have no report yet, print all."""
    from kvcore.cli.commands.replay.serve import model_of, offload_options
    from kvcore.cli.interrupt import Interrupt
    from kvcore.cli.outputs import (
        refuse_shared,
        refuse_unwritable,
        refuse_unwritable_folder,
        write_json,
    )
    from kvcore.replay.answer.spread import spread_over_seeds
    from kvcore.replay.sweep import grid, run_on_ray, run_processes

    reads = files_read(namespace)
    refuse_unwritable(namespace.json, reads=reads)
    refuse_unwritable_folder(namespace.results)
    model = model_of(namespace)
    options = offload_options(namespace, model, requests)
    folder = Path(namespace.results)
    points = grid(namespace.sweep, options, model, requests, folder)
    # A point's report is written, or read where an earlier run left it.
    named = {point.options.device or "" for point in points}
    devices = {device for device in named if device.endswith(".toml")}
    own = [] if namespace.json in (None, "-") else [namespace.json]
    refuse_shared((point.path for point in points), (*reads, *devices, *own))
    refuse_unwritable(namespace.json, reads=devices)
    jobs = namespace.jobs or os.cpu_count() or 1
    reports: dict[str, dict[str, Any]] = {}
    terminal = sys.stderr is not None and sys.stderr.isatty()
    show = namespace.progress in ("bar", "lines") or (namespace.progress == "auto" and terminal)
    with Interrupt() as interrupt:
        if namespace.ray is not None:
            found = run_on_ray(namespace.ray, points, model, requests, interrupt.is_set)
        else:
            found = run_processes(points, model, requests, jobs, interrupt.is_set)
        for point, report in found:
            reports[point.name] = report
            if show:
                tell(f"sweep: {len(reports)} of {len(points)}: {point.name}")
    ordered = {point.name: reports[point.name] for point in points if point.name in reports}
    spread = spread_over_seeds(ordered)
    if namespace.json != "-":
        _print_sweep(ordered)
        _print_spread(spread)
    if namespace.json is not None:
        write_json(namespace.json, {"points": ordered, "spread_over_seeds": spread})
    wrong = sum(bool(r["verified"]["mismatches"]) for r in reports.values())
    if wrong:
        tell(f"kvcore replay: rows were wrong in {wrong} points")
        return status.FAILED
    if len(reports) < len(points):
        tell(
            f"kvcore replay: interrupted: {len(reports)} of {len(points)} points are in {folder};"
            " the same command goes on from there"
        )
        return status.INTERRUPTED
    return status.OK


def _print_sweep(reports: dict[str, dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    from kvcore.cli.console import cell, show

    table = Table(box=box.SIMPLE_HEAD, title="kvcore replay, sweep", title_justify="left")
    table.add_column("point", no_wrap=True)
    for name in (
        "worth it", "times the baseline", "hit rate", "step, ms", "token/s", "overlap",
        "to the device, GB", "real rows",
    ):  # fmt: skip
        table.add_column(name, justify="right", overflow="fold")
    for name, r in reports.items():
        times = r["answer"]["speed_up"]
        step, rate, overlap = r["model_time_us"]["step"], r["hit_rate"], r["overlap"]
        table.add_row(
            cell(name),
            r["decision"] or "-",
            "-" if times is None else f"{times:.2f}",
            "-" if rate is None else f"{rate:.2%}",
            "-" if step is None else f"{step / 1e3:.3f}",
            f"{r['tokens_per_s']['decode'] or 0:,.1f}",
            "-" if overlap is None else f"{overlap:.1%}",
            f"{r['bytes']['h2d'] / 1e9:,.2f}",
            f"{r['rows']['real_share']:.2%}",
        )
    show(table)


def _print_spread(spread: dict[str, dict[str, Any]]) -> None:
    """Print how far figures move from one workload to another, apart from any interval."""
    for name, found in spread.items():
        parts = [f"{found['seeds']} seeds, which are workloads of their own"]
        if "hit_rate" in found:
            low, high = found["hit_rate"]
            parts.append(f"hit rate {low:.2%} to {high:.2%}")
        if "step_us" in found:
            low, high = (us / 1e3 for us in found["step_us"])
            parts.append(f"step {low:.3f} to {high:.3f} ms")
        if "speed_up" in found:
            low, high = found["speed_up"]
            parts.append(f"{low:.2f} to {high:.2f} times the baseline")
        say(f"{name}: {'; '.join(parts)}")
