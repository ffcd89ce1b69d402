# SPDX-License-Identifier: Apache-2.0
"""What is no input: typed errors from every door of an NPU's device, as from a modelled one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_fixtures import npu
from double import build
from double.direct import Double

import kvcore
from kvcore import cli
from kvcore.errors import KVCoreError, ParamInvalidError
from kvcore.npu import selftest
from kvcore.npu.cann import library
from kvcore.npu.cann.search import Search

__all__ = ["npu"]

HUGE = 2**200
NOTHING: list[Any] = [
    *(None, object(), -1, 2**63, HUGE, float("nan"), float("inf"), 1.5, True, "x", b"x", {}, type),
    *([], [1, -2], [2**40] * 3, (2**62, 4), [None], [float("nan")], {"a": 1}, print),
    *(np.float32(3), np.array([1, 2]), np.zeros((4, 4), np.float32)),
]
Door = Callable[["Things", Any], object]


class Things:
    """A device, and what it makes."""

    def __init__(self, dev: kvcore.Device, other: kvcore.Device) -> None:
        self.dev, self.stream, self.event = dev, dev.stream(), dev.event()
        self.buffer, self.host = dev.empty((4, 4)), dev.empty_host((4, 4))
        with dev.capture(origin := dev.stream()) as self.graph:
            origin.fill(self.buffer, 0)
        self.wrong = [
            *(dev, self.stream, self.event, self.buffer, self.host, dev.empty_swapped(4)),
            *(other, other.stream(), other.event(), other.empty((4, 4)), self.graph),
        ]


DOORS: dict[str, Door] = {
    "synchronize": lambda t, x: t.stream.synchronize_blocking(x),
    "empty": lambda t, x: t.dev.empty(x),
    "empty_host": lambda t, x: t.dev.empty_host(x),
    "empty_swapped": lambda t, x: t.dev.empty_swapped(x),
    "dtype": lambda t, x: t.dev.empty(4, x),
    "align": lambda t, x: t.dev.empty(4, "int8", align=x),
    "memory": lambda t, x: t.dev.memory(x),
    "view": lambda t, x: t.buffer.view(x),
    "view dtype": lambda t, x: t.buffer.view(dtype=x),
    "view of pinned": lambda t, x: t.host.view(dtype=x),
    "index": lambda t, x: t.buffer[x],
    "host": lambda t, x: t.host.host(x).__enter__(),
    "record": lambda t, x: t.event.record(x),
    "elapsed": lambda t, x: t.event.elapsed_time(x),
    "wait": lambda t, x: t.stream.wait_event(x),
    "wait_stream": lambda t, x: t.stream.wait_stream(x),
    "record_event": lambda t, x: t.stream.record_event(x),
    "copy to": lambda t, x: t.stream.copy(x, t.buffer),
    "copy from": lambda t, x: t.stream.copy(t.buffer, x),
    "batch to": lambda t, x: t.stream.copy_batch(x, [t.buffer]),
    "batch from": lambda t, x: t.stream.copy_batch([t.buffer], [x]),
    "fill": lambda t, x: t.stream.fill(x, 0),
    "fill with": lambda t, x: t.stream.fill(t.buffer, x),
    # a stream has a run(), as plans do
    "launch": lambda t, x: None if hasattr(x, "run") else t.stream.launch(x),
    "call": lambda t, x: t.stream.call(x) if not callable(x) else None,
    "capture": lambda t, x: t.dev.capture(x),
    "use": lambda t, x: t.dev.use(x),
    "replay": lambda t, x: t.graph.replay(x),
    "key": lambda t, x: kvcore.scatter_pa_kv_cache(x, t.buffer, t.buffer),
    "cache": lambda t, x: kvcore.scatter_pa_kv_cache(t.buffer, x, t.buffer),
    "slots": lambda t, x: kvcore.scatter_pa_kv_cache(t.buffer, t.buffer, x),
    "profile": lambda t, x: kvcore.Device(x, backend="aclnn"),
    "backend": lambda t, x: kvcore.Device(backend=x),
    **{
        name: lambda t, x, name=name: kvcore.Device(backend="aclnn", **{name: x})
        for name in ("clock", "race_check", "workers", "seed", "check_host", "max_events")
    },
}


def test_every_door_gives_typed_errors(npu: Double) -> None:
    refused = 0
    with kvcore.Device(backend="aclnn") as dev, kvcore.Device(backend="aclnn") as other:
        things = Things(dev, other)
        for name, door in DOORS.items():
            for x in (*NOTHING, *things.wrong):
                try:
                    door(things, x)
                except KVCoreError:
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"{name} of {x!r}") from error
        dev.synchronize_blocking()
    assert refused > len(DOORS) * len(NOTHING) / 2


@pytest.mark.parametrize("seconds", [-1, -0.5, float("nan"), HUGE**9, "1", True, object(), [1]])
def test_times_that_are_none(npu: Double, seconds: Any) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        stream = dev.stream()
        stream.fill(dev.empty(4), 1)
        with pytest.raises(ParamInvalidError) as caught:
            stream.synchronize_blocking(seconds)
        assert caught.value.argument == "timeout_s"
        for enough in (None, 20, 20.5, np.float32(20), float("inf"), 1e300):
            stream.synchronize_blocking(enough)


# ---------------------------------------------------------------- the environment


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    return tmp_path / "one"


def nonsense(loop: Path) -> Iterator[str]:
    yield from ("", "   ", "/dev/null", "~nosuchuser", "/" + "x" * 6000, os.fsdecode(b"/\xff\xfe"))
    yield str(loop)


@pytest.mark.parametrize("name", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
def test_homes_that_are_none(npu: Double, loop: Path, name: str) -> None:
    """They are passed over; the other one is found."""
    for text in nonsense(loop):
        search = Search({**os.environ, name: text})
        found = search.runtime()
        assert found is not None, text
        assert search.operators(found)


@pytest.mark.parametrize("name", ["ASCEND_CUSTOM_OPP_PATH", "KVCORE_ACLNN_LIBRARY_PATH"])
def test_lists_of_folders_that_are_none(npu: Double, loop: Path, name: str) -> None:
    for text in nonsense(loop):
        for listed in (f":{text}:", f"::{text}", ":"):
            search = Search({**os.environ, name: listed})
            given = name == "KVCORE_ACLNN_LIBRARY_PATH" and bool(listed.replace(":", "").strip())
            found = search.runtime()
            assert (found is None) is given, listed
            if found is not None:
                assert len(search.operators(found)) == 2  # the vendor's and CANN's


def test_vendors_that_are_none(npu: Double, tmp_path: Path) -> None:
    config = tmp_path / "vendors" / "config.ini"
    for make in (
        lambda: config.mkdir(parents=True),
        lambda: (config.rmdir(), config.write_bytes(b"load_priority=\xff,,\x00\n" + bytes(99))),
    ):
        make()
        search = Search({**os.environ, "ASCEND_OPP_PATH": str(tmp_path)})
        found = search.runtime()
        assert found is not None
        assert len(search.operators(found)) == 1


def test_a_blank_path_of_kernels_counts_as_unset(
    npu: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_OPP_PATH", " ")
    library.forget()
    assert kvcore.backends.why_not("aclnn") is None
    assert os.environ["ASCEND_OPP_PATH"].endswith("opp")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_that_no_terminal_shows(
    npu: Double, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", os.fsdecode(b"/\xff\xfe"))
    library.forget()
    for main, arguments in ((cli.main, ["info"]), (selftest.main, ["--only", "none"])):
        out = io.TextIOWrapper(io.BytesIO(), encoding)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            main(arguments)
            out.flush()
        assert rb"/\udcff\udcfe" in out.buffer.getvalue()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- the end of the process

BEGIN = """
import sys, time
import numpy as np, kvcore
from kvcore.npu.cann import library
dev = kvcore.Device(backend="aclnn")
def work():
    stream, other = dev.stream(), dev.stream()
    there, here, plain = dev.empty((64, 64)), dev.empty_host((64, 64)), np.zeros((64, 64), "f4")
    key, cache = dev.empty((2, 2, 16), "float16"), dev.empty((2, 4, 2, 16), "float16")
    slots = dev.empty(2, "int32")
    stream.fill(slots, 1); stream.fill(there, 3); stream.copy(here, there)
    stream.copy(there, plain); stream.copy(plain, there)
    plan = kvcore.plan_scatter_pa_kv_cache(key, cache, slots)
    stream.launch(plan); other.wait_event(stream.record_event()); other.launch(plan)
    stream.call(time.sleep, 0.05); stream.call(int)
    return stream, there, plan
"""
ENDS = {
    "left": "with dev:\n    kept = work()\n    sys.exit(0)",
    "never left": "dev.__enter__(); kept = work(); kvcore.scatter_pa_kv_cache(*kept[2].arrays[:3])",
    "stuck": "dev.__enter__(); kept = work()\n"
    "library.current().runtime.handle.kvdouble_hold(True); more = work()",
    "a generator": "def run():\n    with dev:\n        kept = work()\n        yield\n"
    "running = run(); next(running)",
}


@pytest.mark.parametrize("end", ENDS)
def test_python_ends_with_work_queued(cann: build.Installation, end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", BEGIN + ENDS[end]],
        env={**os.environ, **cann.environment()},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
