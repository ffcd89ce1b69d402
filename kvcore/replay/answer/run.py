# SPDX-License-Identifier: Apache-2.0
"""A run with its answer, as the command line, sweeps and clusters all make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvcore.replay.answer.answer import Answer, answer_of, step_error
from kvcore.replay.answer.baseline import (
    Baseline,
    Baselines,
    baseline_options,
    run_baseline,
    why_none,
)
from kvcore.replay.answer.beside import Beside, pays
from kvcore.replay.answer.rate import RateSearch, Search, own_rate
from kvcore.replay.answer.searched import answer_of_search
from kvcore.replay.report.identity import file_hash, settled, trace_hash
from kvcore.replay.serving.fit import fit
from kvcore.replay.serving.interval import CLOCK
from kvcore.replay.serving.replay import OffloadReplay
from kvcore.replay.serving.sampled import OffloadedSampled

if TYPE_CHECKING:
    from kvcore.replay.deployments.deployment import Deployment
    from kvcore.replay.models.profile import ModelProfile
    from kvcore.replay.options import OffloadOptions
    from kvcore.replay.report.offloaded import OffloadReport
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["Served", "Shown", "answered", "finish", "serve"]


class Shown(Protocol):
    """Called after each step with the replay, and with what the run is."""

    def __call__(self, replay: Any, label: str = ..., /) -> None:
        """A step has ended."""


Stop = Callable[[], bool]


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Served:
    """A run that has ended: its replay, its report, its answer and the requests it was given."""

    replay: OffloadReplay
    report: OffloadReport
    answer: Answer
    requests: Sequence[TraceRequest]

    def figures(self) -> dict[str, Any]:
        """Everything, of types that JSON has, the answer first.

        The same run gives the same values, but for ``seconds``.
        """
        report, options = self.report, self.report.options
        seeds = {"seed": options.seed, "sample_seed": options.sample_seed}
        hashes = {"trace": trace_hash(self.requests), "deployment": report.deployment.digest}
        if options.ids is not None:
            hashes["ids"] = file_hash(options.ids)
        found = {
            **self.answer.to_dict(), **report.to_dict(), "seeds": seeds, "hashes": hashes,
        }  # fmt: skip
        return {name: settled(value) for name, value in found.items()}


def serve(
    requests: Sequence[TraceRequest],
    model: ModelProfile | Deployment,
    options: OffloadOptions,
    *,
    stop: Stop = _never,
    progress: Shown | None = None,
    jobs: int = 1,
    baselines: Baselines | None = None,
) -> Served:
    """Serve a trace as the options say, and its baseline; search for a rate where they say so.

    jobs: processes to use, this one among them: a second one serves half of a long sample, and
          the baseline.  The program that asks for it must be one that can be imported
          (multiprocessing's "spawn").  Figures do not change.
    baselines: of other runs of the same trace and model, so that none is served twice.
    Raises ParamInvalidError for what cannot be served, before any work; DeviceOutOfMemoryError
    for caches that do not fit this machine.
    """
    if options.search is not None:
        return _search(requests, model, options, stop, progress)
    with ExitStack() as stack:
        beside = None
        if jobs > 1 and pays(requests, options):
            beside = stack.enter_context(Beside(requests, model, options))
            serving = OffloadedSampled(model, options, part=(0, 2), elsewhere=beside)
            replay = OffloadReplay.served_by(requests, serving)
            stack.callback(replay.close)
            beside.start()
        else:
            replay = OffloadReplay(requests, model, options)
        report = replay.run(stop=stop, progress=progress)
        answer = finish(
            report,
            requests,
            model,
            stop=stop,
            progress=progress,
            beside=beside,
            baselines=baselines,
        )
    return Served(replay, report, answer, requests)


def answered(
    requests: Sequence[TraceRequest],
    model: ModelProfile | Deployment,
    options: OffloadOptions,
    baselines: Baselines | None = None,
) -> dict[str, Any]:
    """Serve a trace and its baseline; returns all figures."""
    return serve(requests, model, options, baselines=baselines).figures()


def finish(
    report: OffloadReport,
    requests: Sequence[TraceRequest],
    model: ModelProfile | Deployment | None = None,
    *,
    stop: Stop = _never,
    progress: Shown | None = None,
    beside: Beside | None = None,
    baselines: Baselines | None = None,
) -> Answer:
    """Serve the baseline of a run that has ended, and hold them against each other.

    model: that the run was made with; None: what the report says of it.
    beside: the process that serves it; None: this one.
    baselines: those of other runs of the same trace and model.
    """
    if report.interrupted:
        return answer_of(report, requests, Baseline(None, "it was interrupted"))
    if beside is not None:
        return answer_of(report, requests, beside.baseline(stop))
    shown = _labelled(progress, "baseline")
    baseline = (baselines or Baselines()).serve(
        requests, model or report.deployment, report.options, stop=stop, progress=shown
    )
    return answer_of(report, requests, baseline)


# -- the highest rate -------------------------------------------------------------------------


def _search(
    requests: Sequence[TraceRequest],
    model: ModelProfile | Deployment,
    options: OffloadOptions,
    stop: Stop,
    progress: Shown | None,
) -> Served:
    fit(model, options)
    own_rate(requests)  # raises for a trace without arrivals
    side = _Side(model, options, stop, progress)
    found = side.search(requests)
    report = side.report
    if found is None or report is None or side.replay is None:
        assert side.replay is not None
        report = side.replay.report(interrupted=True)
        answer = answer_of(report, requests, Baseline(None, "it was interrupted"))
        return Served(side.replay, report, answer, requests)
    baseline, other = _other_side(requests, model, options, stop, progress)
    answer = answer_of_search(report, requests, found, baseline, other)
    return Served(side.replay, report, answer, requests)


def _other_side(
    requests: Sequence[TraceRequest],
    model: ModelProfile | Deployment,
    options: OffloadOptions,
    stop: Stop,
    progress: Shown | None,
) -> tuple[Baseline, RateSearch | None]:
    """The baseline at the highest rate that it holds, or why there is none."""
    unfit = why_none(model, options)
    if unfit:
        return Baseline(None, unfit), None
    # Whether it can be served at all does not hang on the rate: nothing is served to say so.
    possible = run_baseline(requests, model, options, stop=lambda: True)
    if not possible.fits:
        return possible, None
    side = _Side(model, baseline_options(options), stop, progress)
    found = side.search(requests)
    if found is None or side.report is None:
        return Baseline(None, "it was interrupted"), None
    return Baseline(side.report), found


class _Side:
    """Runs of one side at many rates.  What a sampled run learns of its rows serves them all."""

    def __init__(
        self,
        model: ModelProfile | Deployment,
        options: OffloadOptions,
        stop: Stop,
        progress: Shown | None,
    ) -> None:
        self._model, self._options = model, options
        self._stop, self._progress = stop, progress
        self._first: OffloadedSampled | None = None
        self._replays: dict[int, OffloadReplay] = {}
        self._looked: Search | None = None
        self._label = ""
        self.replay: OffloadReplay | None = None
        self.report: OffloadReport | None = None

    def search(self, requests: Sequence[TraceRequest]) -> RateSearch | None:
        """Look for the highest rate; None when it was stopped."""
        baseline = self._options.policy == "none"
        looked = Search(
            requests,
            self._serve,
            attain=self._options.attain,
            error=(lambda _: CLOCK) if baseline else step_error,
            told=partial(self._told, "baseline" if baseline else "search"),
        )
        self._looked = looked
        found = looked.run()
        if found is not None:
            self.report = looked.best
            self.replay = self._replays[id(looked.best)]
        return found

    def _told(self, name: str, done: int, left: int) -> None:
        self._label = f"{name}, rate {done + 1} of at most {done + left}"

    def _serve(
        self, requests: list[TraceRequest], window: tuple[float, float]
    ) -> OffloadReport | None:
        model, options = self._model, self._options
        if options.fidelity == "sampled" and options.policy != "none":
            known = None if self._first is None else self._first.rehearsal
            strategy = OffloadedSampled(model, options, rehearsal=known)
            self._first = self._first or strategy
            replay = OffloadReplay.served_by(requests, strategy)
        else:
            replay = OffloadReplay(requests, model, options)
        self.replay = replay
        replay.serving.latencies.window_us = window
        report = replay.run(stop=self._stop, progress=_labelled(self._progress, self._label))
        if report.interrupted:
            return None
        # Of the runs so far one is looked at again, and this one may be the next.
        best = None if self._looked is None else self._looked.best
        self._replays = {key: kept for key, kept in self._replays.items() if key == id(best)}
        self._replays[id(report)] = replay
        return report


def _labelled(progress: Shown | None, label: str) -> Callable[[Any], None] | None:
    if progress is None:
        return None
    shown = progress
    return lambda replay: shown(replay, label)
