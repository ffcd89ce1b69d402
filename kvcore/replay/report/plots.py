# SPDX-License-Identifier: Apache-2.0
"""The plots of a report's page; each axis has a label in words with its unit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Plot", "plots_of"]

WITH, WITHOUT = "with offload", "without offload"
COLOURS = {WITH: "#0969da", WITHOUT: "#bc4c00"}
DASHES = {WITH: "solid", WITHOUT: "dash"}
PARTS = ("#57606a", "#8ddb8c", "#d1242f", "#c8ccd1")
HEIGHT = 340


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of plotly, what it shows, and how to read it; height in pixels."""

    title: str
    reading: str
    figure: Any
    height: int = HEIGHT


def plots_of(objects: Any, report: Mapping[str, Any]) -> Iterator[Plot]:
    """The plots that the report has figures for; ``objects`` is plotly.graph_objects."""
    draw = _Draw(objects, report)
    yield from draw.search()
    yield from draw.batches()
    yield from draw.step()
    yield from draw.link()
    yield from draw.latencies()
    yield from draw.over_time()


class _Draw:
    def __init__(self, objects: Any, report: Mapping[str, Any]) -> None:
        self._objects, self._report = objects, report
        on_device = report["options"]["policy"] == "none"
        self._sides: dict[str, Mapping[str, Any]] = {WITHOUT if on_device else WITH: report}
        if report.get("baseline") is not None:
            self._sides[WITHOUT] = report["baseline"]

    def _figure(self, x: str, y: str) -> Any:
        figure = self._objects.Figure()
        figure.update_layout(
            template="plotly_white",
            margin={"l": 70, "r": 15, "t": 35, "b": 55},
            legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            font={"size": 13},
            hovermode="closest",
        )
        figure.update_xaxes(title_text=x, automargin=True)
        figure.update_yaxes(title_text=y, automargin=True)
        return figure

    def _line(
        self, figure: Any, side: str, x: Sequence[float], y: Sequence[float], mode: str = "lines"
    ) -> None:
        figure.add_trace(
            self._objects.Scatter(
                x=list(x), y=list(y), name=side, mode=mode,
                line={"color": COLOURS[side], "width": 2, "dash": DASHES[side]},
            )
        )  # fmt: skip

    def _mark(self, figure: Any, axis: str, at: float, text: str) -> None:
        """Draw a dotted line across the plot, with a text at its end."""
        shown = {"line_dash": "dot", "line_color": "#57606a"}
        if axis == "x":
            figure.add_vline(x=at, **shown)
            # Annotations of a logarithmic axis are placed by the logarithm, shapes are not.
            place = math.log10(at) if figure.layout.xaxis.type == "log" else at
            figure.add_annotation(
                x=place, y=0, yref="paper", xanchor="left", yanchor="bottom", text=text,
                showarrow=False,
            )  # fmt: skip
        else:
            figure.add_hline(
                y=at, annotation_position="bottom right", annotation_text=text, **shown
            )

    # -- the answer

    def search(self) -> Iterator[Plot]:
        """Good requests by rate of arrivals."""
        found = (self._report.get("answer") or {}).get("search")
        if not found:
            return
        figure = self._figure("requests a second (logarithmic)", "good requests, %")
        for key, side in (("offload", WITH), ("none", WITHOUT)):
            points = (found[key] or {}).get("points", ())
            rates = [point["rate"] for point in points]
            good = [100 * point["attained"] for point in points]
            self._line(figure, side, rates, good, "lines+markers")
        ticks = [each * 10.0**power for power in range(-6, 8) for each in (1, 2, 5)]
        shown = [f"{tick:g}" for tick in ticks]
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=shown)
        figure.update_yaxes(range=[0, 104])
        asked = self._report["slo"]["attain"]
        self._mark(figure, "y", 100 * asked, f"{asked:.0%} asked for")
        yield Plot(
            "Requests within the limits, by rate of arrivals",
            "Each point is a run. The highest rate is where a line falls below the dotted one.",
            figure,
        )

    def batches(self) -> Iterator[Plot]:
        """Tokens a second by batch."""
        answer = self._report.get("answer") or {}
        curves = answer.get("curves")
        if not curves:
            return
        figure = self._figure("requests in a step (logarithmic)", "token/s of decoding")
        most = 4 * max(self._report["options"]["batch"], 1)
        for key, side in (("offload", WITH), ("none", WITHOUT)):
            points = [point for point in curves[key] if point[0] <= most]
            batches, rates = [float(point[0]) for point in points], [point[1] for point in points]
            self._line(figure, side, batches, rates, "lines+markers")
        figure.update_xaxes(type="log", tickvals=[2**n for n in range(13)], tickangle=0)
        even = answer["break_even_batch"]
        reading = "Requests of the mean size that decode and do nothing else."
        if even is not None and even <= most:
            self._mark(figure, "x", even, f"even from {even}")
            reading += f" From {even} at a time on, offload is as fast as the other, or faster."
        reading += " A line ends where device memory does, or beyond what was asked for."
        yield Plot("Tokens a second by batch", reading, figure)

    # -- a step

    def step(self) -> Iterator[Plot]:
        """Where the time of a step goes."""
        figure = self._figure("ms a step, mean", "")
        names = list(self._sides)
        columns: dict[str, list[float]] = {
            "computing": [], "rows in device memory": [], "rows from the host": [], "all else": [],
        }  # fmt: skip
        for side in self._sides.values():
            steps, times = max(1, side["steps"]), side["model_time_us"]
            exposed, compute = times["exposed"], times["compute"]
            held = max(0.0, times["serve"] - exposed)
            rest = max(0.0, times["decode"] - compute - times["serve"])
            for name, us in zip(columns, (compute, held, exposed, rest), strict=True):
                columns[name].append(us / steps / 1e3)
        for (name, values), colour in zip(columns.items(), PARTS, strict=True):
            figure.add_trace(
                self._objects.Bar(
                    x=values, y=names, name=name, orientation="h", marker_color=colour
                )
            )
        figure.update_layout(barmode="stack", legend_traceorder="normal")
        figure.update_yaxes(autorange="reversed")
        yield Plot(
            "Where the time of a step goes",
            "Rows from the host are what layers wait for beyond the rows in device memory.",
            figure, 230,
        )  # fmt: skip

    def link(self) -> Iterator[Plot]:
        """How much of the host link's time is hidden."""
        times, steps = self._report["model_time_us"], max(1, self._report["steps"])
        if not times["link"]:
            return
        exposed = min(times["exposed"], times["link"])
        figure = self._figure("ms a step, mean", "")
        for name, us, colour in (
            ("hidden behind other work", times["link"] - exposed, PARTS[1]),
            ("exposed: a layer waits", exposed, PARTS[2]),
        ):
            figure.add_trace(
                self._objects.Bar(
                    x=[us / steps / 1e3], y=["host link busy"], name=name, orientation="h",
                    marker_color=colour,
                )
            )  # fmt: skip
        figure.update_layout(barmode="stack", legend_traceorder="normal")
        share = exposed / times["link"]
        yield Plot(
            "The host link",
            f"{1 - share:.0%} of its time nobody waits for; {share:.0%} is exposed.",
            figure, 200,
        )  # fmt: skip

    # -- latencies

    def latencies(self) -> Iterator[Plot]:
        """The distributions of the latencies."""
        limits = (self._report["slo"] or {}).get("limits_ms", {})
        for name, title, reading in (
            ("ttft", "Time to the first token", "From a request's arrival, queueing in it."),
            ("tpot", "Time of a token after the first", "A request's mean."),
            ("itl", "Time between two tokens", "With the prompts of others computed in between."),
            ("e2e", "Time to the last token", "From a request's arrival."),
        ):
            known = {
                side: figures["latency_quantiles_ms"]
                for side, figures in self._sides.items()
                if figures["latency_quantiles_ms"][name] is not None
            }
            if not known:
                continue
            most = max(quantiles[name][-1] for quantiles in known.values())
            unit, each = ("seconds", 1e3) if most >= 1e4 else ("milliseconds", 1.0)
            what = "tokens" if name == "itl" else "requests"
            label = f"{unit} (logarithmic)" if name == "itl" else unit
            figure = self._figure(label, f"{what} within it, %")
            for side, quantiles in known.items():
                shares = [100 * share for share in quantiles["shares"]]
                self._line(figure, side, [ms / each for ms in quantiles[name]], shares)
            figure.update_yaxes(range=[0, 104])
            if name == "itl":
                figure.update_xaxes(type="log")
            else:
                figure.update_xaxes(rangemode="tozero")
            if name in limits:
                self._mark(
                    figure, "x", limits[name] / each, f"limit {limits[name] / each:g} {unit}"
                )
            yield Plot(title, reading, figure, 300)

    # -- over time

    def over_time(self) -> Iterator[Plot]:
        """Steps, batch and hits over the run."""
        columns = (
            ("step_us", 1e-3, "ms a step", "Time of a step, over the run", "Prompts left out."),
            ("batch", 1.0, "requests in a step", "Requests in a step, over the run",
             "What the batch's limit and the memory leave room for."),
            ("hit_rate", 100.0, "rows that the pools held, %", "Hits of the pools, over the run",
             "Of the rows that were asked of them."),
        )  # fmt: skip
        for key, factor, label, title, reading in columns:
            sides = {
                side: figures["timeline"] for side, figures in self._sides.items()
                if (key != "hit_rate" or side == WITH) and figures["timeline"]["end_us"]
            }  # fmt: skip
            if not sides:
                continue
            figure = self._figure("seconds of the model", label)
            for side, line in sides.items():
                seconds = [us / 1e6 for us in line["end_us"]]
                self._line(figure, side, seconds, [factor * value for value in line[key]])
            if key != "hit_rate":
                figure.update_yaxes(rangemode="tozero")
            yield Plot(title, reading, figure, 280)
