# SPDX-License-Identifier: Apache-2.0
"""Run the kernels' AVX-512 code, instruction by instruction in C, on a CPU without AVX-512.

    python tests/tools/avx512_in_c.py                       # tests/kernels and tests/core
    python tests/tools/avx512_in_c.py --row zen5 tests/ops   # what a row of the table of CPUs takes

The tree is copied.  In the copy each AVX-512 intrinsic of the kernels is replaced by a C function
of the same meaning (SIMDe's, from Debian's ``libsimde-dev``, and a few in
tests/support/native/avx512_in_c.h), and the CPU is said to have the set.  The copy is built and the
tests named are run in it.  That shows the bytes; it shows neither the speed nor that the compiler's
own intrinsics and the CPU do what their documentation says.

Further arguments go to pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "tests" / "support" / "native" / "avx512_in_c.h"
#: What stands in the kernels' headers -> what stands there in the copy.
REPLACED = {
    r"\b_mm512_": "c512_",
    r"\b__m512(i?)\b": r"c512\1",
    r"\b__mmask(32|64)\b": r"cmmask\1",
    r'"avx512f,avx512bw"': '"avx2"',
    r",avx512[a-z]+": "",
    r'__builtin_cpu_supports\("avx512[a-z]+"\)': "1",
    r"#include <immintrin\.h>": f'#include "{HEADER.name}"',
}


def copy_with_c(target: Path) -> None:
    """Copy what git knows of the tree; replace the intrinsics in the kernels' headers."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    kernels = target / "kvcore" / "_kernels"
    for header in kernels.glob("*.h"):
        text = header.read_text()
        for pattern, instead in REPLACED.items():
            text = re.sub(pattern, instead, text)
        header.write_text(text)
    shutil.copy2(HEADER, kernels)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--row", help="a row of the table of CPUs (KVCORE_CPU)")
    options, tests = parser.parse_known_args()
    environment = os.environ | {"CFLAGS": "-mavx2 -mf16c -Wno-psabi"}
    if options.row:
        environment["KVCORE_CPU"] = options.row
    with tempfile.TemporaryDirectory(prefix="kvcore-avx512-") as folder:
        copy_with_c(Path(folder))
        environment["PYTHONPATH"] = folder
        for command in (
            ["setup.py", "-q", "build_ext", "--inplace"],
            ["-c", "from kvcore._kernels import isa; assert isa.available()[0] == 'avx512'"],
            ["-m", "pytest", "-q", *(tests or ["tests/kernels", "tests/core"])],
        ):
            status = subprocess.run(
                [sys.executable, *command], cwd=folder, env=environment, check=False
            ).returncode
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
