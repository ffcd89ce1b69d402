# SPDX-License-Identifier: Apache-2.0
"""A run and its baseline side by side: the figures by which a reader compares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["side_by_side"]

GIB = 2**30
Side = Mapping[str, Any]


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}") + unit


def _time(ms: float | None) -> str:
    if ms is None:
        return "-"
    return _number(ms / 1e3, " s") if ms >= 1e3 else _number(ms, " ms")


def _size(nbytes: float) -> str:
    if nbytes >= GIB / 10:
        return f"{nbytes / GIB:,.2f} GiB"
    return f"{nbytes / 2**20:,.1f} MiB"


def _latency(name: str) -> Callable[[Side], str]:
    def said(side: Side) -> str:
        found = side["latency_ms"][name]
        if found is None:
            return "-"
        return f"{_time(found['p50'])} / {_time(found['p90'])} / {_time(found['p99'])}"

    return said


def _step(side: Side) -> str:
    us = side["model_time_us"]["step"]
    return "-" if us is None else _time(us / 1e3)


def _good(side: Side) -> str:
    slo = side["slo"]
    if slo is None or slo["attained"] is None:
        return "-"
    return f"{slo['attained']:.1%}"


ROWS: tuple[tuple[str, Callable[[Side], str]], ...] = (
    ("token/s, prompts included", lambda side: _number(side["tokens_per_s"]["all"])),
    ("token/s of decoding", lambda side: _number(side["tokens_per_s"]["decode"])),
    ("requests in a step, mean", lambda side: f"{side['batch']:.1f}"),
    ("a step, mean", _step),
    ("first token, p50 / p90 / p99", _latency("ttft")),
    ("a token after it, p50 / p90 / p99", _latency("tpot")),
    ("between two tokens, p50 / p90 / p99", _latency("itl")),
    ("last token, p50 / p90 / p99", _latency("e2e")),
    ("good requests", _good),
    ("device memory, peak", lambda side: _size(side["memory"]["peak_device_bytes"])),
    ("host memory, peak", lambda side: _size(side["memory"]["peak_host_bytes"])),
)


def side_by_side(figures: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, with offload, without) of a report with a baseline; no rows for one without.

    Figures that neither side has are left out.
    """
    other = figures.get("baseline")
    if other is None:
        return []
    rows = [(label, said(figures), said(other)) for label, said in ROWS]
    return [row for row in rows if row[1:] != ("-", "-")]
