# SPDX-License-Identifier: Apache-2.0
"""The page of a run: the answer first, then plots of one scale each, with units."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvcore.replay import ModelProfile, OffloadOptions, TraceRequest
from kvcore.replay.answer.run import serve
from kvcore.replay.report.html import write_html
from kvcore.replay.report.plots import plots_of
from kvcore.replay.report.side_by_side import side_by_side

MODEL = ModelProfile.named("tiny-sparse").replace(layers=3, index_layers=(0, 1), topk=64)
REQUESTS = [TraceRequest(i, 9.0 * i, 300 + 20 * i, 12, (i,)) for i in range(10)]


def figures(**more: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "batch": 4, "pool": 256, "host_blocks": 200, "prefill_tokens_per_s": None,
        "slo": "ttft=5ms", "fidelity": "sampled", **more,
    }  # fmt: skip
    return serve(REQUESTS, MODEL, OffloadOptions(**chosen)).figures()


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return figures()


class Body(HTMLParser):
    """The words of a page in their order, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, _: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data.strip())


def test_the_sides_are_compared_figure_by_figure(report: dict[str, Any]) -> None:
    rows = {label: sides for label, *sides in side_by_side(report)}
    steps = [side["model_time_us"]["step"] / 1e3 for side in (report, report["baseline"])]
    assert rows["a step, mean"] == [f"{ms:.3g} ms" for ms in steps]
    assert rows["host memory, peak"][1] == "0.0 MiB"
    assert rows["good requests"][0].endswith("%")
    assert rows["first token, p50 / p90 / p99"][0].count("ms") == 3
    assert side_by_side({**report, "baseline": None}) == []


def test_quantiles_are_those_of_the_summaries(report: dict[str, Any]) -> None:
    found = report["latency_quantiles_ms"]
    at = {share: place for place, share in enumerate(found["shares"])}
    for name in ("ttft", "tpot", "e2e", "queue"):
        for share, key in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")):
            assert found[name][at[share]] == pytest.approx(report["latency_ms"][name][key])
    assert found["itl"][at[0.5]] == pytest.approx(report["latency_ms"]["itl"]["p50"])
    assert all(values == sorted(values) for values in found.values())


def test_each_plot_has_one_scale_and_units(report: dict[str, Any]) -> None:
    objects = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    plots = {plot.title: plot for plot in plots_of(objects, report)}
    assert list(plots) == [
        "Tokens a second by batch", "Where the time of a step goes", "The host link",
        "Time to the first token", "Time of a token after the first", "Time between two tokens",
        "Time to the last token", "Time of a step, over the run",
        "Requests in a step, over the run", "Hits of the pools, over the run",
    ]  # fmt: skip
    for plot in plots.values():
        drawn = plot.figure.to_dict()
        assert [key for key in drawn["layout"] if key.startswith("yaxis")] == ["yaxis"]
        assert drawn["layout"]["xaxis"]["title"]["text"]
        assert "_" not in drawn["layout"]["xaxis"]["title"]["text"]
        assert plot.reading.endswith(".")
    assert "limit 5 milliseconds" in str(plots["Time to the first token"].figure.layout)
    bars = {bar["name"]: bar["x"] for bar in plots["Where the time of a step goes"].figure.data}
    assert sum(values[0] for values in bars.values()) == pytest.approx(
        report["model_time_us"]["step"] / 1e3
    )
    link = [bar["x"][0] for bar in plots["The host link"].figure.data]
    assert sum(link) == pytest.approx(report["model_time_us"]["link"] / 1e3 / report["steps"])


def test_a_search_is_drawn_by_rate() -> None:
    objects = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    found = figures(search="rate", arrivals="time", slo="ttft=1us", baseline="off")
    first = next(plots_of(objects, found))
    assert first.title == "Requests within the limits, by rate of arrivals"
    points = found["answer"]["search"]["offload"]["points"]
    assert list(first.figure.data[0].x) == [point["rate"] for point in points]


def test_the_page_answers_first(report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    page = tmp_path / "page.html"
    rows = [("trace", "<script>alert(1)</script>.jsonl")]
    write_html(page, report, rows)
    text = page.read_text()
    body = Body()
    body.feed(text)
    assert not body.open
    words = [word for word in body.words if word]
    assert words[2] == report["answer"]["sentence"]
    assert words.index("with offload") < words.index("Tokens a second by batch")
    assert "<script>alert(1)</script>.jsonl" in words, "names are shown and never run"
    assert 'name="viewport"' in text
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', text)
