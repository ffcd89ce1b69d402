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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcore.errors import BackendUnavailableError, KVCoreError, ParamInvalidError, fail
from kvcore.files import write_whole
from kvcore.replay.answer.baseline import Baselines
from kvcore.replay.answer.run import answered
from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.options import OffloadOptions
from kvcore.replay.options import axes as axes_of_options
from kvcore.replay.report.comparison import read_report
from kvcore.replay.report.identity import file_hash, trace_hash
from kvcore.replay.report.offloaded import SCHEMA
from kvcore.replay.serving.fit import deployment_of, fit
from kvcore.replay.sweep_workers import Workers
from kvcore.replay.traces.reader import TraceRequest

__all__ = ["Point", "grid", "run_on_ray", "run_point", "run_processes"]

MAX_POINTS = 10_000
#: Linux allows 255, and the file is called .json.
MAX_NAME_BYTES = 240


@dataclass(frozen=True, slots=True)
class Point:
    """One run: its name among the others, its options and where its report goes."""

    name: str
    options: OffloadOptions
    path: Path
    key: str

    def done(self) -> dict[str, Any] | None:
        """The report of an earlier run, when it was of the same options and trace.

        Raises ParamInvalidError for one that another version's sweep has left there.
        """
        try:
            # No pipe or device: it may have no end, or wait for a writer.
            report = read_report(self.path) if self.path.is_file() else {}
        except (OSError, ParamInvalidError):
            return None
        if "sweep_key" in report and report.get("schema") != SCHEMA:
            seen = f"one of schema {report.get('schema', 1)}"
            fail(str(self.path), f"a sweep's report of schema {SCHEMA}; take another folder", seen)
        good = report.get("sweep_key") == self.key and _is_whole(report)
        return report if good and not report.get("interrupted") else None

    def keep(self, report: dict[str, Any]) -> None:
        """Write the report's file, whole or not at all.  Raises OSError that names it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(report))


#: What is read of a report that was there already: the path to it, and its types.
READ = (
    (("decision",), (str, type(None))),
    (("answer", "speed_up"), (int, float, type(None))),
    (("hit_rate",), (int, float, type(None))),
    (("overlap",), (int, float, type(None))),
    (("model_time_us", "step"), (int, float, type(None))),
    (("tokens_per_s", "decode"), (int, float, type(None))),
    (("bytes", "h2d"), (int, float)),
    (("rows", "real_share"), (int, float)),
    (("verified", "mismatches"), (list,)),
)


def _is_whole(report: dict[str, Any]) -> bool:
    """Whether a report has what a sweep shows of it."""
    for path, types in READ:
        value: Any = report
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return False
            value = value[key]
        if not isinstance(value, types) or isinstance(value, bool):
            return False
    return True


def grid(
    axes: Sequence[str],
    options: OffloadOptions,
    model: ModelProfile | Deployment,
    requests: Sequence[TraceRequest],
    folder: Path,
) -> list[Point]:
    """The points of ``policy=lru,fifo pool=8192,16384``: all checked before any is run.

    Raises ParamInvalidError naming the axis, or the point whose options cannot be.
    """
    known = axes_of_options()
    values: dict[str, list[Any]] = {}
    for axis in axes:
        name, found, listed = axis.partition("=")
        name = name.replace("-", "_")
        if not found or name not in known or name in values:
            fail(
                "sweep", "axes like policy=lru,fifo, each once, of " + ", ".join(known), repr(axis)
            )
        try:
            values[name] = [known[name].parse(text) for text in listed.split(",")]
        except ValueError:
            fail("sweep", f"{name}=1,2,...", repr(axis))
        if len(set(values[name])) != len(values[name]):
            fail("sweep", "each value of an axis once", repr(axis))
    trace = trace_hash(requests)
    ids = None if options.ids is None else file_hash(options.ids)
    points: list[Point] = []
    names: set[str] = set()
    for chosen in itertools.product(*values.values()):
        if len(points) == MAX_POINTS:
            fail("sweep", f"at most {MAX_POINTS} points", "more")
        changed = dict(zip(values, chosen, strict=True))
        own = OffloadOptions(**{**asdict(options), **changed})
        label = ",".join(f"{name}={value}" for name, value in changed.items())
        try:
            fit(model, own)
        except ValueError as error:
            fail("sweep", f"points that can be run, {label} among them", str(error))
        deployment = deployment_of(model, own)
        said = repr((deployment.name, deployment.digest, asdict(own), trace, ids))
        key = hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
        points.append(Point(label, own, folder / f"{_file_name(label, key, names)}.json", key))
    return points


def _file_name(label: str, key: str, taken: set[str]) -> str:
    """A name that no other point has, of characters and a length that every file system allows."""
    safe = "".join(c if c.isalnum() or c in "=,._-" else "_" for c in label)
    if len(safe.encode()) > MAX_NAME_BYTES or safe in taken:
        safe = f"{safe.encode()[: MAX_NAME_BYTES - 17].decode(errors='ignore')},{key}"
    taken.add(safe)
    return safe


def run_point(
    point: Point,
    model: ModelProfile | Deployment,
    requests: Sequence[TraceRequest],
    baselines: Baselines | None = None,
) -> dict[str, Any]:
    """Run one point and write its report.

    baselines: those that points before it were held against, of the same trace and model.
    """
    report = answered(requests, model, point.options, baselines)
    report["sweep_key"] = point.key
    point.keep(report)
    return report


def run_processes(
    points: Sequence[Point],
    model: ModelProfile | Deployment,
    requests: Sequence[TraceRequest],
    jobs: int,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Run the points that are not done yet in ``jobs`` processes; yields each as it is ready.

    When ``stop()`` is true no further point is begun; those that run are waited for.
    Raises what a point raised, and KVCoreError that names the point of a process that was killed.
    """
    left: list[Point] = []
    yield from _done(points, left)
    if not left:
        return
    processes: Workers[Point] = Workers(
        run_point, min(jobs, len(left)), model, requests, Baselines()
    )  # fmt: skip
    with processes as workers:
        while left or workers.busy:
            while left and not workers.full and not stop():
                workers.begin(left.pop(0))
            if not workers.busy:
                return
            yield from workers.finished(0.5)


def _done(points: Sequence[Point], left: list[Point]) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Yield the points whose reports are there already; the others are added to ``left``."""
    for point in points:
        report = point.done()
        if report is None:
            left.append(point)
        else:
            yield point, report


def run_on_ray(
    address: str,
    points: Sequence[Point],
    model: ModelProfile | Deployment,
    requests: Sequence[TraceRequest],
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Run the points that are not done yet on a running Ray cluster, whose workers have kvcore.

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
    with _of_ray(f"a cluster at {address}"):
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    try:
        run = ray.remote(_report_of)
        shared = ray.put((model, list(requests)))
        running: Mapping[Any, Point] = {run.remote(p.options, p.key, shared): p for p in left}
        waiting = list(running)
        while waiting and not stop():
            with _of_ray("its points to be run"):
                ready, waiting = ray.wait(waiting, num_returns=1, timeout=0.5)
            for reference in ready:
                point = running[reference]
                with _of_ray(f"{point.name} to be run"):
                    report = ray.get(reference)
                point.keep(report)
                yield point, report
        for reference in waiting:
            ray.cancel(reference)
    finally:
        ray.shutdown()


@contextmanager
def _of_ray(expected: str) -> Iterator[None]:
    """Raise kvcore's own error for one of ray in the block; a point's error stays as it is."""
    try:
        yield
    except KVCoreError:
        raise
    except Exception as error:
        inner = getattr(error, "cause", None)
        if isinstance(inner, KVCoreError):
            raise inner from error
        seen = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise BackendUnavailableError(
            f"ray: expected {expected}, got {seen}", argument="ray", seen=seen, expected=expected
        ) from error


def _report_of(
    options: OffloadOptions,
    key: str,
    shared: tuple[ModelProfile | Deployment, Sequence[TraceRequest]],
) -> dict[str, Any]:
    model, requests = shared
    report = answered(requests, model, options)
    report["sweep_key"] = key
    return report
