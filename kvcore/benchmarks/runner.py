# SPDX-License-Identifier: Apache-2.0
"""How it is measured: functions in turn, many rounds, medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from kvcore._kernels import isa, parallel
from kvcore.benchmarks.cases import Case
from kvcore.isa import apply_row

__all__ = ["Measurement", "explain", "measure"]


@dataclass(frozen=True)
class Measurement:
    """Medians of one case, in nanoseconds a call, by function name."""

    name: str
    summary: str
    nbytes: int
    medians: dict[str, float]

    @property
    def gigabytes_per_second(self) -> float:
        """Payload bytes of kvcore's own call over its median time."""
        return self.nbytes / self.medians["kvcore"]

    def ratio(self, peer: str) -> float:
        """kvcore's time over the peer's: below 1 kvcore is faster."""
        return self.medians["kvcore"] / self.medians[peer]

    def to_json(self) -> dict[str, Any]:
        """A plain dict, with the ratios to each peer."""
        peers = [name for name in self.medians if name != "kvcore"]
        return {
            "name": self.name,
            "summary": self.summary,
            "bytes": self.nbytes,
            "nanoseconds": self.medians,
            "ratios": {peer: self.ratio(peer) for peer in peers},
        }


def _calls_for(function: Callable[[], Any], nanoseconds: float) -> int:
    """How many calls fill that time."""
    calls = 1
    while True:
        start = perf_counter_ns()
        for _ in range(calls):
            function()
        took = perf_counter_ns() - start
        if took >= nanoseconds or calls >= 1_000_000:
            return calls
        calls *= 2 if took <= 0 else max(2, min(10, int(nanoseconds / took) + 1))


def explain(nbytes: int) -> str:
    """The way that a call takes which writes so many bytes: path and borders, in words."""
    stream, several = isa.stream_bytes(), parallel.parallel_bytes()
    past = nbytes >= stream
    way = f'past the cache, path "{isa.path()}"' if past else "ordinary stores"
    return (
        f"{isa.current()}, {way} ({nbytes:,} bytes, the border is {stream:,}); "
        f"{'may use' if nbytes >= several else 'stays below'} a second thread ({several:,})"
    )


def measure(case: Case, seconds: float = 2.0, rows: Sequence[str] = ()) -> Measurement:
    """Run a case's functions in turn for about that long and take each one's median.

    rows: names of ``kvcore.cpus``: kvcore's function is run under each in turn, as "kvcore" under
    the last and as "row NAME" under the others, so that a ratio is the last row's time over theirs.
    The last row is in force afterwards.  Raises ParamInvalidError for a name that no row has.
    """
    functions = dict(case.build())
    under: dict[str, str] = {}
    if rows:
        under = {f"row {name}": name for name in rows[:-1]} | {"kvcore": rows[-1]}
        functions = dict.fromkeys(under, functions["kvcore"]) | functions
    calls = {}
    for name, function in functions.items():
        if name in under:
            apply_row(under[name])
        function()
        calls[name] = _calls_for(function, 100_000)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    begin = perf_counter_ns()
    rounds = 0
    while rounds < 5 or perf_counter_ns() - begin < seconds * 1e9:
        rounds += 1
        for name, function in functions.items():
            count = calls[name]
            if name in under:
                apply_row(under[name])
                function()  # what the row before left in the caches is not this row's
            start = perf_counter_ns()
            for _ in range(count):
                function()
            samples[name].append((perf_counter_ns() - start) / count)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return Measurement(case.name, case.summary, case.nbytes, medians)
