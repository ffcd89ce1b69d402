# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay`` with the full cache on the host."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.cli import status
from kvcore.cli.outputs import refuse_unwritable, write_json
from kvcore.cli.printing import tell
from kvcore.cli.replay_options import files_read

if TYPE_CHECKING:
    from kvcore.replay.models.profile import ModelProfile
    from kvcore.replay.options import OffloadOptions
    from kvcore.replay.report.offloaded import OffloadReport
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["model_of", "options_of", "run_offload", "table_rows"]

#: Most rows selected in a run that is full unless said otherwise: some ten seconds.
SHORT_ROWS = 4e6
FULL_BLOCKS = 8192
SAMPLED_BLOCKS = 65_536
MAX_TRACE_EVENTS = 1_000_000
GIB = 2**30


def model_of(namespace: argparse.Namespace) -> ModelProfile:
    """The model asked for."""
    from kvcore.replay.models.profile import ModelProfile

    return ModelProfile.find(namespace.model or "tiny-sparse")


def options_of(
    namespace: argparse.Namespace, model: ModelProfile, requests: Sequence[TraceRequest]
) -> OffloadOptions:
    """The options asked for."""
    from kvcore.errors import fail
    from kvcore.replay.options import PREFILL_TOKENS_PER_S, OffloadOptions

    rate = namespace.prefill_tokens_per_s
    if namespace.prefill == "none":
        if rate is not None:
            fail("--prefill", "no --prefill-tokens-per-s beside none", "both")
    elif rate is None:
        rate = PREFILL_TOKENS_PER_S
    fidelity = namespace.fidelity
    if fidelity is None:
        steps = sum(request.output_length for request in requests)
        rows = steps * max(1, model.topk) * model.layers
        fidelity = "full" if rows <= SHORT_ROWS else "sampled"
    blocks = FULL_BLOCKS if fidelity == "full" else SAMPLED_BLOCKS
    chosen = {
        name: getattr(namespace, name)
        for name in (
            "policy", "pool", "device", "drafts", "accept", "write_policy", "arrivals",
            "abort_share", "sample_requests", "sample_layers",
        )
        if getattr(namespace, name) is not None
    }  # fmt: skip
    return OffloadOptions(
        fidelity=fidelity,
        batch=namespace.batch,
        prefill_tokens_per_s=rate,
        host_blocks=blocks if namespace.blocks is None else namespace.blocks,
        block_size=namespace.block_size,
        chunk=namespace.chunk,
        seed=namespace.seed,
        verify_samples=namespace.verify_samples,
        max_trace_events=MAX_TRACE_EVENTS if namespace.perfetto is not None else 0,
        **chosen,
    )


def run_offload(
    namespace: argparse.Namespace, source: str, requests: Sequence[TraceRequest]
) -> int:
    """Serve the trace, print the table, write the files asked for."""
    from kvcore.cli.interrupt import Interrupt
    from kvcore.cli.progress import progress_of
    from kvcore.replay.serving.offloaded import OffloadReplay

    if namespace.html is not None:
        from kvcore.replay.report.html import check_plotly

        check_plotly()
    outputs = (namespace.json, namespace.perfetto, namespace.html)
    refuse_unwritable(*outputs, reads=files_read(namespace))
    model = model_of(namespace)
    replay = OffloadReplay(requests, model, options_of(namespace, model, requests))
    with Interrupt() as interrupt, progress_of(namespace.progress) as progress:
        report = replay.run(stop=interrupt.is_set, progress=progress)

    rows = table_rows(report, source)
    figures = {"trace": source, "seed": namespace.seed, **report.to_dict()}
    if namespace.json != "-":
        _print_table(rows, report.interrupted)
    if namespace.json is not None:
        write_json(namespace.json, figures)
    if namespace.perfetto is not None:
        dropped = replay.save_trace(namespace.perfetto)
        if dropped:
            tell(f"kvcore replay: {dropped:,} events did not fit the trace")
    if namespace.html is not None:
        from kvcore.replay.report.html import write_html

        write_html(namespace.html, figures, rows)
    for mismatch in report.mismatches[:5]:
        tell(f"kvcore replay: {mismatch}")
    if not report.ok:
        return status.FAILED
    if report.interrupted:
        written = [p for p in (namespace.json, namespace.perfetto, namespace.html) if p]
        files = f"; written so far: {', '.join(written)}" if written else ""
        tell(f"kvcore replay: interrupted, what is done is above{files}")
        return status.INTERRUPTED
    return status.OK


def _print_table(rows: Sequence[tuple[str, str]], interrupted: bool) -> None:
    from rich import box
    from rich.table import Table

    from kvcore.cli.console import cell, show

    title = "kvcore replay, offload" + (" (interrupted: so far)" if interrupted else "")
    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, cell(value))
    show(table)


def table_rows(report: OffloadReport, source: str) -> list[tuple[str, str]]:
    """The table's rows."""
    totals, counters, options, model = (
        report.totals,
        report.counters,
        report.options,
        report.model,
    )
    block_bytes = options.block_size * model.row_bytes * model.layers
    steps = max(1, totals.steps)
    return [
        ("trace", source),
        (
            "model",
            f"{model.name}: {model.layers} layers in {len(model.groups)} groups, top-k"
            f" {model.topk}, {model.row_bytes:,} bytes a row",
        ),
        ("device", f"{report.device.name} ({report.device.note})"),
        (
            "fidelity",
            f"{options.fidelity}: {totals.real_rows:,} of {report.rows:,.0f} rows were real"
            f" ({report.real_share:.2%})",
        ),
        (
            "pool",
            f"{options.policy}, {report.pool_entries:,} entries a request and group;"
            f" {options.write_policy}",
        ),
        (
            "requests",
            f"{report.finished_requests:,} of {report.total_requests:,} finished,"
            f" {totals.aborted:,} aborted, {counters.preemptions:,} preemptions;"
            f" batch {totals.request_steps / steps:.1f} of {options.batch} on average",
        ),
        (
            "prefill",
            (
                f"{options.prefill_tokens_per_s:,.0f} tokens/s ({report.prefill_basis})"
                if options.prefill_tokens_per_s is not None
                else report.prefill_basis
            ),
        ),
        (
            "prefix hits",
            _share(counters.prefix_hit_tokens, counters.prompt_tokens, "prompt tokens"),
        ),
        (
            "hit rate",
            f"{_percent(report.hit_rate)} of the rows asked of the pools;"
            f" {totals.recent:,.0f} rows were newest tokens",
        ),
        (
            "bytes",
            f"to the device {_gigabytes(totals.h2d_bytes)}; to the host"
            f" {_gigabytes(totals.d2h_bytes)} in decode, {_gigabytes(totals.prefill_bytes)} in"
            f" prefill; received {_gigabytes(totals.received_bytes)}; served from pools"
            f" {_gigabytes(totals.hit_bytes)}",
        ),
        (
            "peak memory",
            f"device {totals.peak_device_bytes / GIB:.2f} of"
            f" {report.device.capacity_bytes / GIB:.0f} GiB without weights; host"
            f" {totals.peak_host_blocks:,} of {report.host_capacity:,} blocks,"
            f" {totals.peak_host_blocks * block_bytes / GIB:.2f} GiB",
        ),
        (
            "step",
            f"{_milliseconds(report.step_us)} on average over {totals.steps:,}; compute"
            f" {totals.compute_us / steps / 1e3:.3f}, waiting for rows"
            f" {totals.serve_us / steps / 1e3:.3f}",
        ),
        (
            "token/s",
            f"{_number(report.decode_tokens_per_s)} in decode, {_number(report.tokens_per_s)}"
            f" in all ({totals.end_us / 1e6:,.1f} s of the model)",
        ),
        ("overlap", f"{_percent(report.overlap)} of the link's time in decode held nobody up"),
        ("assumed", f"{_percent(report.assumed_share)} of a step rests on assumed figures"),
        ("verified", _verified(report)),
        ("time", f"{report.elapsed_ns / 1e9:.1f} s here"),
    ]  # fmt: skip


def _share(part: float, whole: float, what: str) -> str:
    rate = f" ({part / whole:.1%})" if whole else ""
    return f"{part:,} of {whole:,} {what}{rate}"


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3f} GB"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _milliseconds(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.3f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _verified(report: OffloadReport) -> str:
    if not report.verified_samples:
        return "nothing"
    verdict = "all right" if report.ok else f"{len(report.mismatches):,} ROWS WRONG"
    return f"{report.verified_samples:,} samples, {verdict}"
