# SPDX-License-Identifier: Apache-2.0
"""A replay's figures as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore.replay import ReplayReport

__all__ = ["print_report"]


def print_report(report: ReplayReport, source: str) -> None:
    """Print it to standard output."""
    from rich import box
    from rich.table import Table

    from kvcore.cli.console import cell, show

    table = Table(
        box=box.SIMPLE_HEAD,
        show_header=False,
        title="kvcore replay" + (" (interrupted: so far)" if report.interrupted else ""),
        title_justify="left",
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(report, source):
        table.add_row(name, cell(value))
    show(table)


def _rows(report: ReplayReport, source: str) -> list[tuple[str, str]]:
    counters, times, shape = report.counters, report.times, report.shape
    speed, rate = report.scatter_gb_per_s, report.prefix_hit_rate
    seconds = {
        "scatter": times.scatter_ns,
        "making bytes": times.generate_ns,
        "scheduling": times.schedule_ns,
        "verifying": times.verify_ns,
    }
    return [
        ("trace", source),
        (
            "model",
            f"{shape.name}: {shape.num_layers} layers, {shape.num_heads} heads of"
            f" {shape.head_size} + {shape.value_head_size} {shape.dtype},"
            f" {shape.token_bytes:,} bytes a token",
        ),
        (
            "cache",
            f"{report.pool_capacity:,} blocks of {report.block_size} tokens, {report.layout},"
            f" {report.cache_bytes / 2**20:,.0f} MiB",
        ),
        ("requests", f"{report.finished_requests:,} of {report.total_requests:,} finished"),
        (
            "tokens written",
            f"{report.written_tokens:,}: {counters.prefill_tokens:,} prefill,"
            f" {counters.decode_tokens:,} decode, {counters.recomputed_tokens:,} recomputed",
        ),
        ("bytes written", f"{report.written_bytes:,} in {counters.steps:,} steps"),
        (
            "speed",
            f"{speed:.2f} GB/s in scatter" if speed is not None else "-",
        ),
        (
            "time",
            f"{times.elapsed_ns / 1e9:.2f} s: "
            + ", ".join(f"{name} {value / 1e9:.2f}" for name, value in seconds.items()),
        ),
        (
            "prefix hits",
            f"{counters.prefix_hit_tokens:,} of {counters.prompt_tokens:,} prompt tokens"
            + (f" ({rate:.1%})" if rate is not None else ""),
        ),
        (
            "preemptions",
            f"{counters.preemptions:,}"
            + (
                f" ({counters.recovered_tokens:,} tokens were still cached after them)"
                if counters.preemptions
                else ""
            ),
        ),
        ("copy on write", f"{counters.copies:,} blocks, {report.copied_bytes:,} bytes"),
        (
            "pool use",
            f"peak {report.pool_peak_used:,} of {report.pool_capacity:,} blocks"
            f" ({report.pool_peak_used / report.pool_capacity:.0%}), {report.pool_used:,} now,"
            f" {report.pool_evictions:,} evictions",
        ),
        ("verified", _verified(report)),
    ]


def _verified(report: ReplayReport) -> str:
    if not report.verified_samples:
        return "nothing"
    verdict = "all right" if report.ok else f"{len(report.mismatches):,} ROWS WRONG"
    return f"{report.verified_samples:,} samples, {verdict}"
