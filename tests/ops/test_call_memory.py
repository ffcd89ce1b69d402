# SPDX-License-Identifier: Apache-2.0
"""How much memory a call takes besides its arrays: the peak of every malloc, in a process whose
allocator is counted (native/count_malloc.c)."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"

#: Bytes that any call may take, and bytes a token.
FIXED, PER_TOKEN = 65536, 16


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C compiler ({compiler[0]})")
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the counting allocator stands in front of glibc's")
    if "san" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a sanitizer has an allocator of its own")
    library = tmp_path_factory.mktemp("count") / "count_malloc.so"
    source = SUPPORT / "native" / "count_malloc.c"
    command = [*compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", str(source)]
    done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = subprocess.run(
        [sys.executable, str(SUPPORT / "call_memory.py")],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONMALLOC": "malloc"},
        cwd=SUPPORT.parents[1],
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, list[int]] = json.loads(run.stdout)
    return found


def test_the_counter_counts(peaks: dict[str, list[int]]) -> None:
    """A scatter keeps its slots as int64 at the least: a count below that would be a broken one."""
    for name, (tokens, peak) in peaks.items():
        if name.startswith(("Norm", "PA_NZ", "NHSD", "KVCache", "GatherPa")):
            assert peak >= 8 * tokens, name


def test_a_call_takes_little_memory(peaks: dict[str, list[int]]) -> None:
    beyond = {
        name: (peak, (peak - FIXED) / tokens)
        for name, (tokens, peak) in peaks.items()
        if peak > FIXED + PER_TOKEN * tokens
    }
    assert len(peaks) > 90
    assert not beyond
