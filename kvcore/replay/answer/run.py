# SPDX-License-Identifier: Apache-2.0
"""A run with its answer, as the command line, sweeps and clusters all make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvcore.replay.answer.answer import Answer, answer_of
from kvcore.replay.answer.baseline import run_baseline
from kvcore.replay.report.identity import hashes_of, settled
from kvcore.replay.serving.replay import OffloadReplay

if TYPE_CHECKING:
    from kvcore.replay.models.profile import ModelProfile
    from kvcore.replay.options import OffloadOptions
    from kvcore.replay.report.offloaded import OffloadReport
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["Shown", "answered", "figures_of", "finish"]


class Shown(Protocol):
    """Called after each step with the replay, and with what the run is."""

    def __call__(self, replay: Any, label: str = ..., /) -> None:
        """A step has ended."""


def finish(
    report: OffloadReport,
    requests: Sequence[TraceRequest],
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Shown | None = None,
) -> Answer:
    """Serve the baseline of a run that has ended, and hold them against each other."""

    def shown(replay: Any) -> None:
        if progress is not None:
            progress(replay, "baseline")

    if report.interrupted:
        from kvcore.replay.answer.baseline import Baseline

        return answer_of(report, requests, Baseline(None, "it was interrupted"))
    baseline = run_baseline(requests, report.model, report.options, stop=stop, progress=shown)
    return answer_of(report, requests, baseline)


def figures_of(
    report: OffloadReport, answer: Answer, requests: Sequence[TraceRequest]
) -> dict[str, Any]:
    """Everything of a run, of types that JSON has, the answer first.

    The same run gives the same values, but for ``seconds``.
    """
    hashes = hashes_of(requests, report.model, report.device)
    seeds = {"seed": report.options.seed, "sample_seed": report.options.sample_seed}
    everything = {**answer.to_dict(), **report.to_dict(), "seeds": seeds, "hashes": hashes}
    return {name: settled(value) for name, value in everything.items()}


def answered(
    requests: Sequence[TraceRequest], model: ModelProfile, options: OffloadOptions
) -> dict[str, Any]:
    """Serve a trace with its baseline; returns `figures_of` it."""
    report = OffloadReplay(requests, model, options).run()
    return figures_of(report, finish(report, requests), requests)
