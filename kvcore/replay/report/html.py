# SPDX-License-Identifier: Apache-2.0
"""One self-contained page of a report, with plots by plotly (the extra ``report``)."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from typing import Any

from kvcore.errors import BackendUnavailableError
from kvcore.files import write_whole

__all__ = ["check_plotly", "write_html"]

STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }
table { border-collapse: collapse } td { padding: .2em 1em .2em 0; vertical-align: top }
td:first-child { font-weight: 600; white-space: nowrap }
"""


def check_plotly() -> Any:
    """plotly, or BackendUnavailableError that says how to get it."""
    try:
        import plotly  # noqa: F401
        from plotly import graph_objects, subplots
    except ImportError as error:
        raise BackendUnavailableError(
            "html: expected plotly for the plots, got none installed: pip install plotly",
            argument="html",
            expected="plotly",
        ) from error
    return graph_objects, subplots


def write_html(
    path: str | os.PathLike[str], report: dict[str, Any], rows: Sequence[tuple[str, str]]
) -> None:
    """Write the page.

    report: as ``OffloadReport.to_dict`` has it; rows: those of the table.
    It needs no network: plotly's program is in it.  Raises BackendUnavailableError, OSError.
    """
    objects, subplots = check_plotly()
    points = report["timeline"]
    seconds = [us / 1e6 for us in points["end_us"]]
    titles = ("Step, ms", "Hit rate", "Batch", "Host blocks in use")
    figure = subplots.make_subplots(rows=4, cols=1, shared_xaxes=True, subplot_titles=titles)
    columns = ([us / 1e3 for us in points["step_us"]], points["hit_rate"], points["batch"],
               points["host_blocks"])  # fmt: skip
    for row, values in enumerate(columns, start=1):
        figure.add_trace(objects.Scatter(x=seconds, y=values, name=titles[row - 1]), row=row, col=1)
    figure.update_xaxes(title_text="seconds of the model", row=4, col=1)
    figure.update_layout(height=900, showlegend=False, template="plotly_white")

    times, moved = report["model_time_us"], report["bytes"]
    parts = {
        "compute": times["compute"],
        "rows": max(0.0, times["decode"] - times["compute"]),
        "prefill": times["prefill"],
        "idle": times["idle"],
    }
    bars = subplots.make_subplots(
        rows=1, cols=2, subplot_titles=("Time of the model, s", "Bytes moved, GB")
    )
    bars.add_trace(objects.Bar(x=list(parts), y=[us / 1e6 for us in parts.values()]), row=1, col=1)
    bars.add_trace(objects.Bar(x=list(moved), y=[n / 1e9 for n in moved.values()]), row=1, col=2)
    bars.update_layout(height=380, showlegend=False, template="plotly_white")

    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    first = figure.to_html(full_html=False, include_plotlyjs=True, div_id="steps")
    second = bars.to_html(full_html=False, include_plotlyjs=False, div_id="sums")
    title = html.escape(f"kvcore replay: {report['model']['name']}, {report['device']}")
    write_whole(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1><table>{cells}</table>"
        f"{first}{second}</body></html>\n",
    )
