# SPDX-License-Identifier: Apache-2.0
"""A second process beside a run: it serves half of the sample, and then the baseline.

Neither hangs on the rest of the run, so the figures are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvcore.replay.answer.baseline import Baseline, run_baseline
from kvcore.replay.serving.replay import OffloadReplay
from kvcore.replay.serving.sample import draw_requests
from kvcore.replay.serving.sampled import OffloadedSampled
from kvcore.replay.sweep_workers import Workers

if TYPE_CHECKING:
    from kvcore.replay.deployments.deployment import Deployment
    from kvcore.replay.models.profile import ModelProfile
    from kvcore.replay.options import OffloadOptions
    from kvcore.replay.serving.rehearsal import Learned
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["Beside", "pays"]

#: Tokens that a sample generates from which a second process, which takes half a second to start,
#: is worth it: a token takes some 1.5 ms.
LEAST_TOKENS = 2048
#: Seconds that a step of the rehearsal waits for the other part: then it looks for Ctrl-C.
WAIT = 0.1


def pays(requests: Sequence[TraceRequest], options: OffloadOptions) -> bool:
    """Whether a run has a sample that is long enough to be served in two processes."""
    if options.fidelity != "sampled" or options.policy == "none" or options.tiers is not None:
        return False
    sample = draw_requests(requests, options)
    return len(sample) > 1 and sum(r.output_length for r in sample) >= LEAST_TOKENS


@dataclass(frozen=True, slots=True)
class _Task:
    name: str


SAMPLE, BASELINE = _Task("the sample"), _Task("the baseline")


class Beside:
    """``with Beside(requests, model, options) as beside:`` the second process of one run.

    Raises KVCoreError where it cannot be started, or was ended from outside.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        model: ModelProfile | Deployment,
        options: OffloadOptions,
    ) -> None:
        self._workers: Workers[_Task] = Workers(
            _serve, 1, requests, model, options, what="replay"
        )  # fmt: skip

    def __enter__(self) -> Beside:
        self._workers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._workers.__exit__(kind, *rest)

    def start(self) -> None:
        """Begin with the sample."""
        self._workers.begin(SAMPLE)

    def learned(self) -> Learned | None:
        """What its part of the sample taught, once; None when it has not ended after a moment."""
        for _, found in self._workers.finished(WAIT):
            self._workers.begin(BASELINE)
            return cast("Learned", found["learned"])
        return None

    def baseline(self, stop: Callable[[], bool]) -> Baseline:
        """Wait for the baseline."""
        while not stop():
            for _, found in self._workers.finished(WAIT):
                return cast("Baseline", found["baseline"])
        return Baseline(None, "it was interrupted")


# ---------------------------------------------------------------- in the process
def _serve(
    task: _Task,
    requests: Sequence[TraceRequest],
    model: ModelProfile | Deployment,
    options: OffloadOptions,
) -> dict[str, Any]:
    if task == BASELINE:
        return {"baseline": run_baseline(requests, model, options)}
    serving = OffloadedSampled(model, options, part=(1, 2))
    replay = OffloadReplay.served_by(requests, serving)
    try:
        while serving.prepare():
            pass
        return {"learned": serving.rehearsal.learned}
    finally:
        replay.close()
