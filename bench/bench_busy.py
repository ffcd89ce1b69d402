# SPDX-License-Identifier: Apache-2.0
"""Times of one call while every core is busy: python bench/bench_busy.py

A process that never rests is started for each usable core.  Then a Norm scatter of 256 tokens
(8x128 bfloat16, K and V, two threads) and np.copyto of the same bytes are called in turn, 2,000
times each.  A call must not wait for a worker thread that the system has not scheduled, so its
times may spread no further than those of a copy that needs no worker: shown are the median, the
95th percentile over it, and the longest call.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np

import kvcore
from kvcore.threads import usable_cores

TOKENS, SLOTS, BLOCK = 256, 65536, 128


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """That many processes that count."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True:\n    pass"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for one in running:
            assert one.stdout is not None
            one.stdout.readline()
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()
            if one.stdout is not None:
                one.stdout.close()


def functions(threads: int) -> dict[str, Callable[[], None]]:
    """The call and the copy."""
    rng = np.random.default_rng(0)
    tokens = [
        rng.integers(0, 1 << 16, (TOKENS, 8, 128), np.uint16).view(ml_dtypes.bfloat16)
        for _ in range(2)
    ]
    caches = [
        np.ones((SLOTS // BLOCK, BLOCK, 8, 128), np.uint16).view(ml_dtypes.bfloat16)
        for _ in range(2)
    ]
    slots = rng.permutation(SLOTS)[:TOKENS]
    targets = [np.ones_like(one) for one in tokens]

    def call() -> None:
        kvcore.scatter_pa_kv_cache(
            tokens[0], caches[0], slots, tokens[1], caches[1], num_threads=threads
        )

    def copyto() -> None:
        for target, source in zip(targets, tokens, strict=True):
            np.copyto(target, source)

    return {"kvcore": call, "copyto": copyto}


def measure(calls: int, threads: int) -> dict[str, dict[str, float]]:
    """Microseconds by function name."""
    timed = functions(threads)
    times: dict[str, list[float]] = {name: [] for name in timed}
    for function in timed.values():
        function()
    order = list(timed.items())
    for _ in range(calls):
        for name, function in order:
            start = time.perf_counter_ns()
            function()
            times[name].append((time.perf_counter_ns() - start) / 1e3)
        order.reverse()
    found = {}
    for name, each in times.items():
        median, late = np.percentile(each, [50, 95])
        found[name] = {
            "median_us": float(median),
            "p95_over_median": float(late / median),
            "longest_ms": max(each) / 1e3,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000, help="calls of each function (2000)")
    parser.add_argument("--threads", type=int, default=2, help="num_threads of the call (2)")
    parser.add_argument(
        "--busy", type=int, default=usable_cores(), help="busy processes (one a core)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with busy(options.busy):
        found = measure(options.calls, options.threads)
    if options.json:
        print(json.dumps(found))
        return
    for name, numbers in found.items():
        shown = ", ".join(f"{key} {value:.2f}" for key, value in numbers.items())
        print(f"{name:8} {shown}")


if __name__ == "__main__":
    main()
