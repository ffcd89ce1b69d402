# SPDX-License-Identifier: Apache-2.0
"""The names of ``import kvcore``, as editors, checkers of types and running programs see them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore
from kvcore.runtime import Device

ROOT = Path(__file__).parents[2]
LAZY = ("Buffer", "Device", "DeviceProfile", "Event", "Graph", "Stream", "current_stream")
MODULES = ("benchmarks", "hifloat8", "offload", "runtime", "testing", "torch")

RIGHT = """
import kvcore
device: kvcore.runtime.Device = kvcore.Device("A3", clock="model", race_check="raise")
stream: kvcore.Stream = device.stream()
kvcore.offload.BlockPool(3)
kvcore.testing.assert_kv_equal(0, 1)
profile: kvcore.DeviceProfile = kvcore.DeviceProfile.named(kvcore.soc.A3.name)
count: int | None = kvcore.threads.get_num_threads()
"""
#: A line, and what a checker says of it.
WRONG = {
    "kvcore.Devise()": "attr-defined",
    "kvcore.scatter_pa_kv_cach": "attr-defined",
    "kvcore.ofload": "attr-defined",
    "kvcore.offload.BlockPol": "attr-defined",
    "kvcore.runtime.Buffers": "attr-defined",
    "kvcore.Device(clok='wall')": "call-arg",
    "kvcore.Device(clock='wal')": "arg-type",
    "kvcore.Device().streamed()": "attr-defined",
    "kvcore.current_stream(1)": "arg-type",
    "kvcore.reshape_and_cache()": "call-arg",
}


def test_dir_has_what_is_imported_on_first_use() -> None:
    program = (
        "import sys, kvcore; names = dir(kvcore); "
        "assert 'anyio' not in sys.modules and 'torch' not in sys.modules; print(*names)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {*LAZY, *MODULES, *kvcore.__all__} <= set(done.stdout.split())


@pytest.mark.parametrize("name", [*LAZY, *MODULES])
def test_each_name_is_found(name: str) -> None:
    if name == "torch":
        pytest.importorskip("torch")
    assert getattr(kvcore, name) is getattr(kvcore, name)


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="module 'kvcore' has no attribute 'Devise'"):
        _ = kvcore.Devise  # type: ignore[attr-defined]


def test_a_device_shows_its_arguments() -> None:
    wanted = [p for name, p in inspect.signature(Device.__init__).parameters.items()][1:]
    assert list(inspect.signature(Device).parameters.values()) == wanted
    assert list(inspect.signature(kvcore.Device).parameters) == [p.name for p in wanted]


@pytest.mark.timeout(400)
def test_a_checker_of_types_sees_every_name(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    source = tmp_path / "user.py"
    first = len(RIGHT.splitlines()) + 1
    source.write_text(RIGHT + "".join(f"{line}\n" for line in WRONG))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent",
         "--ignore-missing-imports", "--no-color-output", "--no-error-summary",
         "--cache-dir", str(tmp_path / "cache"), str(source)],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    said = {}
    for line in done.stdout.splitlines():
        where, _, words = line.partition(": error: ")
        if words:
            said[int(where.rpartition(":")[2])] = words.rpartition("[")[2].rstrip("]")
    assert said == {first + n: code for n, code in enumerate(WRONG.values())}, done.stdout
