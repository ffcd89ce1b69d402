# SPDX-License-Identifier: Apache-2.0
"""Many offloaded replays of one trace: a grid of options, in processes or on a Ray cluster.

Each point's report is a JSON file in the results folder, written whole or not at all; a point
whose file is there, made with the same options and trace, is not run again.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from kvcore.errors import BackendUnavailableError, fail
from kvcore.offload.models import ModelProfile
from kvcore.offload.offload_options import OffloadOptions
from kvcore.offload.offload_replay import OffloadReplay
from kvcore.offload.traces import TraceRequest

__all__ = ["Point", "grid", "run_on_ray", "run_point", "run_processes"]

#: Options that a sweep may vary, and how a value is read.
AXES: dict[str, Callable[[str], Any]] = {
    "policy": str,
    "pool": int,
    "batch": int,
    "drafts": int,
    "device": str,
    "write_policy": str,
    "seed": int,
}
MAX_POINTS = 10_000


@dataclass(frozen=True, slots=True)
class Point:
    """One run: its name among the others, its options and where its report goes."""

    name: str
    options: OffloadOptions
    path: Path
    key: str

    def done(self) -> dict[str, Any] | None:
        """The report of an earlier run, when it was of the same options and trace."""
        try:
            report = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return None
        good = isinstance(report, dict) and report.get("sweep_key") == self.key
        return report if good and not report.get("interrupted") else None


def grid(
    axes: Sequence[str],
    options: OffloadOptions,
    model: ModelProfile,
    requests: Sequence[TraceRequest],
    folder: Path,
) -> list[Point]:
    """The points of ``policy=lru,fifo pool=8192,16384``: all checked before any is run.

    Raises ParamInvalidError naming the axis, or the point whose options cannot be.
    """
    values: dict[str, list[Any]] = {}
    for axis in axes:
        name, found, listed = axis.partition("=")
        name = name.replace("-", "_")
        if not found or name not in AXES or name in values:
            fail("sweep", "axes like policy=lru,fifo, each once, of " + ", ".join(AXES), repr(axis))
        try:
            values[name] = [AXES[name](text) for text in listed.split(",")]
        except ValueError:
            fail("sweep", f"{name}=1,2,...", repr(axis))
        if len(set(values[name])) != len(values[name]):
            fail("sweep", "each value of an axis once", repr(axis))
    trace = hashlib.blake2b(
        repr([(r.timestamp_ms, r.input_length, r.output_length, r.hash_ids) for r in requests])
        .encode(),
        digest_size=8,
    ).hexdigest()  # fmt: skip
    points: list[Point] = []
    for chosen in itertools.product(*values.values()):
        if len(points) == MAX_POINTS:
            fail("sweep", f"at most {MAX_POINTS} points", "more")
        changed = dict(zip(values, chosen, strict=True))
        own = OffloadOptions(**{**asdict(options), **changed})
        label = ",".join(f"{name}={value}" for name, value in changed.items())
        try:
            own.check(model)
        except ValueError as error:
            fail("sweep", f"points that can be run, {label} among them", str(error))
        figures = {key: (f.value, f.basis) for key, f in model.figures.items()}
        said = repr((model.name, figures, asdict(own), trace))
        key = hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
        safe = "".join(c if c.isalnum() or c in "=,._-" else "_" for c in label)
        points.append(Point(label, own, folder / f"{safe}.json", key))
    return points


def run_point(
    point: Point, model: ModelProfile, requests: Sequence[TraceRequest]
) -> dict[str, Any]:
    """Run one point and write its report."""
    report = OffloadReplay(requests, model, point.options).run().to_dict()
    report["sweep_key"] = point.key
    point.path.parent.mkdir(parents=True, exist_ok=True)
    part = point.path.with_name(f"{point.path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(report))
    part.replace(point.path)
    return report


def run_processes(
    points: Sequence[Point],
    model: ModelProfile,
    requests: Sequence[TraceRequest],
    jobs: int,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Run the points that are not done yet in ``jobs`` processes; yields each as it is ready.

    When ``stop()`` is true no further point is begun; those that run are waited for.
    """
    left: list[Point] = []
    yield from _done(points, left)
    if not left:
        return
    running: dict[Future[dict[str, Any]], Point] = {}
    others = set(active_children())
    # Spawned, not forked: the parent may have threads of its own.
    with ProcessPoolExecutor(min(jobs, len(left)), get_context("spawn"), _ignore_sigint) as pool:
        try:
            while left or running:
                while left and len(running) < jobs and not stop():
                    point = left.pop(0)
                    running[pool.submit(run_point, point, model, requests)] = point
                if not running:
                    return
                ready, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in ready:
                    yield running.pop(future), future.result()
        except BaseException:
            # A second Ctrl-C, or a point that failed: nobody waits for the others.
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _done(points: Sequence[Point], left: list[Point]) -> Iterator[tuple[Point, dict[str, Any]]]:
    """The points whose reports are there already; the others go to ``left``."""
    for point in points:
        report = point.done()
        if report is None:
            left.append(point)
        else:
            yield point, report


def _ignore_sigint() -> None:
    # Ctrl-C reaches the whole process group: the parent decides, the children finish a point.
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_on_ray(
    address: str,
    points: Sequence[Point],
    model: ModelProfile,
    requests: Sequence[TraceRequest],
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """The same on a Ray cluster that is running; its workers need kvcore installed.

    Reports come back to this process, which writes them.  Raises BackendUnavailableError when ray
    is not installed.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise BackendUnavailableError(
            "ray: expected the package ray, got none installed: pip install ray",
            argument="ray",
            expected="ray",
        ) from error
    left: list[Point] = []
    yield from _done(points, left)
    if not left:
        return
    ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    try:
        run = ray.remote(_report_of)
        shared = ray.put((model, list(requests)))
        running: Mapping[Any, Point] = {run.remote(p.options, p.key, shared): p for p in left}
        waiting = list(running)
        while waiting and not stop():
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=0.5)
            for reference in ready:
                point, report = running[reference], ray.get(reference)
                point.path.parent.mkdir(parents=True, exist_ok=True)
                point.path.write_text(json.dumps(report))
                yield point, report
        for reference in waiting:
            ray.cancel(reference)
    finally:
        ray.shutdown()


def _report_of(
    options: OffloadOptions, key: str, shared: tuple[ModelProfile, Sequence[TraceRequest]]
) -> dict[str, Any]:
    model, requests = shared
    report = OffloadReplay(requests, model, options).run().to_dict()
    report["sweep_key"] = key
    return report
