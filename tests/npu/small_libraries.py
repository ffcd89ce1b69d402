# SPDX-License-Identifier: Apache-2.0
"""C libraries of a few lines, for what a whole double of CANN is too well-behaved to show."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("cc")

#: Every call answers STATUS, as those of devlib answer 100039.
STUB = """
#include <stddef.h>
#include <stdint.h>
int aclInit(const char *path) { return STATUS; }
int aclrtGetDeviceCount(uint32_t *n) { *n = DEVICES; return COUNT_STATUS; }
int aclrtSetDevice(int32_t id) { return id == 0 ? 0 : 107001; }
const char *aclrtGetSocName(void) { return SOC; }
const char *aclGetRecentErrMsg(void) { return TEXT; }
int aclrtMalloc(void **p, size_t n, int policy) { return n > 100 ? 207001 : 0; }
int64_t marker(void) { return MARKER; }
"""
DEFAULTS = {
    "STATUS": "0",
    "COUNT_STATUS": "0",
    "DEVICES": "1",
    "SOC": '"Ascend910B1"',
    "TEXT": "NULL",
    "MARKER": "1",
}


def build(path: Path, **defines: str) -> Path:
    """Compile STUB to that path."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(STUB)
    words = [f"-D{name}={value}" for name, value in (DEFAULTS | defines).items()]
    command = [COMPILER, "-O0", "-w", "-shared", "-fPIC", *words, str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    return path
