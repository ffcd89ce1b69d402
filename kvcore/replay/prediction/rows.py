# SPDX-License-Identifier: Apache-2.0
"""A measured row, served by the replay: the one path that every predicted time comes by.

The row's requests are all there at once, their prompts computed elsewhere, and `OffloadReplay`
serves them.  What the sampled requests miss depends on ids and pools alone, so a row that is served
again with other figures of time takes what was learned the first time.
"""

from __future__ import annotations

import json
from typing import Any

from kvcore.errors import fail
from kvcore.replay.clock.mean_step import MeanStep
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.options import OffloadOptions
from kvcore.replay.prediction.measurements import MeasuredRow, Measurements
from kvcore.replay.report.offloaded import OffloadReport
from kvcore.replay.serving.fit import fit
from kvcore.replay.serving.rehearsal import Rehearsal
from kvcore.replay.serving.replay import OffloadReplay
from kvcore.replay.serving.sampled import OffloadedSampled
from kvcore.replay.traces.reader import HASH_BLOCK_TOKENS, read_trace

__all__ = ["RowRuns", "check_rows", "row_command", "row_lines", "row_options"]

#: Of a row's requests, which are alike: one is served for real, in one layer.
REAL_REQUESTS = 1
REAL_LAYERS = 1
VERIFIED = 100
DEFAULT_BLOCKS = 65_536
#: Each keeps the caches of its sampled request.
MOST_LEARNED = 8


def row_lines(row: MeasuredRow) -> list[bytes]:
    """The row's requests as a trace: as many as run at a time, which share nothing."""
    blocks = -(-row.input // HASH_BLOCK_TOKENS)
    return [
        json.dumps({
            "timestamp": 0, "input_length": row.input, "output_length": row.output,
            "hash_ids": list(range(n * blocks, (n + 1) * blocks)),
        }).encode()
        for n in range(row.batch)
    ]  # fmt: skip


def row_options(row: MeasuredRow, deployment: Deployment) -> OffloadOptions:
    """The options that a row is served with."""
    values: dict[str, Any] = dict(deployment.serving)
    values |= {"policy": row.policy, "batch": row.batch}
    if row.pool is not None or row.policy in ("none", "previous"):
        values["pool"] = row.pool
    if row.drafts is not None:
        values["drafts"] = row.drafts
    size = values.get("block_size", 128)
    blocks = row.batch * (-(-(row.input + row.output + 1) // size) + 1)
    if row.policy == "none" and deployment.model.weights_gib is None:
        values["weights_gib"] = 0.0  # it was measured, so it fitted
    return OffloadOptions(
        fidelity="sampled", prefill_tokens_per_s=None, sample_requests=REAL_REQUESTS,
        sample_layers=REAL_LAYERS, verify_samples=VERIFIED,
        host_blocks=max(DEFAULT_BLOCKS, blocks), **values,
    )  # fmt: skip


def row_command(row: MeasuredRow, deployment: Deployment, trace: str) -> list[str]:
    """The command that serves the row's trace with the same options."""
    options = row_options(row, deployment)
    words = ["kvcore", "replay", trace, "--deployment", deployment.name, "--policy", row.policy]
    if options.pool is not None:
        words += ["--pool", str(options.pool)]
    if options.weights_gib is not None:
        words += ["--weights-gib", f"{options.weights_gib:g}"]
    for name, value in (
        ("batch", options.batch), ("drafts", options.drafts), ("accept", options.accept),
        ("fidelity", options.fidelity), ("prefill", "none"), ("baseline", "off"),
        ("sample-requests", options.sample_requests), ("sample-layers", options.sample_layers),
        ("verify-samples", options.verify_samples), ("blocks", options.host_blocks),
    ):  # fmt: skip
        words += [f"--{name}", str(value)]
    return words


def check_rows(measurements: Measurements) -> None:
    """Raise ParamInvalidError naming the first row that cannot be served: before any is."""
    for row in measurements.rows:
        deployment = measurements.deployment_of(row.mode)
        try:
            fit(deployment, row_options(row, deployment))
        except ValueError as error:
            fail(f"row {row.name}", "one that can be served", str(error))


class RowRuns:
    """Serves rows, and keeps what the sampled requests missed.

    alike: rows that differ in their batch alone take the same sampled request, so that what tells
           them apart is the batch and not the draw; else each is as a replay by itself would be.
    """

    def __init__(self, *, alike: bool = False) -> None:
        self._alike = alike
        self._learned: dict[str, Rehearsal] = {}

    def run(self, row: MeasuredRow, deployment: Deployment) -> OffloadReport:
        """The report of the row's replay."""
        options, requests = row_options(row, deployment), read_trace(row_lines(row))
        if row.policy == "none":
            return OffloadReplay(requests, deployment, options).run()
        ids = None if deployment.ids is None else deployment.ids.to_dict()
        key = repr((
            deployment.model.name, deployment.model.topk, deployment.model.row_bytes, ids,
            row.policy, 0 if self._alike else row.batch, options.pool, options.drafts,
            options.accept, options.seed, options.block_size, row.input, row.output,
        ))  # fmt: skip
        known = self._learned.get(key)
        if known is not None:
            serving = OffloadedSampled(deployment, options, rehearsal=known)
            return OffloadReplay.served_by(requests, serving).run()
        replay = OffloadReplay(requests, deployment, options)
        report = replay.run()
        if not report.interrupted and isinstance(replay.serving, OffloadedSampled):
            while len(self._learned) >= MOST_LEARNED:
                del self._learned[next(iter(self._learned))]
            self._learned[key] = replay.serving.rehearsal
        return report

    @staticmethod
    def mean(row: MeasuredRow, report: OffloadReport) -> MeanStep:
        """The mean step of the row's replay."""
        return MeanStep.of(report, row.input + row.output / 2)
