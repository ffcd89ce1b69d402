# SPDX-License-Identifier: Apache-2.0
"""The same trace without offload, served beside a run: what offload is measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcore.errors import ParamInvalidError
from kvcore.replay.serving.fit import deployment_of, device_blocks, fit, weight_bytes
from kvcore.replay.serving.on_device import OnDevice
from kvcore.replay.serving.replay import OffloadReplay, Replay
from kvcore.replay.tiers.fit import alone

if TYPE_CHECKING:
    from kvcore.replay.deployments.deployment import Deployment
    from kvcore.replay.models.profile import ModelProfile
    from kvcore.replay.options import OffloadOptions
    from kvcore.replay.report.offloaded import OffloadReport
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["Baseline", "Baselines", "baseline_options", "run_baseline", "why_none"]

#: Baselines that are kept: a sweep's points come with their seeds, then with their batches.
KEPT = 8


@dataclass(frozen=True, slots=True)
class Baseline:
    """The run without offload, or why there is none.

    fits: False when it cannot be: a request alone does not fit the device.
    """

    report: OffloadReport | None
    why: str = ""
    fits: bool = True


def baseline_options(options: OffloadOptions) -> OffloadOptions:
    """The options of the same run without offload, or without the tiers below the device."""
    if options.tiers is not None:
        return replace(alone(options), max_trace_events=0)
    return replace(options, policy="none", pool=None, max_trace_events=0)


def why_none(model: ModelProfile | Deployment, options: OffloadOptions) -> str:
    """Why a run has no baseline; empty when it has one."""
    tiered = options.tiers is not None and alone(options) != options
    if options.policy == "none" and not tiered:
        return "this run is the baseline itself"
    if options.baseline == "off":
        return "it was switched off (--baseline off)"
    if tiered:
        return ""
    own = deployment_of(model, options).model
    if weight_bytes(own, options) is None:
        return (
            f"what the weights and activations of {own.name} take on a device is not known"
            " (--weights-gib says it), so neither is what fits there without offload"
        )
    return ""


def run_baseline(
    requests: Sequence[TraceRequest],
    model: ModelProfile | Deployment,
    options: OffloadOptions,
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Any], None] | None = None,
) -> Baseline:
    """Serve the trace without offload, as ``options`` of a run with it say.

    The device's memory limits it, and ``batch`` as it limits the run with offload.  Of a run with
    tiers it is the same with device memory alone.
    """
    why = why_none(model, options)
    if why:
        return Baseline(None, why)
    own = baseline_options(options)
    if own.tiers is not None:
        found = OffloadReplay(requests, model, own).run(stop=stop, progress=progress)
        return Baseline(None, "it was interrupted") if found.interrupted else Baseline(found)
    longest = max(request.total_tokens for request in requests)
    try:
        device, _ = fit(model, own)
    except ParamInvalidError as error:
        return Baseline(None, str(error), fits=False)
    room = device_blocks(deployment_of(model, own).model, own, device)
    needed = -(-longest // own.block_size)
    if needed > room:
        why = (
            f"the longest request ({longest:,} tokens) needs {needed:,} blocks, and the device has"
            f" room for {room:,} beside the weights"
        )
        return Baseline(None, why, fits=False)
    report = Replay(requests, OnDevice(model, own)).run(stop=stop, progress=progress)
    if report.interrupted:
        return Baseline(None, "it was interrupted")
    return Baseline(report)


class Baselines:
    """The baselines of one trace and model, for runs whose options differ: each is served once.

    Of runs that differ by their policy, pool, sample or, where nothing is drawn by it, their seed,
    the baseline is the same.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Baseline] = {}

    def serve(
        self,
        requests: Sequence[TraceRequest],
        model: ModelProfile | Deployment,
        options: OffloadOptions,
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[Any], None] | None = None,
    ) -> Baseline:
        """What `run_baseline` returns; ``requests`` and ``model`` are always the same."""
        key = _depends_on(options)
        if why_none(model, options):
            return run_baseline(requests, model, options)
        if key not in self._found:
            found = run_baseline(requests, model, options, stop=stop, progress=progress)
            if found.report is None and found.fits:  # interrupted
                return found
            if len(self._found) == KEPT:
                del self._found[next(iter(self._found))]
            self._found[key] = found
        return self._found[key]


def _depends_on(options: OffloadOptions) -> tuple[object, ...]:
    """What the baseline's figures depend on, of the options of a run."""
    own = baseline_options(options)
    if own.tiers is None:
        # No row is selected, moved or verified, so nothing is drawn but aborts and drafts.
        own = replace(own, sample_seed=0, write_policy="write_through")
        if not own.drafts and not own.abort_share:
            own = replace(own, seed=0)
    return astuple(own)
