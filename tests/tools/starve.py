# SPDX-License-Identifier: Apache-2.0
"""Let one allocation fail at each place of every operator, plan and layout, and see what is left.

    python tests/tools/starve.py                  # Python's allocators (needs CPython's _testcapi)
    python tests/tools/starve.py --malloc         # the C library's (needs a C compiler)
    python tests/tools/starve.py --malloc --all   # and Python's objects through them
    python tests/tools/starve.py --case Norm --how run
    python tests/tools/starve.py --threads 2      # two workers, streaming stores, ordered slots

Each case of tests/support/hostile_calls.py runs in a process of its own, four ways (see
starved.py), round after round with the next allocation refused.  A failure must be a MemoryError
with every array as it was; else everything is written and nothing is raised; nothing leaks and
nothing crashes.  The table counts attempts and refusals; whatever else happened is printed below,
and the exit status says whether there was any.  Nothing is random: a run is repeated by its
arguments.  Under a sanitizer build, run it as .ci/sanitize runs the tests.

A SystemError out of a line of numpy's or of Python's library, which forget in places to say that
their own allocation failed, is counted apart (``others``) and is a refusal with nothing written all
the same; out of any other line it is a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "support"))
#: Blocks that Python's free lists and caches may keep from a round.
LEAK = 40


def one(name: str, how: str, malloc: bool, threads: int) -> dict[str, Any]:
    """One case in this process."""
    import starved
    from hostile_calls import CASES
    from kvcore._kernels import isa, parallel

    case = CASES[name]
    if threads > 1:
        parallel.set_parallel_bytes(0)
        isa.set_stream_bytes(0)
        import kvcore

        kvcore.set_num_threads(threads)
    means = starved.Malloc() if malloc else starved.Python()
    starving = starved.Starving(case, how)
    found = starving.round(means)
    if how != "first call":
        blocks = starving.leak(means)
        if blocks > LEAK:
            found.faults.append(f"{blocks} blocks leaked")
    return {
        "attempts": found.attempts,
        "refused": found.refused,
        "others": found.others,
        "faults": found.faults,
    }


def shim(folder: str) -> str:
    """The library that refuses allocations, compiled."""
    library = str(Path(folder, "fail_malloc.so"))
    compiler = shlex.split(os.environ.get("CC", "cc"))
    source = str(TESTS / "support" / "native" / "fail_malloc.c")
    command = [*compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", library]
    subprocess.run([*command, "-ldl"], check=True)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--malloc", action="store_true", help="refuse the C library's allocations")
    parser.add_argument("--all", action="store_true", help="with --malloc: Python's objects too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", action="append", help="only this one; may be given again")
    parser.add_argument("--how", action="append", help="only this way; may be given again")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "HOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one, options.malloc, options.threads)))
        return 0
    from hostile_calls import CASES
    from starved import hows

    total = dict.fromkeys(("attempts", "refused", "others"), 0)
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if options.malloc:
            preload = [shim(folder), environment.get("LD_PRELOAD", "")]
            environment["LD_PRELOAD"] = " ".join(filter(None, preload))
            if options.all:
                environment["PYTHONMALLOC"] = "malloc"
        for name, case in CASES.items():
            for how in hows(case):
                if (options.case and name not in options.case) or (
                    options.how and how not in options.how
                ):
                    continue
                command = [sys.executable, __file__, "--one", name, how]
                command += ["--malloc"] * options.malloc + ["--threads", str(options.threads)]
                done = subprocess.run(command, capture_output=True, text=True, env=environment)
                where = f"{name}, {how}"
                if done.returncode:
                    faults.append(f"{where}: ended with {done.returncode}\n{done.stderr[-2000:]}")
                    continue
                found = json.loads(done.stdout.splitlines()[-1])
                faults += [f"{where}: {fault}" for fault in found["faults"]]
                for key in total:
                    total[key] += found[key]
                print(f"{where:34} {found['attempts']:6} {found['refused']:6} {found['others']:4}",
                      flush=True)  # fmt: skip
    print(f"{'all':34} {total['attempts']:6} {total['refused']:6} {total['others']:4}")
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
