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
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["model_of", "options_of", "run_offload"]

#: Most rows selected in a run that is full unless said otherwise: some ten seconds.
SHORT_ROWS = 4e6
FULL_BLOCKS = 8192
SAMPLED_BLOCKS = 65_536
MAX_TRACE_EVENTS = 1_000_000


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
    from kvcore.cli.replay_table import print_report
    from kvcore.replay.serving.replay import OffloadReplay

    if namespace.html is not None:
        from kvcore.replay.report.html import check_plotly

        check_plotly()
    outputs = (namespace.json, namespace.perfetto, namespace.html)
    refuse_unwritable(*outputs, reads=files_read(namespace))
    model = model_of(namespace)
    replay = OffloadReplay(requests, model, options_of(namespace, model, requests))
    with Interrupt() as interrupt, progress_of(namespace.progress) as progress:
        report = replay.run(stop=interrupt.is_set, progress=progress)

    figures = {"trace": source, "seed": namespace.seed, **report.to_dict()}
    if namespace.json != "-":
        print_report(report, source)
    if namespace.json is not None:
        write_json(namespace.json, figures)
    if namespace.perfetto is not None:
        dropped = replay.save_trace(namespace.perfetto)
        if dropped:
            tell(f"kvcore replay: {dropped:,} events did not fit the trace")
    if namespace.html is not None:
        from kvcore.replay.report.html import write_html

        write_html(namespace.html, figures, report.table(source))
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
