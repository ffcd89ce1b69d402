# SPDX-License-Identifier: Apache-2.0
"""Runs the planted faults many times, outside of the gate:

    python tests/emulator/planted_runs.py 200            # each so often, in one process
    python tests/emulator/planted_runs.py 1 --fresh 3    # in so many processes of its own each

The environment has torch_npu; TASK_QUEUE_ENABLE is the caller's.
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
from typing import Any

import planted
import planted_caches  # noqa: F401  (enters its programs too)

import kvcore.emulator


def check(torch: Any, npu: Any, name: str, *, fault: bool) -> str:
    """Run a program once; what is wrong with what was found, "" for nothing."""
    kind, function = planted.PROGRAMS[name]
    with kvcore.emulator.expected() as found:
        function(torch, npu, fault)
    texts = "\n".join(map(str, found))
    if not fault:
        return f"{name}: without the fault\n{texts}" if found else ""
    if len(found) != 1 or found[0].kind != kind:
        return f"{name}: expected one {kind}\n{texts}"
    lines = [line for file, line in found[0].lines if file == inspect.getsourcefile(function)]
    wanted = planted.marked(function)
    if wanted and lines != wanted:
        return f"{name}: expected the lines {wanted}\n{texts}"
    return ""


def main(arguments: list[str]) -> int:
    """See above; 1 if anything was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("times", type=int)
    parser.add_argument("--fresh", type=int, default=0)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    names = given.names or list(planted.PROGRAMS)
    if given.fresh:
        runs = [(name, i) for name in names for i in range(given.fresh)]
        command = [sys.executable, __file__, str(given.times)]
        bad = [name for name, _ in runs if subprocess.run([*command, name], check=False).returncode]
        print(f"{len(runs)} processes, wrong: {', '.join(bad) or 'none'}")
        return 1 if bad else 0
    kvcore.emulator.start(memory=1 << 30)
    import torch
    import torch_npu

    wrong = set()
    for name in names:
        for _ in range(given.times):
            for fault in (True, False):
                wrong.add(check(torch, torch_npu, name, fault=fault))
    wrong.discard("")
    print(f"{len(names)} programs, {chr(10).join(sorted(wrong)) or 'nothing wrong'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
