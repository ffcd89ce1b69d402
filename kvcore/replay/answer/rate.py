# SPDX-License-Identifier: Apache-2.0
"""The highest rate of arrivals at which the limits of requests hold.

A trace's arrivals are pushed together or pulled apart by a factor, and the trace is served again,
until two rates that differ by at most `RESOLUTION` are found, of which the lower holds the limits
and the higher does not.  The requests of the first and of the last tenth of the arrivals are served
and not judged: the server is not yet, or no longer, as busy as it will be.

That no rate holds them is an answer too: it is given when requests that hardly ever meet another
one miss them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.errors import fail
from kvcore.replay.clock.compute_time import ComputeTime
from kvcore.replay.serving.offloaded import MAX_ARRIVAL_MS

if TYPE_CHECKING:
    from kvcore.replay.metrics.latency import Slo
    from kvcore.replay.report.offloaded import OffloadReport
    from kvcore.replay.traces.reader import TraceRequest

__all__ = ["RESOLUTION", "Point", "RateSearch", "Search", "at_rate", "own_rate"]

RESOLUTION = 0.02
#: Share of the arrivals at either end whose requests are not judged.
EDGE = 10
#: At most so many requests at a time, on average: one hardly ever meets another.
ALONE = 1.05
#: Requests a second that no server needs more of: they all come within a millisecond.
MOST_RATE = 1e7
#: Share of the requests by which a bound of the time must miss the limits before it is believed.
MARGIN = 0.02
LEAST_POINTS = 12


def own_rate(requests: Sequence[TraceRequest]) -> float:
    """Requests a second of the trace as it is.

    Raises ParamInvalidError for a trace whose arrivals say nothing.
    """
    times = [request.timestamp_ms for request in requests]
    span = (max(times) - min(times)) / 1e3 if times else 0.0
    if len(times) < 2 or span <= 0:
        at = f", all at {times[0]:g} ms" if len(times) > 1 else ""
        seen = f"{len(times)} of them{at}"
        fail("search", "a trace whose requests arrive at different times", seen)
    return (len(times) - 1) / span


def at_rate(requests: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests, arriving at so many a second: every gap by the same factor, from 0 on."""
    factor = own_rate(requests) / rate
    first = min(request.timestamp_ms for request in requests)
    return [replace(r, timestamp_ms=(r.timestamp_ms - first) * factor) for r in requests]


def judged(requests: Sequence[TraceRequest]) -> tuple[float, float]:
    """Microseconds of the first and of the last arrival that is judged."""
    times = sorted(request.timestamp_ms for request in requests)
    edge = len(times) // EDGE
    return times[edge] * 1e3, times[len(times) - 1 - edge] * 1e3


@dataclass(frozen=True, slots=True)
class Point:
    """One rate that was tried.

    attained: share of the judged requests that are good; sure, perhaps: the same if every time
              were longer, or shorter, by what it may be off.
    factor:   by which every time may be off.
    values:   milliseconds, by limit, that the share asked for stays within.
    """

    rate: float
    attained: float
    sure: float
    perhaps: float
    batch: float
    values: dict[str, float]
    overload: str
    holds: bool
    factor: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Of types that JSON has."""
        names = ("rate", "attained", "batch", "overload", "holds")
        return {**{name: getattr(self, name) for name in names}, "values_ms": self.values}


@dataclass(frozen=True, slots=True)
class RateSearch:
    """What was found.

    rate:      the highest that holds the limits; None: none does.
    low, high: what it may be, by how sure the times are.
    sentence:  what stops it there.
    limited:   False: no rate was too high.
    """

    rate: float | None
    low: float
    high: float
    points: tuple[Point, ...]
    sentence: str
    limited: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Of types that JSON has; the points by their rate."""
        return {
            "rate": self.rate,
            "interval": [self.low, self.high],
            "limited": self.limited,
            "sentence": self.sentence,
            "points": [point.to_dict() for point in sorted(self.points, key=lambda p: p.rate)],
        }


class Search:
    """Looks for the highest rate of one side, with offload or without.

    serve:  a run of requests that arrive by time, judged between two arrivals (microseconds);
            None when it was stopped.
    attain: share of the requests that must be good.
    error:  how far the times of a run may be off, as a share; None: nobody can say.
    told:   called before each point with (how many are done, how many may be left).
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        serve: Callable[[list[TraceRequest], tuple[float, float]], OffloadReport | None],
        *,
        attain: float,
        error: Callable[[OffloadReport], float | None],
        told: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._requests, self._serve, self._attain = requests, serve, attain
        self._error, self._told = error, told
        self._points: dict[float, Point] = {}
        self.best: OffloadReport | None = None
        self._best: Point | None = None
        self._slo: Slo | None = None
        self._floor = ""

    def run(self) -> RateSearch | None:
        """Find it.  None when a run was stopped; ``best`` is the report at the rate found.

        Where no rate holds, ``best`` is the report at the lowest that was tried.
        """
        start = own_rate(self._requests)
        low, high = 0.0, math.inf
        rate, stride = start, 2.0
        while high / max(low, 1e-300) > 1 + RESOLUTION:
            point = self._at(rate, low, high)
            if point is None:
                return None
            if point.holds:
                low = rate
            else:
                high = rate
            if math.isinf(high):
                if rate >= MOST_RATE:
                    return self._found(low, high)
                rate, stride = min(MOST_RATE, rate * stride), stride * 2
            elif not low:
                if self._is_alone(point):
                    return self._found(0.0, high)
                rate, stride = max(rate / stride, self._least()), stride * 1.5
            else:
                rate = math.sqrt(low * high)
        return self._found(low, high)

    def _least(self) -> float:
        """The rate at which the last request arrives as late as one may."""
        return (len(self._requests) - 1) / (MAX_ARRIVAL_MS / 1e3)

    def _at(self, rate: float, low: float, high: float) -> Point | None:
        left = LEAST_POINTS - len(self._points)
        if low and math.isfinite(high):
            left = math.ceil(math.log2(math.log(high / low) / math.log(1 + RESOLUTION)))
        self._told(len(self._points), max(1, left))
        requests = at_rate(self._requests, rate)
        report = self._serve(requests, judged(requests))
        if report is None:
            return None
        felt, error = report.latencies, self._error(report)
        attained = felt.attained or 0.0
        sure = perhaps = attained
        if error is None:
            sure, perhaps = 0.0, 1.0
        else:
            sure = felt.attained_at(1 + error) or 0.0
            perhaps = felt.attained_at(1 / (1 + error)) or 0.0
        totals = report.totals
        point = Point(
            rate, attained, sure, perhaps,
            totals.request_steps / max(1, totals.steps),
            {name: us / 1e3 for name, us in felt.within(self._attain).items()},
            felt.overload(), attained >= self._attain, 1 + (error or 0.0),
        )  # fmt: skip
        self._points[rate], self._slo = point, felt.slo
        best = self._best
        # (one report is kept: a run of a long trace has much to remember)
        if point.holds:
            better = best is None or not best.holds or rate > best.rate
        else:
            better = best is None or (not best.holds and rate < best.rate)
        if better:
            self._best, self.best = point, report
        self._last = report
        return point

    def _is_alone(self, point: Point) -> bool:
        """Whether a lower rate can change nothing: requests hardly ever meet another one."""
        if point.batch <= ALONE or point.rate <= self._least():
            return True
        return self._floor_misses(self._last)

    def _floor_misses(self, report: OffloadReport) -> bool:
        """Whether the time of computing alone, of a request alone, misses the limits already.

        If so, `_floor` says by how much.
        """
        slo, model, totals = report.latencies.slo, report.deployment, report.totals
        if slo is None or not totals.steps:
            return False
        compute = ComputeTime(model, report.options.drafts)
        tokens = totals.accepted / max(1, totals.request_steps)
        good, floors = 0, []
        for request in self._requests:
            context = request.input_length + request.output_length // 2
            us = compute.of(np.array([context], np.int64)).us / tokens
            after = request.output_length - 1
            floor = {"ttft": 0.0, "tpot": us if after > 0 else 0.0, "e2e": us * max(0, after)}
            good += slo.is_met(floor)
            floors.append([floor[name] for name in slo.limits])
        if good / len(self._requests) >= self._attain - MARGIN:
            return False
        usual = np.quantile(np.array(floors), self._attain, axis=0).tolist()
        over = [
            f"{name.upper()} is {_time(us / 1e3)}"
            for (name, limit), us in zip(slo.limits.items(), usual, strict=True)
            if us > limit
        ]
        self._floor = f"{' and '.join(over)} at batch 1, for computing alone" if over else ""
        return True

    def _found(self, low: float, high: float) -> RateSearch:
        points = sorted(self._points.values(), key=lambda p: p.rate)
        # If all times were longer by a factor, a rate lower by it would wait longer by it.
        sure = max((p.rate / p.factor for p in points if p.sure >= self._attain), default=0.0)
        perhaps = min(
            (p.rate * p.factor for p in points if p.perhaps < self._attain), default=math.inf
        )
        if not low:
            return RateSearch(None, 0.0, min(perhaps, high), tuple(points), self._none(points[0]))
        if math.isinf(high):
            sentence = f"the limits hold at every rate, at {low:,.3g} requests/s too"
            return RateSearch(low, min(sure, low), low, tuple(points), sentence, limited=False)
        beyond = self._points[high]
        sentence = f"at {high:,.4g} requests/s {self._missed(beyond)}"
        if beyond.overload:
            sentence += f"; {beyond.overload}"
        return RateSearch(low, min(sure, low), max(perhaps, high), tuple(points), sentence)

    def _none(self, point: Point) -> str:
        if self._floor:
            return f"no rate meets it: {self._floor}"
        batch = "batch 1" if point.batch <= ALONE else f"a mean batch of {point.batch:.1f}"
        return f"no rate meets it: {self._missed(point)} at {batch}"

    def _missed(self, point: Point) -> str:
        """The limits that are missed, and what is met instead."""
        slo = self._slo
        assert slo is not None
        over = [
            f"{name.upper()} is {_time(ms)}" for name, ms in point.values.items()
            if ms * 1e3 > slo.limits[name]
        ]  # fmt: skip
        share = f"{point.attained:.1%} of the requests are good"
        return " and ".join(over) if over else share


def _time(ms: float) -> str:
    return f"{ms:,.3g} ms" if ms < 1e3 else f"{ms / 1e3:,.3g} s"
