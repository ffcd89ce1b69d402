# SPDX-License-Identifier: Apache-2.0
"""Instructions a call costs, counted by callgrind: python bench/instructions.py

Unlike times they do not depend on what else the machine does. Each call is counted in two runs of
different length, so that the interpreter's start falls out of the difference.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

SETUP = """
import numpy as np, ml_dtypes, kvcore
key, value = (np.ones((1, 8, 128), ml_dtypes.bfloat16) for _ in range(2))
caches = [np.ones((8, 128, 8, 128), ml_dtypes.bfloat16) for _ in range(2)]
flat = [cache.reshape(-1, 8, 128).view(np.uint16) for cache in caches]
raw = [key.view(np.uint16), value.view(np.uint16)]
slots = np.array([77])
plan = kvcore.plan_scatter_pa_kv_cache(key, caches[0], slots, value, caches[1])
past = np.ones((1, 4, 16, 1024), np.float16)
new, offset, length = np.ones((4, 1024), np.float16), np.full(4, 3), np.ones(4, np.int64)
"""
CALLS = {
    "scatter_pa_kv_cache, 1 token": (
        "kvcore.scatter_pa_kv_cache(key, caches[0], slots, value, caches[1])"
    ),
    "plan.run(), 1 token": "plan.run()",
    "kv_cache_update, 4 tokens": "kvcore.kv_cache_update(new, 0, past, offset, length)",
    "numpy, two assignments": "flat[0][slots] = raw[0]; flat[1][slots] = raw[1]",
}
# So many that what a start costs more or less (some million instructions) does not show.
FEW, MANY = 1000, 21000


def count(call: str, times: int) -> int:
    """Instructions of a process that makes the call so many times."""
    code = f"{SETUP}\nfor _ in range({times}):\n    {call}\n"
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    done = subprocess.run(
        [*command, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found:
        sys.exit(f"callgrind failed: {done.stderr[-500:]}")
    return int(found[1])


def main() -> None:
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed (Debian: apt-get install valgrind)")
    for name, call in CALLS.items():
        each = (count(call, MANY) - count(call, FEW)) / (MANY - FEW)
        print(f"{name:32} {each:10,.0f} instructions a call", flush=True)


if __name__ == "__main__":
    main()
