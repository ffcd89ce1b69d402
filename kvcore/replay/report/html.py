# SPDX-License-Identifier: Apache-2.0
"""One self-contained page of a report: the answer, then plots by plotly (the extra ``report``)."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.errors import BackendUnavailableError
from kvcore.files import write_whole
from kvcore.replay.report.plots import Plot, plots_of
from kvcore.replay.report.side_by_side import side_by_side

__all__ = ["check_plotly", "write_html"]

STYLE = """
:root { --ink: #1c2024; --soft: #5b6570; --line: #d9dee3 }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; color: var(--ink); margin: 0 auto;
  max-width: 62rem; padding: 1rem }
h1 { font-size: 1.15rem; font-weight: 600; color: var(--soft); margin: 0 0 .5rem }
h2 { font-size: 1.1rem; margin: 2rem 0 .25rem }
p { margin: .25rem 0 .5rem }
.answer { font-size: 1.3rem; line-height: 1.4; border-left: .4rem solid #8b949e;
  padding: .3rem 0 .3rem 1rem; margin: 0 0 1rem }
.yes { border-color: #1a7f37 } .no { border-color: #b35900 } .undecided { border-color: #6639ba }
.reading { color: var(--soft); font-size: .95rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .95rem; width: 100% }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere }
td:first-child, th:first-child { font-weight: 600; min-width: 7.5rem }
"""


def check_plotly() -> Any:
    """plotly, or BackendUnavailableError that says how to get it."""
    try:
        import plotly  # noqa: F401
        from plotly import graph_objects
    except ImportError as error:
        raise BackendUnavailableError(
            "html: expected plotly for the plots, got none installed: pip install plotly",
            argument="html",
            expected="plotly",
        ) from error
    return graph_objects


def write_html(
    path: str | os.PathLike[str], report: Mapping[str, Any], rows: Sequence[tuple[str, str]]
) -> None:
    """Write the page.

    report: the figures of a run, as its JSON has them; rows: the rows of its table.
    The page needs no network, since plotly's program is part of it.
    Raises BackendUnavailableError, OSError.
    """
    objects = check_plotly()
    title = f"kvcore replay: {report['model']['name']}, {report['device']}"
    parts = [f"<h1>{html.escape(title)}</h1>", _answer(report), _sides(report)]
    for place, plot in enumerate(plots_of(objects, report)):
        parts.append(_section(plot, place))
    parts.append(f"<h2>All figures</h2>{_table(rows)}")
    write_whole(
        path,
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n",
    )


def _answer(report: Mapping[str, Any]) -> str:
    answer = report.get("answer")
    if answer is None:
        return ""
    kind = report["decision"] or "none"
    lines = "".join(f"<li>{html.escape(line)}.</li>" for line in answer["because"])
    return f'<p class="answer {kind}">{html.escape(answer["sentence"])}</p><ul>{lines}</ul>'


def _sides(report: Mapping[str, Any]) -> str:
    rows = side_by_side(report)
    if not rows:
        return ""
    head = "<tr><th></th><th>with offload</th><th>without</th></tr>"
    return f'<div class="wide"><table>{head}{_cells(rows)}</table></div>'


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    return f"<table>{_cells(rows)}</table>"


def _cells(rows: Sequence[tuple[str, ...]]) -> str:
    return "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )


def _section(plot: Plot, place: int) -> str:
    drawn = plot.figure.to_html(
        full_html=False,
        include_plotlyjs=place == 0,
        div_id=f"plot{place}",
        default_height=f"{plot.height}px",
        config={"responsive": True, "displaylogo": False, "displayModeBar": False},
    )
    return (
        f"<section><h2>{html.escape(plot.title)}</h2>"
        f'<p class="reading">{html.escape(plot.reading)}</p>{drawn}</section>'
    )
