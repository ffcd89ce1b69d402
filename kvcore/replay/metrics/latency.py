# SPDX-License-Identifier: Apache-2.0
"""Latencies of requests on the model's time line, and the share that meets its limits.

A request's first token is produced at the end of the step that computes the last of its prompt; the
step that writes an output token computes the next one.  So:

ttft   from the arrival to the first token, queueing included;
queue  from the arrival to the first admission;
tpot   a request's mean over its tokens after the first (requests of two tokens or more);
e2e    from the arrival to the last token;
itl    between two moments at which tokens of a request are produced.  It includes the prompts of
       other requests that are computed in between, and recomputation after a preemption.

Percentiles of all but itl are exact (numpy's, linear between two requests); itl has one value for
each token, and is counted in classes of 0.5%.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail, shown

__all__ = ["LIMITS", "SHARES", "Latencies", "Progress", "Slo", "Summary"]

#: What a limit can be of.
LIMITS = ("ttft", "tpot", "e2e")
UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}
MOST_US = 1e15
#: Of the requests, at which their distributions are written.
SHARES = (0.0, *(n / 20 for n in range(1, 20)), 0.99, 1.0)
CLASS = math.log(1.005)
LOWEST_US = 1e-2
NUM_CLASSES = int(math.log(MOST_US / LOWEST_US) / CLASS) + 2


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in microseconds by name; a request is good if it meets all of them."""

    limits: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Limits from ``ttft=2s,tpot=50ms``; a bare number is seconds.

        Raises ParamInvalidError naming what is wrong.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, found, value = part.strip().partition("=")
            if not found or name not in LIMITS or name in limits:
                some = ", ".join(LIMITS)
                fail("slo", f"limits like ttft=2s,tpot=50ms, each once, of {some}", shown(part))
            limits[name] = _microseconds(name, value.strip())
        return cls(limits)

    def is_met(self, values: Mapping[str, float]) -> bool:
        """Whether the values meet every limit; a value that a request does not have meets it."""
        return all(not values[name] > limit for name, limit in self.limits.items())

    def __str__(self) -> str:
        return ", ".join(f"{name} {us / 1e3:g} ms" for name, us in self.limits.items())


def _microseconds(name: str, text: str) -> float:
    unit = next((unit for unit in ("us", "ms", "s") if text.endswith(unit)), "")
    try:
        us = float(text[: len(text) - len(unit)]) * UNITS[unit or "s"]
    except ValueError:
        us = math.nan
    if not 0 < us <= MOST_US:
        fail("slo", f"{name} as a time above 0, like 2s, 50ms or 0.05", shown(text))
    return us


@dataclass(slots=True)
class Progress:
    """The progress of a request's output.

    tokens:   output tokens in all.
    arrived_us, admitted_us, first_us, last_us: when it arrived, was admitted, and had its first and
              last token; NaN: not yet.
    seen_us:  when its newest token was produced.
    """

    tokens: int
    arrived_us: float
    admitted_us: float
    first_us: float = math.nan
    seen_us: float = math.nan
    last_us: float = math.nan

    def values(self) -> dict[str, float]:
        """Microseconds by name; NaN for what the request does not have."""
        after = (self.last_us - self.first_us) / (self.tokens - 1) if self.tokens > 1 else math.nan
        return {
            "queue": self.admitted_us - self.arrived_us,
            "ttft": self.first_us - self.arrived_us,
            "tpot": after,
            "e2e": self.last_us - self.arrived_us,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and percentiles of ``count`` values, in microseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    def to_dict(self) -> dict[str, float]:
        """Milliseconds, and the count."""
        return {
            "count": self.count,
            **{name: getattr(self, name) / 1e3 for name in ("mean", "p50", "p90", "p99")},
        }

    def __str__(self) -> str:
        parts = (self.mean, self.p50, self.p90, self.p99)
        mean, p50, p90, p99 = (f"{us / 1e3:,.1f}" for us in parts)
        return f"mean {mean} ms, p50 {p50}, p90 {p90}, p99 {p99}"


class Latencies:
    """The latencies of the requests of a run.

    slo: limits, or None.
    window_us: first and last arrival of the requests that are judged by the limits; None: all are.
    good: finished requests that met them; finished: those with a last token that are judged.
    """

    good: int
    finished: int

    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo
        self.window_us: tuple[float, float] | None = None
        self._waits = (array("d"), array("d"))  # arrivals, and what came before admission
        self.good = self.finished = 0
        self._values: dict[str, list[float]] = {"queue": [], "ttft": [], "tpot": [], "e2e": []}
        # Of each finished request, limit by limit: NaN for what it does not have.
        self._judged = {name: array("d") for name in LIMITS}
        self._gaps = np.zeros(NUM_CLASSES, np.int64)
        self._gap_sum = 0.0

    def first(self, progress: Progress, now_us: float) -> None:
        """The prompt of a request is computed, and with it its first token."""
        if math.isnan(progress.first_us):
            progress.first_us = progress.seen_us = now_us
            if progress.tokens == 1:
                progress.last_us = now_us

    def more(self, progress: Progress, now_us: float, written: int) -> None:
        """A decode step of the request has ended; written: output tokens written so far."""
        self.first(progress, now_us)
        if not math.isnan(progress.last_us):
            return  # (the step that writes the last token computes none)
        self._gap(now_us - progress.seen_us, 1)
        progress.seen_us = now_us
        if written + 1 >= progress.tokens:
            progress.last_us = now_us

    def many(
        self, who: Sequence[Progress], now_us: Sequence[float], written: Sequence[int]
    ) -> None:
        """Steps have ended, each of which wrote a token of each of these requests.

        now_us:  [steps] when each ended.
        written: output tokens of each request written before the first step.
        """
        through = [0] * (len(now_us) + 1)  # requests whose last gap ends with so many steps
        first: dict[float, int] = {}  # how many saw their last token then
        for progress, before in zip(who, written, strict=True):
            self.first(progress, now_us[0])
            if not math.isnan(progress.last_us):
                continue  # (the step that writes the last token computes none)
            last = max(1, progress.tokens - 1 - before)  # the step that computes the last one
            count = min(last, len(now_us))
            first[progress.seen_us] = first.get(progress.seen_us, 0) + 1
            through[count] += 1
            progress.seen_us = now_us[count - 1]
            if count == last:
                progress.last_us = progress.seen_us
        for seen_us, number in first.items():
            self._gap(now_us[0] - seen_us, number)
        left = sum(through)
        for n in range(1, len(now_us)):
            left -= through[n]
            self._gap(now_us[n] - now_us[n - 1], left)

    def _gap(self, us: float, count: int) -> None:
        """Count ``count`` intervals of ``us`` microseconds between two tokens of a request."""
        if us > 0 and count:
            self._gaps[_class_of(us)] += count
            self._gap_sum += count * us

    def leave(self, progress: Progress, *, finished: bool) -> None:
        """A request has left; an aborted one counts with the parts that it had."""
        values = progress.values()
        for name, us in values.items():
            if not math.isnan(us) and (finished or name in ("queue", "ttft")):
                self._values[name].append(us)
        self._waits[0].append(progress.arrived_us)
        self._waits[1].append(values["queue"])
        first, last = self.window_us or (-math.inf, math.inf)
        if finished and first <= progress.arrived_us <= last:
            self.finished += 1
            self.good += self.slo is not None and self.slo.is_met(values)
            for name, kept in self._judged.items():
                kept.append(values[name])

    @property
    def attained(self) -> float | None:
        """Share of the finished requests that are good; None without limits or requests."""
        if self.slo is None or not self.finished:
            return None
        return self.good / self.finished

    def attained_at(self, factor: float) -> float | None:
        """The share that would be good if every time were ``factor`` times as long."""
        if self.slo is None or not self.finished:
            return None
        bad = np.zeros(self.finished, bool)
        for name, limit in self.slo.limits.items():
            bad |= np.frombuffer(self._judged[name]) * factor > limit
        return 1.0 - float(bad.mean())

    def within(self, share: float) -> dict[str, float]:
        """Microseconds, by limit, that this share of the judged requests stays within."""
        found: dict[str, float] = {}
        for name in self.slo.limits if self.slo is not None else ():
            values = np.frombuffer(self._judged[name])
            known = values[~np.isnan(values)]
            if len(known):
                found[name] = float(np.quantile(known, share))
        return found

    def overload(self) -> str:
        """Whether requests arrive faster than they are served, in words; empty when they do not.

        They do when the last fifth of them waits longer to be admitted than it is served, and
        twice as long as the first fifth.
        """
        if not self._waits[0] or not self._values["e2e"]:
            return ""
        arrived, waits = (np.frombuffer(values) for values in self._waits)
        by_arrival = waits[np.argsort(arrived, kind="stable")]
        fifth = max(1, len(by_arrival) // 5)
        first, last = (float(part.mean()) for part in (by_arrival[:fifth], by_arrival[-fifth:]))
        served = float(np.mean(self._values["e2e"])) - float(waits.mean())
        if last <= max(2 * first, served):
            return ""
        return (
            "requests arrive faster than they are served: the last fifth waits"
            f" {last / 1e6:,.3g} s to be admitted, the first {first / 1e6:,.3g} s"
        )

    def summaries(self) -> dict[str, Summary | None]:
        """Summaries by name; None where no request has the value."""
        found: dict[str, Summary | None] = {
            name: _summary(np.array(values)) for name, values in self._values.items()
        }
        found["itl"] = self._between()
        return found

    def to_dict(self) -> dict[str, Any]:
        """Milliseconds by name, of types that JSON has."""
        return {
            name: None if one is None else one.to_dict() for name, one in self.summaries().items()
        }

    def quantiles(self) -> dict[str, list[float] | None]:
        """Milliseconds by name, of the shares `SHARES` of the requests (itl: of the tokens).

        None where no request has the value.
        """
        found: dict[str, list[float] | None] = {}
        for name, values in self._values.items():
            us = np.quantile(np.array(values), SHARES) if values else None
            found[name] = None if us is None else (us / 1e3).tolist()
        count = int(self._gaps.sum())
        ranks = np.maximum(1, np.ceil(np.array(SHARES) * count))
        at = np.searchsorted(np.cumsum(self._gaps), ranks)
        gaps = LOWEST_US * np.exp((at + 0.5) * CLASS) / 1e3
        found["itl"] = gaps.tolist() if count else None
        return found

    def _between(self) -> Summary | None:
        count = int(self._gaps.sum())
        if not count:
            return None
        ends = np.cumsum(self._gaps)
        ranks = np.ceil(np.array((0.5, 0.9, 0.99)) * count)
        p50, p90, p99 = LOWEST_US * np.exp((np.searchsorted(ends, ranks) + 0.5) * CLASS)
        return Summary(count, self._gap_sum / count, float(p50), float(p90), float(p99))


def _class_of(us: float) -> int:
    return min(NUM_CLASSES - 1, max(0, int(math.log(us / LOWEST_US) / CLASS)))


def _summary(values: NDArray[np.float64]) -> Summary | None:
    if not len(values):
        return None
    p50, p90, p99 = (float(x) for x in np.percentile(values, (50, 90, 99)))
    return Summary(len(values), float(values.mean()), p50, p90, p99)
