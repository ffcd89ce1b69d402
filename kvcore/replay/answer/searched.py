# SPDX-License-Identifier: Apache-2.0
"""The answer of a search: the highest rate with offload by the highest without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcore.replay.answer.answer import Answer, Ratio, answer_of, hangs_on

if TYPE_CHECKING:
    from kvcore.replay.answer.baseline import Baseline
    from kvcore.replay.answer.rate import RateSearch
    from kvcore.replay.clock.band import Band
    from kvcore.replay.report.offloaded import OffloadReport
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["answer_of_search"]

MEASURE = "the highest rate that holds the limits"


def answer_of_search(
    report: OffloadReport,
    requests: Sequence[TraceRequest],
    found: RateSearch,
    baseline: Baseline,
    other: RateSearch | None,
) -> Answer:
    """What a search says: ``report`` is of the rate found, ``baseline`` of the other side's."""
    plain = answer_of(report, requests, baseline)
    decision, sentence, ratio = _decided(report, found, baseline, other, plain.band)
    because = [f"With offload {found.sentence}"]
    if other is not None:
        because.append(f"Without offload {other.sentence}")
    own = () if plain.band is None else hangs_on(ratio, plain.band)
    others = (line for line in plain.because if not line.startswith("It hangs on "))
    searches = {"offload": found.to_dict(), "none": None if other is None else other.to_dict()}
    return replace(
        plain,
        decision=decision,
        sentence=sentence,
        because=(*because, *own, *others),
        measure=MEASURE,
        speed_up=ratio,
        searches=searches,
    )


def _decided(
    report: OffloadReport,
    found: RateSearch,
    baseline: Baseline,
    other: RateSearch | None,
    band: Band | None,
) -> tuple[str | None, str, Ratio | None]:
    limits = f"{report.latencies.slo}, for {report.options.attain:.0%} of the requests"
    if other is None:
        rate = f"{found.rate:,.4g} requests/s" if found.rate else "no rate"
        if not baseline.fits:
            decision = "yes" if found.rate else "no"
            said = (
                f"{decision.capitalize()}: the limits hold up to {rate} with offload, and without"
                f" it the trace cannot be served: {baseline.why} ({limits})."
            )
            return decision, said, None
        said = f"With offload the limits hold up to {rate} ({limits})"
        return None, f"{said}. There is no baseline to decide by: {baseline.why}.", None
    if not found.rate or not other.rate:
        return _one_sided(found, other, limits)
    if not (found.limited or other.limited):
        return "no", f"No: the limits hold at every rate, without offload too ({limits}).", None
    low = found.low / other.high if math.isfinite(other.high) else 0.0
    high = found.high / other.low if other.low else math.inf
    known = low > 0 and math.isfinite(high)
    value = found.rate / other.rate
    around = None if band is None else band.around(value)
    ratio = Ratio(value, low if known else None, high if known else None, around)
    sentence = (
        f"{ratio.decision.capitalize()}: the limits hold up to {found.rate:,.4g} requests/s with"
        f" offload, {ratio} the {other.rate:,.4g} without it ({limits})."
    )
    return ratio.decision, sentence, ratio


def _one_sided(
    found: RateSearch, other: RateSearch, limits: str
) -> tuple[str | None, str, Ratio | None]:
    """At most one side has a rate.  It decides unless the other's time leaves room for one."""
    if not found.rate and not other.rate:
        # What might hold within the error of the times is not known to be too little.
        return "no", f"No: {found.sentence}, and without offload too ({limits}).", None
    if found.rate:
        decision = "yes" if found.low else "undecided"
        said = f"the limits hold up to {found.rate:,.4g} requests/s with offload; without it"
        return decision, f"{decision.capitalize()}: {said} {other.sentence} ({limits}).", None
    assert other.rate is not None
    said = f"with offload {found.sentence}; without it the limits hold up to {other.rate:,.4g}"
    return "no", f"No: {said} requests/s ({limits}).", None
