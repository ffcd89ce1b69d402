# SPDX-License-Identifier: Apache-2.0
"""The table that is printed of an offloaded replay's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.replay.clock.prefill_time import by_figures
from kvcore.replay.models.profile import PREFILL, STEP
from kvcore.replay.options import PREFILL_PROMPT_TOKENS, PREFILL_TOKENS_PER_S
from kvcore.replay.serving.fit import HOST_BLOCKS, HOST_GIB, host_blocks_of
from kvcore.replay.serving.interval import FEWEST
from kvcore.replay.traces.made_ids import MadeIds

if TYPE_CHECKING:
    from kvcore.replay.models.profile import ModelProfile
    from kvcore.replay.report.offloaded import OffloadReport

__all__ = ["table_of"]

GIB = 2**30


def table_of(report: OffloadReport, source: str) -> list[tuple[str, str]]:
    """The table's rows, as names and values; ``source`` says where the trace is from."""
    totals, counters, options, model = report.totals, report.counters, report.options, report.model
    steps = max(1, totals.steps)
    return [
        ("trace", source),
        (
            "model",
            f"{model.name}: {model.layers} layers{_selection(model)},"
            f" {model.row_bytes:,} bytes a row",
        ),
        ("device", f"{report.device.name} ({report.device.note})"),
        *_deployment(report),
        ("figures of a step", _figures_of_a_step(report)),
        (
            "fidelity",
            (
                "the steps' arithmetic alone: no row is moved"
                if report.on_device
                else f"{options.fidelity}: {totals.real_rows:,} of {report.rows:,.0f} rows were"
                f" real ({report.real_share:.2%})"
            ),
        ),
        (
            "pool",
            (
                f"none: all caches on the device; prefixes in tiers, {options.write_policy}"
                if report.tiers is not None
                else "none: all caches on the device, nothing offloaded"
                if report.on_device
                else f"{options.policy}, {report.pool_entries:,} entries a request and group;"
                f" {options.write_policy}"
            ),
        ),
        (
            "requests",
            f"{report.finished_requests:,} of {report.total_requests:,} finished,"
            f" {report.aborted_requests:,} aborted, {counters.preemptions:,} preemptions;"
            f" batch {totals.request_steps / steps:.1f} of {options.batch} on average",
        ),
        (
            "prefill",
            (
                f"{_prefill(report)} ({report.prefill_basis}){_beyond_its_prompts(report)}"
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
            f"{_percent(report.hit_rate)}{_within(report, 'hit_rate')} of distinct rows asked of"
            f" the pools; {_percent(report.hit_rate_of_queries)} of queries (each with all rows"
            f" that it wants); {totals.recent:,.0f} rows were newest tokens",
        ),
        *_ids(report),
        (
            "bytes",
            f"to the device {_gigabytes(totals.h2d_bytes)}; to the host"
            f" {_gigabytes(totals.d2h_bytes)} in decode, {_gigabytes(totals.prefill_bytes)} in"
            f" prefill; received {_gigabytes(totals.received_bytes)}; served from pools"
            f" {_gigabytes(totals.hit_bytes)}",
        ),
        (
            "peak memory",
            _peaks(report),
        ),
        (
            "step",
            f"{_milliseconds(report.step_us)}{_within(report, 'step_us')} on average over"
            f" {totals.steps:,}; compute"
            f" {totals.compute_us / steps / 1e3:.3f}{_planning(report)}, waiting for rows"
            f" {totals.serve_us / steps / 1e3:.3f}",
        ),
        (
            "token/s",
            f"{_number(report.decode_tokens_per_s)} in decode, {_number(report.tokens_per_s)}"
            f" in all ({totals.end_us / 1e6:,.1f} s of the model)",
        ),
        *_tiers(report),
        *_felt(report),
        *_sampling(report),
        ("overlap", f"{_percent(report.overlap)} of the link's time in decode held nobody up"),
        ("assumed", f"{_percent(report.assumed_share)} of a step rests on assumed figures"),
        ("verified", report.verdict),
        ("time", f"{report.elapsed_ns / 1e9:.1f} s here"),
    ]  # fmt: skip


def _deployment(report: OffloadReport) -> list[tuple[str, str]]:
    """The row that names the deployment behind all times, where one was given."""
    found = report.deployment
    if not found.from_file:
        return []
    order = {
        "ahead": "rows are read ahead of the layers",
        "in order": "each layer waits for its rows",
    }[found.serve]
    return [(
        "deployment", f"{found.name} ({found.parallel}; {order}; {found.digest}): batch, bytes and"
        " token/s are one replica's",
    )]  # fmt: skip


def _ids(report: OffloadReport) -> list[tuple[str, str]]:
    """The row that names the source of the ids, unless it is the default generator."""
    ids = report.ids
    if ids is None or ids.get("source") == MadeIds().source:
        return []
    made = ids.get("turnover", ids)
    values = ", ".join(
        f"{name} {value:.3g}" for name, value in made.items() if isinstance(value, float | int)
        and not name.endswith("_share")
    )  # fmt: skip
    said = f"made with {values} ({made['basis']}: {made['source']})"
    if ids["kind"] == "recorded":
        said = (
            f"{ids['recorded_share']:.1%} of the selections from the file ({ids['requests']:,}"
            f" requests), {ids['made_share']:.1%} {said}"
        )
    return [("ids", said)]


def _selection(model: ModelProfile) -> str:
    if not model.topk:
        return ", all tokens attended to"
    return f" in {len(model.groups)} groups, top-k {model.topk}"


def _figures_of_a_step(report: OffloadReport) -> str:
    """Which set-up the figures of a step describe, and their basis."""
    model, table = report.model, report.deployment.table
    if table is not None:
        said = f"{model.note or 'whose is not said'}; {table.basis}: {table.source}"
        batch, context = report.beyond
        if max(batch, context) > 1:
            said += (
                f"; extrapolated: up to {batch:.2g} times the table's batch and {context:.2g}"
                " times its context"
            )
        return said
    bases: dict[str, list[str]] = {}
    for key in STEP:
        bases.setdefault(model[key].basis, []).append(key)
    rests = "; ".join(f"{basis}: {', '.join(keys)}" for basis, keys in bases.items())
    return f"{model.note or 'whose is not said'}; {rests}"


def _prefill(report: OffloadReport) -> str:
    model, rate = report.model, report.options.prefill_tokens_per_s
    if by_figures(model, rate):
        token, attended = (model[key].value for key in PREFILL)
        return f"{token} us a token and {attended} us for each token before it"
    return f"{rate:,.0f} tokens/s"


def _beyond_its_prompts(report: OffloadReport) -> str:
    """A note where the default rate of prefill is used for longer prompts than it describes."""
    admitted = max(1, report.finished_requests + report.aborted_requests)
    mean = report.counters.prompt_tokens / admitted
    rate = report.options.prefill_tokens_per_s
    given = rate != PREFILL_TOKENS_PER_S or by_figures(report.model, rate)
    if given or mean <= PREFILL_PROMPT_TOKENS:
        return ""
    times = mean / PREFILL_PROMPT_TOKENS
    return f"; extrapolated: these prompts have {mean:,.0f} tokens, {times:.1f} times as many"


def _within(report: OffloadReport, figure: str) -> str:
    """The half-width of a figure's interval, for the table."""
    half = getattr(report.interval, figure, None)
    if half is None:
        return ""
    return f" ± {half:.2%}" if figure == "hit_rate" else f" ± {half / 1e3:.3f} ms"


def _planning(report: OffloadReport) -> str:
    us = report.totals.plan_us / max(1, report.totals.steps)
    return f", planning {us / 1e3:.3f}" if us else ""


def _peaks(report: OffloadReport) -> str:
    memory, device = report.memory_dict(), report.device
    weights = memory["weight_bytes"]
    beside = "without weights" if weights is None else f"beside {weights / GIB:.1f} of weights"
    said = (
        f"device {memory['peak_device_bytes'] / GIB:.2f} of"
        f" {device.capacity_bytes / GIB:.0f} GiB {beside}"
    )
    if report.on_device:
        blocks, capacity = memory["peak_device_blocks"], memory["device_blocks"]
        return f"{said}; {blocks:,} of the {capacity:,} blocks that fit there"
    return (
        f"{said}; host {memory['peak_host_blocks']:,} of {report.host_capacity:,} blocks,"
        f" {memory['peak_host_bytes'] / GIB:.2f} GiB{_limited(report)}"
    )


def _limited(report: OffloadReport) -> str:
    """A note where the number of host blocks comes from the default memory, which is assumed."""
    options = report.options
    held = host_blocks_of(report.model, options.block_size, None)
    if options.host_gib is not None or options.host_blocks != held or held == HOST_BLOCKS:
        return ""
    return f" ({HOST_GIB:.0f} GiB of host memory a device are assumed: --host-gib)"


def _felt(report: OffloadReport) -> list[tuple[str, str]]:
    """The rows of latencies, and whether the limits hold."""
    felt = report.latencies
    queued = "queueing in it"
    if report.options.arrivals == "order":
        queued = "all requests are there at once, and wait for the whole trace's turn"
    labels = {
        "ttft": ("first token", f" ({queued})"),
        "queue": ("queueing", " of it before admission"),
        "itl": ("between tokens", ", the prompts computed in between in it"),
        "tpot": ("a token", " after the first, a request's mean"),
        "e2e": ("last token", " after arrival"),
    }
    found = felt.summaries()
    rows = []
    for name, (label, note) in labels.items():
        one = found[name]
        if one is not None:
            rows.append((label, f"{one}{note}"))
    slo = report.slo_dict()
    if slo is not None and felt.attained is not None:
        holds = "the limits hold" if slo["holds"] else "the limits do not hold"
        rows.append((
            "SLO",
            f"{felt.slo}: {felt.attained:.1%} of {felt.finished:,} requests are good, of"
            f" {report.options.attain:.0%} asked for: {holds};"
            f" {slo['good_requests_per_s'] or 0:,.3f} good requests/s",
        ))  # fmt: skip
    return rows


def _tiers(report: OffloadReport) -> list[tuple[str, str]]:
    return [] if report.tiers is None else report.tiers.rows(report.totals.end_us)


def _sampling(report: OffloadReport) -> list[tuple[str, str]]:
    found = report.interval
    if found is None:
        return []
    said = f"{found.requests:,} of {found.of:,} requests, sample seed {report.options.sample_seed}"
    if found.hit_rate is None:
        said += f": too few to say how sure the figures are ({FEWEST} are the least)"
    else:
        said += "; ± is the half of a 95% interval over samples of as many, the workload fixed"
    return [("sample", said)]


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
