# SPDX-License-Identifier: Apache-2.0
"""Is offload worth it here: yes, no or undecided, by how much, and what it hangs on.

A run is held against its baseline.  What is compared is said:

- with limits (``--slo``) and arrivals by time: whether the limits hold with offload, and without;
- with limits and all requests there at once: good requests a second;
- without limits: tokens a second, each at the largest batch that it comes to.

Yes and no are said when all of the interval and of the band are on one side; what contains both
answers is undecided.  The interval is that of a sampled run, with `CLOCK` for the arithmetic of
either side.  The band is what assumed figures, each off by a factor, would make of the result
(`kvcore.replay.clock.band`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcore.replay.answer.batches import (
    MOST,
    BatchCurve,
    break_even,
    largest_batch,
    mean_context,
)
from kvcore.replay.clock.band import FACTOR, Band, ratio_band, step_band
from kvcore.replay.serving.interval import CLOCK, FEWEST

if TYPE_CHECKING:
    from kvcore.replay.answer.baseline import Baseline
    from kvcore.replay.report.offloaded import OffloadReport
    from kvcore.replay.traces.reader import TraceRequest

#: Share of the time from which on it is said that offload does not change it.
PROMPTS_MATTER = 0.2

__all__ = ["Answer", "Ratio", "answer_of", "hangs_on", "step_error"]


#: How the two sides are called where the one differs in its tiers alone.
TIERED = (
    ("without offload", "without them"),
    ("without it", "without them"),
    ("with offload", "with the lower tiers"),
    ("with it", "with them"),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """With offload by without; low and high bound it, None where nobody can say.

    band: what assumed figures would make of it, least and most.
    """

    value: float
    low: float | None
    high: float | None
    band: tuple[float, float] | None = None

    @property
    def decision(self) -> str:
        """Whether offload is ahead."""
        if self.low is None or self.high is None:
            return "undecided"
        low, high = self.band or (self.low, self.high)
        low, high = min(low, self.low), max(high, self.high)
        if low <= 1 <= high:
            return "undecided"
        return "yes" if low > 1 else "no"

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f} times"
        return f"{self.value:.2f} times ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run says beside its baseline.

    decision: "yes", "no", "undecided"; None: there is nothing to decide by.
    sentence: the answer; because: what decides it, most important first.
    measure:  what is compared; speed_up: with offload by without.
    break_even_batch: from which on offload decodes faster than the baseline does at its best.
    curves:   (batch, tokens a second of decoding), by side.
    baseline: figures of the run without offload.
    searches: the rates that were tried, by side.
    band:     how far assumed figures move the ratio of the sides.
    """

    decision: str | None
    sentence: str
    because: tuple[str, ...] = ()
    measure: str = ""
    speed_up: Ratio | None = None
    break_even_batch: int | None = None
    curves: dict[str, list[tuple[int, float]]] | None = None
    baseline: dict[str, Any] | None = None
    searches: dict[str, Any] | None = None
    band: Band | None = None

    def to_dict(self) -> dict[str, Any]:
        """Of types that JSON has: what goes into a report."""
        ratio = self.speed_up
        bounds = None if ratio is None or ratio.low is None else [ratio.low, ratio.high]
        return {
            "decision": self.decision,
            "answer": {
                "sentence": self.sentence,
                "because": list(self.because),
                "measure": self.measure,
                "speed_up": None if ratio is None else ratio.value,
                "speed_up_interval": bounds,
                "speed_up_band": None if ratio is None or not ratio.band else list(ratio.band),
                "band": None if self.band is None else self.band.to_dict(),
                "break_even_batch": self.break_even_batch,
                "curves": self.curves,
                "search": self.searches,
            },
            "baseline": self.baseline,
        }


def answer_of(
    report: OffloadReport, requests: Sequence[TraceRequest], baseline: Baseline
) -> Answer:
    """What ``report`` says beside the baseline of the same requests."""
    because = _because(report)
    if report.interrupted:
        return Answer(None, "Nothing is decided: the run was interrupted.", because)
    other = baseline.report
    if other is None:
        if baseline.fits:
            return Answer(None, f"There is no baseline to decide by: {baseline.why}.", because)
        sentence = f"Yes: without offload this trace cannot be served: {baseline.why}."
        return Answer("yes", sentence, because, measure="what fits")
    sides = (report, other)
    if not all(side.totals.steps for side in sides):
        return Answer(None, "Nothing is decided: no token was generated.", because)
    context = mean_context(requests)
    if report.tiers is not None:
        return _of_tiers(report, other, because, context)
    curves = [BatchCurve(side, context) for side in sides]
    most = [largest_batch(side, requests) for side in sides]
    wanted = other.decode_tokens_per_s or 0.0
    even = break_even(curves[0].tokens_per_s, wanted, most[0])
    band = ratio_band(report, other, context)
    decision, sentence, measure, ratio = _decided(report, other, band, context)
    return Answer(
        decision,
        sentence,
        (*hangs_on(ratio, band), *_batches(report, other, most, even), *because),
        measure,
        ratio,
        even,
        {
            name: curve.points(end)
            for name, curve, end in zip(("offload", "none"), curves, most, strict=True)
        },
        _summary(other),
        band=band,
    )


def _of_tiers(
    report: OffloadReport, other: OffloadReport, because: tuple[str, ...], context: float
) -> Answer:
    """Beside the same run with device memory alone: nothing but prefixes is anywhere else."""
    band = ratio_band(report, other, context)
    decision, sentence, measure, ratio = _decided(report, other, band, context)
    for words, instead in TIERED:
        sentence = sentence.replace(words, instead)
    felt = [side.latencies.summaries()["ttft"] for side in (report, other)]
    both = "" if None in felt else (
        f"First tokens: {felt[0]} with the lower tiers; {felt[1]} with device memory alone"
    )  # fmt: skip
    hits = [side.prefix_hit_rate or 0.0 for side in (report, other)]
    found = (
        f"{hits[0]:.1%} of the prompts' tokens are found in a cache, {hits[1]:.1%} with device"
        " memory alone"
    )
    reasons = tuple(text for text in (both, found, *hangs_on(ratio, band), *because) if text)
    return Answer(decision, sentence, reasons, measure, ratio, baseline=_summary(other), band=band)


def step_error(report: OffloadReport) -> float | None:
    """How far the time of a step may be off, as a share of it; None: too few were sampled."""
    interval, us = report.interval, report.step_us
    if interval is None or us is None:
        return CLOCK
    return None if interval.step_us is None else interval.step_us / us


def hangs_on(ratio: Ratio | None, band: Band) -> tuple[str, ...]:
    """What the ratio of the sides hangs on, and how far: nothing where no figure is assumed."""
    if band.decides is None:
        return ()
    change = max(map(abs, band.by[band.decides]))
    said = f"It hangs on {band.decides}, an assumed figure: a factor of {FACTOR:g} moves it by"
    said += f" {change:.0%}"
    if ratio is not None and ratio.band is not None:
        low, high = ratio.band
        said += f"; all assumed figures together make it {low:.2f} to {high:.2f} times"
    return (said,)


def _decided(
    report: OffloadReport, other: OffloadReport, band: Band, context: float
) -> tuple[str, str, str, Ratio | None]:  # decision, sentence, measure, ratio
    error = step_error(report)
    if report.latencies.slo is not None and report.options.arrivals == "time":
        return _by_limits(report, other, error, context)
    if report.latencies.slo is not None:
        values = [(side.slo_dict() or {}).get("good_requests_per_s") or 0.0 for side in
                  (report, other)]  # fmt: skip
        measure, unit = "good requests a second", "good requests/s"
    elif report.options.arrivals == "time":
        # What arrives by time is served by time: the throughput would be the trace's own.
        values = [side.decode_tokens_per_s or 0.0 for side in (report, other)]
        measure, unit = "tokens a second of decoding", "token/s of decoding"
    else:
        values = [side.tokens_per_s or 0.0 for side in (report, other)]
        measure, unit = "tokens a second, prompts included", "token/s"
    if not values[1]:
        decision = "yes" if values[0] else "no"
        said = f"{_number(values[0])} {unit} with offload, none without it"
        return decision, f"{decision.capitalize()}: {said}.", measure, None
    ratio = replace(
        _ratio(values[0], values[1], report, error), band=band.around(values[0] / values[1])
    )
    sentence = (
        f"{ratio.decision.capitalize()}: {ratio} the {unit}: {_number(values[0])} with offload at a"
        f" batch of {_batch(report):.1f}, {_number(values[1])} without it at {_batch(other):.1f}"
    )
    if error is None:
        sentence += f"; too few requests were sampled to say how sure that is ({FEWEST} at least)"
    return ratio.decision, sentence + ".", measure, ratio


def _ratio(value: float, base: float, report: OffloadReport, error: float | None) -> Ratio:
    """The ratio with its bounds: a step that takes longer makes the whole run longer."""
    if error is None:
        return Ratio(value / base, None, None)
    totals = report.totals
    share = totals.decode_us / totals.end_us if totals.end_us else 1.0
    if report.options.arrivals == "time":
        share = 1.0
    low, high = value / (1 + error * share), value / max(1e-9, 1 - error * share)
    return Ratio(value / base, low / base / (1 + CLOCK), high / base * (1 + CLOCK))


def _by_limits(
    report: OffloadReport, other: OffloadReport, error: float | None, context: float
) -> tuple[str, str, str, Ratio | None]:
    attain, slo = report.options.attain, report.latencies.slo
    held = [_holds(report, error, context), _holds(other, CLOCK, context)]
    shares = [side.latencies.attained or 0.0 for side in (report, other)]
    said = f"{shares[0]:.1%} of the requests are good with offload, {shares[1]:.1%} without it"
    rest = f" ({slo}; {attain:.0%} asked for): {said}."
    measure = "whether the limits hold"
    if None in held:
        return "undecided", "Undecided: the limits hold or not by less than is known" + rest, \
            measure, None  # fmt: skip
    words = {
        (True, False): ("yes", "Yes: the limits hold with offload, and not without it"),
        (True, True): ("no", "No: the limits hold without offload too"),
        (False, True): ("no", "No: the limits hold without offload, and not with it"),
        (False, False): ("no", "No: the limits hold neither with offload nor without it"),
    }
    decision, sentence = words[held[0] is True, held[1] is True]
    return decision, sentence + rest, measure, None


def _holds(report: OffloadReport, error: float | None, context: float) -> bool | None:
    """Whether the limits hold, whatever the times are within error and band; None: not known."""
    if error is None:
        return None
    band = step_band(report, context)
    factors = (1 - max(error, -band.low), 1 + max(error, band.high))
    shares = [report.latencies.attained_at(max(0.0, factor)) for factor in factors]
    holds = {share is not None and share >= report.options.attain for share in shares}
    return holds.pop() if len(holds) == 1 else None


def _batch(report: OffloadReport) -> float:
    return report.totals.request_steps / max(1, report.totals.steps)


def _number(value: float) -> str:
    """Whole from 100 on, else three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _most(batch: int) -> str:
    return f"{batch:,}" + (" or more" if batch == MOST else "")


def _batches(
    report: OffloadReport, other: OffloadReport, most: Sequence[int], even: int | None
) -> tuple[str, ...]:
    """Which batches are compared, what limits them, and where the two are even."""
    limit = report.options.batch
    wide, narrow = most
    found = []
    if narrow < limit:
        found.append(
            f"Device memory holds some {narrow:,} requests of this size without offload; with it"
            f" {min(limit, wide):,} run together" + (
                f", the limit of --batch ({_most(wide)} would fit)" if wide > limit else ""
            )
        )  # fmt: skip
    else:
        found.append(
            f"Both run at most {limit:,} requests, the limit of --batch; device memory holds"
            f" {_most(narrow)} without offload and {_most(wide)} with it"
        )
    rate = other.decode_tokens_per_s or 0.0
    if even is None:
        found.append(
            "At no batch that fits does offload decode as fast as the baseline"
            f" ({_number(rate)} token/s)"
        )
    else:
        found.append(
            f"Offload decodes as fast as the baseline ({_number(rate)} token/s) from a batch of"
            f" {even:,} on"
        )
    return tuple(found)


def _because(report: OffloadReport) -> tuple[str, ...]:
    """What a step's time goes to, and what it rests on."""
    totals = report.totals
    if not totals.steps:
        return ()
    us, computed = totals.decode_us / totals.steps, totals.compute_us / totals.steps
    found = [f"A step takes {us / 1e3:,.2f} ms, {computed / us:.0%} of it computing"]
    if not report.on_device and totals.serve_us:
        exposed, waited = (part / totals.steps / us for part in (totals.exposed_us,
                                                                totals.serve_us))  # fmt: skip
        found[0] += f" and {waited:.0%} waiting for rows ({exposed:.0%} for the host link)"
    if totals.prefill_us > totals.end_us * PROMPTS_MATTER:
        found.append(
            f"Prompts take {totals.prefill_us / totals.end_us:.0%} of the device's time, as they do"
            " without offload"
        )
    share = report.assumed_share
    if share:
        found.append(
            f"{share:.0%} of that rests on figures that nobody has published or measured:"
            f" {', '.join(report.deployment.assumed())}"
        )
    return tuple(found)


def _summary(other: OffloadReport) -> dict[str, Any]:
    """The baseline's own figures, as far as a reader of the answer needs them."""
    found = other.to_dict()
    keys = (
        "requests", "tokens", "memory", "steps", "batch", "model_time_us", "tokens_per_s",
        "latency_ms", "latency_quantiles_ms", "slo", "timeline",
    )  # fmt: skip
    return {key: found[key] for key in keys}
