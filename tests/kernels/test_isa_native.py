# SPDX-License-Identifier: Apache-2.0
"""The copies that depend on the instruction set, compiled on their own: for this CPU with the
sanitizers, and for aarch64 under emulation where Debian has put a cross compiler and qemu-user."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCE = TESTS / "support" / "native" / "isa_check.c"
KERNELS = TESTS.parent / "kvcore" / "_kernels"


def build(compiler: list[str], target: Path, *flags: str) -> None:
    command = [*compiler, "-std=gnu11", "-O2", "-Wall", "-Werror", "-Wno-unused-function"]
    command += [*flags, f"-I{KERNELS}", str(SOURCE), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def sets_checked(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_every_set_of_this_cpu(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C compiler ({compiler[0]})")
    program = tmp_path / "check"
    build(compiler, program, "-fsanitize=undefined", "-fno-sanitize-recover=all")
    assert sets_checked([str(program)])[-1] == "portable"


def test_neon_under_emulation(tmp_path: Path) -> None:
    compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64"
    if platform.machine() == "aarch64":
        pytest.skip("this CPU is an aarch64 itself: the test above covers it")
    for program in (compiler, emulator):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    program = tmp_path / "check"
    build([compiler], program, "-static")
    assert sets_checked([emulator, str(program)]) == ["neon", "portable"]
