# SPDX-License-Identifier: Apache-2.0
"""The processes of a sweep: reports, killed workers, a killed parent, Ctrl-C, files of others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.errors import KVCoreError, ParamInvalidError
from kvcore.replay.sweep_workers import Workers

PROGRAM = [sys.executable, "-m", "kvcore", "replay", "--requests", "2"]
KEYS = ("hit_rate", "overlap", "model_time_us", "tokens_per_s", "bytes", "rows", "verified")


class Point:
    def __init__(self, name: str) -> None:
        self.name = name


# Run in a worker, so at the top of a module.
def report(point: Point, what: str) -> dict[str, Any]:
    return {"name": point.name, "what": what, "pid": os.getpid()}


def fail(point: Point, what: str) -> dict[str, Any]:
    raise ParamInvalidError(f"{point.name}: expected {what}, got nothing", argument="x")


def fault(point: Point, what: str) -> dict[str, Any]:
    raise LookupError(what)


def die(point: Point, what: str) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leave(point: Point, what: str) -> dict[str, Any]:
    os._exit(3)


def signals(point: Point, what: str) -> dict[str, Any]:
    """Ctrl-C reaches the whole group of processes."""
    os.kill(os.getpid(), signal.SIGINT)
    return {"blocked": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def all_of(workers: Workers[Point], count: int) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    points = [Point(f"p{n}") for n in range(count)]
    while points or workers.busy:
        while points and not workers.full:
            workers.begin(points.pop(0))
        found += [(point.name, told) for point, told in workers.finished(1)]
    return sorted(found)


def test_workers_are_used_again() -> None:
    with Workers(report, 2, "shared") as workers:
        found = all_of(workers, 5)
    assert [name for name, _ in found] == [f"p{n}" for n in range(5)]
    assert all(told["name"] == name and told["what"] == "shared" for name, told in found)
    assert len({told["pid"] for _, told in found} | {os.getpid()}) <= 3
    assert gone([told["pid"] for _, told in found])


def gone(pids: list[int]) -> bool:
    """Whether they have ended; the parent of one that was given away may not have asked yet."""
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            return False
    return True


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (fail, ParamInvalidError, r"^p0: expected shared, got nothing$"),
        (fault, LookupError, "^shared"),
        (die, KVCoreError, r"^sweep: expected the process of p0 to report, got .*\(SIGKILL\)"),
        (leave, KVCoreError, r"the process of p0 to report, got .*\(exit status 3\)"),
    ],
)
def test_what_a_point_ends_with(
    function: Callable[..., dict[str, Any]], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words), Workers(function, 1, "shared") as workers:
        all_of(workers, 1)


def test_ctrl_c_is_not_for_workers() -> None:
    with Workers(signals, 1, "") as workers:
        assert all_of(workers, 1) == [("p0", {"blocked": True})]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


PARENT = """
import os, sys
sys.path.insert(0, {tests!r})
from test_sweep_processes import Point, waits
from kvcore.replay.sweep_workers import Workers
if __name__ == "__main__":
    with Workers(waits, 2, {pipe!r}) as workers:
        workers.begin(Point("a")); workers.begin(Point("b"))
        list(workers.finished(50))
"""


def waits(point: Point, pipe: str) -> dict[str, Any]:
    """Say that it runs, and never end by itself."""
    with open(pipe, "w") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        signal.pause()


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    pipe, script = tmp_path / "pipe", tmp_path / "parent.py"
    os.mkfifo(pipe)
    script.write_text(PARENT.format(tests=str(Path(__file__).parent), pipe=str(pipe)))
    # A worker holds this end open until it ends.
    reader, writer = os.pipe()
    parent = subprocess.Popen([sys.executable, script], stdout=writer, stderr=writer)
    os.close(writer)
    workers: list[int] = []
    while len(workers) < 2:
        with pipe.open() as file:
            workers += [int(line) for line in file]
    parent.kill()
    parent.wait()
    with os.fdopen(reader, "rb") as said:
        assert said.read() == b""  # which ends when the last process has
    assert gone(workers)


def sweep(folder: Path) -> list[str]:
    """A sweep of one point over one short request; its trace lies beside the folder."""
    trace = folder.with_suffix(".jsonl")
    if folder.parent.is_dir():
        request = {"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1]}
        trace.write_text(json.dumps(request))
    options = ["--sweep", "pool=512", "--jobs", "1", "--results", str(folder)]
    return ["replay", str(trace), *options]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sweep")
    assert main(sweep(folder)) == 0
    assert os.listdir(folder) == ["pool=512.json"]
    return (folder / "pool=512.json").read_text()


def without(text: str, *keys: str) -> str:
    found = json.loads(text)
    for key in keys:
        del found[key]
    return json.dumps(found)


@pytest.mark.parametrize(
    "make",
    [
        lambda text: "[1, 2]",
        lambda text: "[" * 100_000,
        lambda text: "1" * 5000,
        lambda text: "",
        lambda text: text.replace("{", '{"steps": 1,', 1),  # a key that comes twice
        lambda text: without(text, *KEYS),
        *[lambda text, key=key: without(text, key) for key in KEYS],
        lambda text: json.dumps(json.loads(text) | {key: [] for key in KEYS}),
        lambda text: json.dumps(json.loads(text) | dict.fromkeys(KEYS, "\\x1b[2J")),
    ],
)
def test_a_report_that_is_none_is_made_again(
    make: Callable[[str], str],
    whole: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "pool=512.json"
    monkeypatch.setattr("kvcore.replay.sweep.Workers", _InThisProcess)
    path.write_text(whole)
    assert main(sweep(tmp_path)) == 0
    assert path.read_text() == whole  # the legal twin: nothing is run
    path.write_text(make(whole))
    assert main(sweep(tmp_path)) == 0
    assert json.loads(path.read_text()).keys() == json.loads(whole).keys()
    assert "\x1b" not in capsys.readouterr().out


class _InThisProcess:
    """Stands for the processes where they are not what is tested."""

    def __init__(self, function: Any, count: int, *shared: Any) -> None:
        self.function, self.shared, self.busy, self.full = function, shared, 0, False

    def __enter__(self) -> _InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def begin(self, point: Any) -> None:
        self.point, self.busy = point, 1

    def finished(self, seconds: float) -> Any:
        self.busy = 0
        yield self.point, self.function(self.point, *self.shared)


def test_a_pipe_in_the_place_of_a_report_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pool=512.json")
    # The report is written into the pipe: there must be a reader.
    reader = os.open(tmp_path / "pool=512.json", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main(sweep(tmp_path)) == 0
    finally:
        os.close(reader)


def test_a_killed_worker_ends_the_command_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcore.replay.sweep.run_point", die_at_a_point)
    assert main(sweep(tmp_path)) == 2
    err = capsys.readouterr().err
    assert err.splitlines() == [
        "kvcore replay: sweep: expected the process of pool=512 to report, got one that ended"
        " (SIGKILL); reports that were written stay"
    ]


def die_at_a_point(point: Any, model: Any, requests: Any, baselines: Any) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text(""), "expected a folder, got"),
        (lambda path: path.symlink_to("nowhere/at/all"), "expected a folder, got"),
    ],
)
def test_a_folder_that_is_none_is_refused_first(
    make: Callable[[Path], None],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kvcore.replay.sweep.Workers", None)
    path = tmp_path / "results"
    make(path)
    assert main(sweep(path)) == 2
    assert words in capsys.readouterr().err
    assert main(sweep(path / "below")) == 2


def test_names_of_files_are_short_and_apart(tmp_path: Path) -> None:
    from kvcore.replay.sweep import MAX_NAME_BYTES, _file_name

    taken: set[str] = set()
    names = [_file_name(label, str(n), taken) for n, label in enumerate(
        ["device=a/b.toml", "device=a_b.toml", "device=" + "é" * 300, "device=" + "é" * 301]
    )]  # fmt: skip
    assert len(set(names)) == 4
    assert all(len(name.encode()) <= MAX_NAME_BYTES and "/" not in name for name in names)
    for name in names:
        (tmp_path / f"{name}.json").touch()
