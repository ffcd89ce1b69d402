# SPDX-License-Identifier: Apache-2.0
"""The libraries that setup.py builds, and what is said where something is missing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore import cli
from kvcore.emulator import environment, installed, memory

Program = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
needs_linux = pytest.mark.skipif(
    installed.platform_fault() is not None, reason=str(installed.platform_fault())
)


def test_the_loaded_libraries_are_those_that_are_built() -> None:
    table = tomllib.loads((ROOT / "kvcore/emulator/cann/libraries.toml").read_text())
    assert sorted(made["file"] for made in table["library"]) == sorted(installed.LIBRARIES)


@needs_linux
def test_all_are_built() -> None:
    assert installed.missing_libraries() == []


def test_the_machine_tells_the_version_that_is_shown() -> None:
    text = (ROOT / "kvcore/emulator/cann/machine.h").read_text()
    assert f'#define KVD_CANN_VERSION "{installed.CANN_VERSION}"' in text


def test_info_says_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cli.main(["info", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["emulator"]
    versions = installed.wheels()
    assert (said["torch"], said["torch_npu"]) == (versions.torch, versions.torch_npu)
    assert said["cann"] == installed.CANN_VERSION
    assert said["tools"] == list(environment.TOOLS)
    if installed.platform_fault() is None:
        assert said["libraries"] == f"12 of 12 in {installed.HOME}"
        assert said["missing"] == []
        assert said["usable"] == versions.fault()
    monkeypatch.setattr(installed, "HOME", tmp_path)
    assert cli.main(["info"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["emulator libraries"].strip() == f"0 of 12 in {tmp_path}"
    assert lines["emulator missing"].strip() == ", ".join(installed.LIBRARIES)
    if installed.platform_fault() is None:
        assert "was not built" in lines["emulator usable"]


def linked() -> dict[str, list[str]]:
    lines = (HERE / "linked_symbols.txt").read_text().splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines if not line.startswith("#")}


@needs_linux
def test_every_symbol_that_torch_npu_links_is_there() -> None:
    """In a process of its own: the libraries are for all to see once they are loaded."""
    text = f"""
from kvcore.emulator import machine
core = machine.load().core
names = {sorted(linked())!r}
print(*[name for name in names if not hasattr(core, name)])
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert len(linked()) > 90


@needs_linux
def test_a_library_answers_to_the_name_that_is_asked_for() -> None:
    """One process: that a library was asked for by name loads no other."""
    names = [name.rpartition("/")[2] for name in installed.LIBRARIES]
    text = f"""
import ctypes
from kvcore.emulator import machine
machine.load()
for name in {names!r}:
    ctypes.CDLL(name).aclInit
    print(name)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.stdout.split() == names, done.stderr
    assert len(names) >= 10


@needs_linux
def test_nothing_is_found_by_name_before_it_is_loaded() -> None:
    text = "import ctypes; ctypes.CDLL('libascendcl.so')"
    # A machine that another test has started here is handed on to children by this variable.
    environ = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, env=environ
    )
    assert "libascendcl.so" in done.stderr


def wheels(**changes: str | None) -> installed.Wheels:
    right = installed.Wheels("2.13.0+cpu", "2.13.0", "2.13.0", "cpu")
    return dataclasses.replace(right, **changes)  # type: ignore[arg-type]


def test_a_pair_that_fits() -> None:
    assert wheels().fault() is None
    assert wheels(torch="2.7.1", torch_npu="2.7.1.post4", wanted="2.7.1").fault() is None
    assert wheels(wanted="").fault() is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch_npu": None}, "torch_npu is not installed in .*; pip install torch==2.13.0"),
        ({"torch": None}, "torch is not installed in .*; pip install torch==2.13.0"),
        (
            {"torch": "2.12.0+cpu"},
            "torch_npu 2.13.0 needs torch 2.13.0, and torch 2.12.0.cpu is installed; pip install "
            "torch==2.13.0",
        ),
        (
            {"build": "cuda 12.6", "torch": "2.13.0+cu126"},
            "was built for cuda 12.6, and torch_npu works only beside",
        ),
    ],
)
def test_a_pair_that_does_not(changes: dict[str, str | None], said: str) -> None:
    fault = wheels(**changes).fault()
    assert fault is not None
    assert re.search(said, fault)


def test_memory_is_never_more_than_half_of_what_there_is() -> None:
    there = memory.available()
    for devices in (1, 2, 16):
        size = memory.default("A3", devices)
        assert size <= 64 << 30
        assert size * devices <= max(there // 2 + (64 << 20) * devices, there // 2)
        assert size % (1 << 20) == 0


# ---------------------------------------------------------------- a real CANN in the environment
REAL = "/usr/local/Ascend/ascend-toolkit/latest"


def test_a_real_cann_is_set_aside() -> None:
    environ = {
        "ASCEND_HOME_PATH": REAL,
        "ASCEND_TOOLKIT_HOME": REAL,
        "ATB_HOME_PATH": "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1",
        "LD_LIBRARY_PATH": f"/opt/mine:{REAL}/lib64:/usr/local/Ascend/driver/lib64",
        "PYTHONPATH": f"{REAL}/python/site-packages:/home/me/src",
        "PATH": "/usr/bin",
    }
    aside = environment.apply(environment.Settings(), environ)
    assert aside["ASCEND_HOME_PATH"] == REAL
    assert aside["LD_LIBRARY_PATH"] == f"{REAL}/lib64:/usr/local/Ascend/driver/lib64"
    assert environ["LD_LIBRARY_PATH"].split(":")[-1] == "/opt/mine"
    assert "/usr/local/Ascend" not in environ["LD_LIBRARY_PATH"]
    assert environ["PYTHONPATH"] == "/home/me/src"
    assert environ["ASCEND_HOME_PATH"] == str(installed.HOME)
    assert "ATB_HOME_PATH" not in environ
    assert environ["PATH"] == "/usr/bin"
    # Said once: what is left is the machine's own.
    assert environment.foreign(environ) == {}


@pytest.mark.parametrize("memory_bytes", [None, 3 << 30])
def test_children_read_what_was_set(memory_bytes: int | None) -> None:
    settings = environment.Settings("A2", 2, memory_bytes, "raise")
    environ: dict[str, str] = {environment.MEMORY: "1"}
    environment.apply(settings, environ)
    assert environment.from_environment(environ) == settings
    assert environment.from_environment({}) is None


def test_folders_that_torch_npu_looks_for_exist() -> None:
    for name, value in environment.variables(environment.Settings()).items():
        if name.startswith("ASCEND_"):
            assert Path(value).is_dir(), name
    for name in ("runtime", "compiler"):
        assert (installed.HOME / name).is_dir()


def test_a_library_by_ctypes(program: Program) -> None:
    """A call of the machine, without torch."""
    if installed.platform_fault():
        pytest.skip(str(installed.platform_fault()))
    text = (
        "import ctypes\n"
        "from kvcore.emulator import environment, machine\n"
        "m = machine.load()\n"
        "m.become(environment.Settings('950', 3), 1 << 30, 0)\n"
        "n = ctypes.c_uint32()\n"
        "assert m.core.aclrtGetDeviceCount(ctypes.byref(n)) == 0 and n.value == 3\n"
        "m.core.aclrtGetSocName.restype = ctypes.c_char_p\n"
        "print(m.core.aclrtGetSocName().decode())\n"
    )
    done = program(text)
    assert done.stdout == "Ascend950PR_9599\n", done.stderr
