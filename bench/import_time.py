# SPDX-License-Identifier: Apache-2.0
"""Time of ``import kvcore`` with the aclnn backend and with the backend removed.

    python bench/import_time.py [rounds]

Both are copies of the package, imported in new processes in turn; numpy's own import is in both.
Prints the medians and their ratio, and the same for what comes on top of ``import numpy``.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import kvcore

PROGRAM = """
import time
start = time.perf_counter()
import numpy, ml_dtypes
between = time.perf_counter()
import kvcore
end = time.perf_counter()
print(end - start, end - between)
"""
REGISTERED = '{"cpu": CpuBackend(), NPU: AclnnBackend()}'


def without_the_backend(package: Path) -> None:
    """Remove it from a copy."""
    shutil.rmtree(package / "npu")
    shutil.rmtree(package / "backends" / "aclnn")
    registry = package / "backends" / "registry.py"
    text = registry.read_text()
    assert REGISTERED in text
    lines = text.replace(REGISTERED, '{"cpu": CpuBackend()}').splitlines(keepends=True)
    registry.write_text("".join(line for line in lines if "import AclnnBackend" not in line))


def measure(folder: Path) -> tuple[float, float]:
    """Milliseconds of (all of it, kvcore alone) in a new process."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r})" + PROGRAM
    command = [sys.executable, "-I", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    whole, own = map(float, done.stdout.split())
    return 1000 * whole, 1000 * own


def main() -> None:
    """From the command line."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, name) for name in ("with", "without")]
        for folder in folders:
            shutil.copytree(
                Path(kvcore.__file__).parent,
                folder / "kvcore",
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        without_the_backend(folders[1] / "kvcore")
        for folder in folders:
            measure(folder)  # writes the byte code
        seen = [[measure(folder) for folder in folders] for _ in range(rounds)]
    for what, i in (("import numpy, ml_dtypes, kvcore", 0), ("kvcore alone", 1)):
        here = statistics.median(pair[0][i] for pair in seen)
        removed = statistics.median(pair[1][i] for pair in seen)
        ratio = statistics.median(pair[0][i] / pair[1][i] for pair in seen)
        print(f"{what}: {here:.1f} ms, {removed:.1f} ms with the backend removed, {ratio:.3f}x")


if __name__ == "__main__":
    main()
