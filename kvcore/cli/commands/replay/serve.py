# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay``: one trace, served once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcore.cli import status
from kvcore.cli.commands.replay.parsing import OFFLOAD_NAMES, files_read, option_named
from kvcore.cli.outputs import refuse_unwritable, write_json
from kvcore.cli.printing import say, tell

if TYPE_CHECKING:
    from kvcore.replay import (
        Deployment,
        ModelProfile,
        ModelShape,
        OffloadOptions,
        TraceRequest,
    )
    from kvcore.replay.answer.answer import Answer
    from kvcore.replay.report.report import Report

__all__ = [
    "model_of",
    "offload_options",
    "read_requests",
    "run_caches",
    "run_offload",
    "write_model",
]

GENERATED_REQUESTS = 100
#: Most rows selected in a run that is full unless said otherwise: some ten seconds.
SHORT_ROWS = 4e6
FULL_BLOCKS = 8192
MAX_TRACE_EVENTS = 1_000_000
#: Options of the command that replace a figure of the model's shape: field -> option.
SHAPE_FIELDS = {
    "num_layers": "layers", "num_heads": "num_heads", "head_size": "head_size",
    "value_head_size": "value_head_size", "dtype": "dtype",
}  # fmt: skip


def write_model(namespace: argparse.Namespace) -> int:
    """Write the model's figures as a file to edit; says what it lacks."""
    from kvcore.errors import fail
    from kvcore.files import write_whole
    from kvcore.replay import ModelProfile
    from kvcore.replay.models.writing import missing_figures, model_toml

    path = namespace.write_model
    others = [name for name in namespace.written if name not in ("model", "write_model")]
    if others:
        seen = "a trace" if others[0] == "trace" else option_named(others[0])
        fail("--write-model", "no other option but --model", seen)
    if not path.endswith(".toml"):
        fail("--write-model", "a file called .toml", repr(path))
    refuse_unwritable(path, reads=files_read(namespace))
    model = ModelProfile.find(namespace.model or "tiny-sparse")
    write_whole(path, model_toml(model))
    missing = ", ".join(missing_figures(model))
    say(f"{path}: the figures of {model.name}" + (f"; missing: {missing}" if missing else ""))
    return status.OK


def read_requests(namespace: argparse.Namespace) -> tuple[str, list[TraceRequest]]:
    """Read or generate the trace; returns where it is from, and its requests."""
    from kvcore.cli.log import standard_input
    from kvcore.errors import fail
    from kvcore.replay import generate_trace, read_trace
    from kvcore.replay.traces.reader import bounded_lines

    if namespace.trace is None:
        count = namespace.requests or GENERATED_REQUESTS
        return f"generated, seed {namespace.seed}", list(generate_trace(count, seed=namespace.seed))
    if namespace.trace == "-":
        lines = bounded_lines(standard_input().readline)
        requests = read_trace(lines, limit=namespace.requests)
    else:
        requests = read_trace(namespace.trace, limit=namespace.requests)
    if not requests:
        fail(namespace.trace, "at least one request", "none")
    alone = sum(not request.shares for request in requests)
    if alone:
        said = f"{alone:,} of {len(requests):,} requests have no hash_ids and share no prefix"
        return f"{namespace.trace} ({said})", requests
    return namespace.trace, requests


# ---------------------------------------------------------------- real caches
def run_caches(namespace: argparse.Namespace) -> int:
    """Serve the trace into real caches."""
    from kvcore.cli.interrupt import Interrupt
    from kvcore.cli.progress import progress_of
    from kvcore.errors import ParamInvalidError
    from kvcore.replay import Replay

    refuse_unwritable(namespace.json, reads=files_read(namespace))
    shape = _shape(namespace)
    num_blocks = _num_blocks(namespace, shape)
    source, requests = read_requests(namespace)
    try:
        replay = Replay(
            requests,
            shape,
            num_blocks=num_blocks,
            block_size=namespace.block_size,
            layout=namespace.layout,
            max_batch=namespace.batch,
            chunk_tokens=namespace.chunk,
            seed=namespace.seed,
            verify_samples=namespace.verify_samples,
            num_threads=namespace.threads,
        )
    except ParamInvalidError as error:
        if not (error.argument or "").startswith("request "):
            raise
        raise ParamInvalidError(f"{error}; {_more_blocks(namespace)}") from None
    with Interrupt() as interrupt, progress_of(namespace.progress) as progress:
        report = replay.run(stop=interrupt.is_set, progress=progress)
    _write(namespace, source, report, {
        "trace": source, "seed": namespace.seed, **report.to_dict(),
    })  # fmt: skip
    return _ended(namespace, report)


def _shape(namespace: argparse.Namespace) -> ModelShape:
    from dataclasses import replace

    from kvcore.replay import ModelProfile

    model = ModelProfile.find(namespace.model or "tiny")
    changes: dict[str, Any] = {
        field: getattr(namespace, name)
        for field, name in SHAPE_FIELDS.items()
        if name in namespace.written
    }
    if not changes:
        return model.shape
    return replace(model.shape, name=f"{model.name}, changed", **changes)


def _more_blocks(namespace: argparse.Namespace) -> str:
    """Which options change how many blocks there are."""
    if "host_blocks" in namespace.written:
        return "--blocks makes the pool larger"
    said = f"--cache-mib (now {namespace.cache_mib}) makes the pool larger"
    return f"{said}, and with fewer --layers as many bytes hold more blocks"


def _num_blocks(namespace: argparse.Namespace, shape: ModelShape) -> int:
    from kvcore.errors import fail

    if "host_blocks" in namespace.written:
        return int(namespace.host_blocks)
    mebibytes, block_bytes = namespace.cache_mib, namespace.block_size * shape.token_bytes
    num_blocks = mebibytes * 2**20 // block_bytes
    if not num_blocks:
        least = f"at least one block of {block_bytes} bytes"
        fail(option_named("cache_mib"), least, f"{mebibytes} MiB")
    return int(num_blocks)


# ---------------------------------------------------------------- offload
def model_of(namespace: argparse.Namespace) -> ModelProfile | Deployment:
    """The model asked for, or the deployment."""
    from kvcore.errors import fail
    from kvcore.replay import Deployment, ModelProfile

    if namespace.deployment is None:
        return ModelProfile.find(namespace.model or "tiny-sparse")
    if namespace.model is not None:
        fail("--model", "no model together with --deployment, which says its own", "both")
    return Deployment.find(namespace.deployment)


def offload_options(
    namespace: argparse.Namespace,
    model: ModelProfile | Deployment,
    requests: Sequence[TraceRequest],
) -> OffloadOptions:
    """The options asked for; what was left open is as the deployment says, or by the trace."""
    from kvcore.errors import fail
    from kvcore.replay import Deployment, OffloadOptions
    from kvcore.replay.serving.fit import host_blocks_of

    values: dict[str, Any] = {
        name: getattr(namespace, name) for name in OFFLOAD_NAMES if name in namespace.written
    }
    if namespace.prefill == "none":
        if "prefill_tokens_per_s" in values:
            fail("--prefill", "no --prefill-tokens-per-s together with none", "both")
        values["prefill_tokens_per_s"] = None
    if "tiers" in values:
        # With tiers the caches of a request are on the device; what else was asked for is refused.
        values.setdefault("policy", "none")
    if isinstance(model, Deployment):
        _take_defaults(values, model)
        model = model.model
    steps = sum(request.output_length for request in requests)
    short = steps * max(1, model.topk) * model.layers <= SHORT_ROWS
    values.setdefault("fidelity", "full" if short else "sampled")
    if values["fidelity"] == "full":
        values.setdefault("host_blocks", FULL_BLOCKS)
    held = host_blocks_of(model, namespace.block_size, namespace.host_gib)
    values.setdefault("host_blocks", held)
    if namespace.search is not None and "arrivals" not in values:
        values["arrivals"] = "time"
    if namespace.perfetto is not None:
        values["max_trace_events"] = MAX_TRACE_EVENTS
    return OffloadOptions(**values)


def _take_defaults(values: dict[str, Any], deployment: Deployment) -> None:
    """What a deployment's file says of options that are not written."""
    for name, value in deployment.serving.items():
        if name == "pool" and values.get("policy") in ("none", "previous"):
            continue  # the one has none, the other but one size
        values.setdefault(name, value)
    if "prefill" in deployment.figures:
        values.setdefault("prefill_tokens_per_s", deployment.own("prefill"))


def run_offload(
    namespace: argparse.Namespace, source: str, requests: Sequence[TraceRequest]
) -> int:
    """Serve the trace with the full cache on the host of a modelled device."""
    from kvcore.cli.interrupt import Interrupt
    from kvcore.cli.progress import progress_of
    from kvcore.errors import fail
    from kvcore.replay.answer.baseline import why_none
    from kvcore.replay.answer.run import serve

    if namespace.html is not None:
        from kvcore.replay.report.html import check_plotly

        check_plotly()
    outputs = (namespace.json, namespace.perfetto, namespace.html)
    refuse_unwritable(*outputs, reads=files_read(namespace))
    model = model_of(namespace)
    options = offload_options(namespace, model, requests)
    if namespace.expect is not None:
        why = why_none(model, options)
        if why:
            fail("--expect", "a run with a baseline to decide by", why)
    with Interrupt() as interrupt, progress_of(namespace.progress) as progress:
        jobs = namespace.jobs or os.cpu_count() or 1
        served = serve(
            requests, model, options, stop=interrupt.is_set, progress=progress, jobs=jobs
        )
    answer, report = served.answer, served.report
    figures = {"trace": source, "seed": namespace.seed, **served.figures()}
    _write(namespace, source, report, figures, answer)
    if namespace.perfetto is not None:
        dropped = served.replay.save_trace(namespace.perfetto)
        if dropped:
            tell(f"kvcore replay: {dropped:,} events did not fit the trace")
    if namespace.html is not None:
        from kvcore.replay.report.html import write_html

        write_html(namespace.html, figures, report.table(source))
    ended = _ended(namespace, report)
    if ended == status.OK and namespace.expect not in (None, answer.decision):
        tell(f"kvcore replay: expected {namespace.expect}, the answer is {answer.decision}")
        return status.FAILED
    return ended


# ---------------------------------------------------------------- both
def _write(
    namespace: argparse.Namespace,
    source: str,
    report: Report,
    figures: dict[str, Any],
    answer: Answer | None = None,
) -> None:
    """Print the answer and the table, write the JSON that is asked for."""
    from kvcore.cli.commands.replay.table import print_report

    if namespace.json != "-":  # first, so that it is seen though the disk be full
        print_report(report, source, answer, figures)
    if namespace.json is not None:
        write_json(namespace.json, figures)


def _ended(namespace: argparse.Namespace, report: Report) -> int:
    """What a run ends with; says which rows are wrong, and that it was interrupted."""
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
