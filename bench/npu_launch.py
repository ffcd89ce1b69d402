# SPDX-License-Identifier: Apache-2.0
"""Cost of a call of one token: the cpu backend's, and the aclnn backend's over the test double.

    python bench/npu_launch.py [repetitions]

Microseconds of the calling thread's own CPU time, so that other programs on the machine do not
count; medians of rounds.  The double's streams work when the device is asked at the end of a round,
outside of the time.  "own" is the same with functions that do nothing in CANN's place: what
is left is this library's, and the interpreter's.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "npu"))

import numpy as np
from double import build
from double.direct import Double

import kvcore
import npu as calls
from kvcore.npu.call import launch
from kvcore.npu.cann import library

ROUNDS = 15


def arrays() -> dict[str, Any]:
    """A token of 8 heads of 128 into pages of 128."""
    return {
        "key": np.ones((1, 8, 128), np.float16),
        "key_cache": np.zeros((4, 128, 8, 128), np.float16),
        "slot_mapping": np.array([77], np.int32),
        "value": np.ones((1, 8, 128), np.float16),
        "value_cache": np.zeros((4, 128, 8, 128), np.float16),
    }


def measure(call: Callable[[], object], repetitions: int, settle: Callable[[], object]) -> float:
    """Microseconds of this thread's CPU time a call."""
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(repetitions):
            call()
        times.append(time.thread_time() - start)
        settle()
    return 1e6 * statistics.median(times) / repetitions


def called(double: Double, call: Callable[[], object]) -> list[str]:
    """The functions of CANN that one call calls, in order."""
    call()
    double.runtime.kvdouble_forget_calls()
    call()
    return [line.partition("(")[0] for line in double.calls()]


def without_cann(cann: Any, names: list[str]) -> None:
    """Functions that do nothing, for those a launch calls."""
    for name in names:
        answer = 1 if name.startswith("aclCreate") else 0
        setattr(cann, name, lambda *_, answer=answer: answer)
        cann._unchecked[name] = lambda *_: 0


def main() -> None:
    """From the command line."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    host = arrays()
    plan = kvcore.plan_scatter_pa_kv_cache(**host)
    cpu = {
        "plan.run": measure(plan.run, repetitions, int),
        "one-shot": measure(lambda: kvcore.scatter_pa_kv_cache(**host), repetitions, int),
    }
    with tempfile.TemporaryDirectory() as folder:
        installed = build.build(Path(folder))
        os.environ.update(installed.environment())
        double = Double(installed)
        double.soc(calls.MACHINES["A3"])
        double.start()
        library.forget()
        cann = library.current()
        settle = cann.aclrtSynchronizeDevice
        placed = calls.Placed(**arrays())
        names: list[str] = []
        took: dict[str, list[float]] = {name: [] for name in cpu}
        for stands_in in (False, True):
            if stands_in:
                kept = dict(vars(cann)), dict(cann._unchecked)
                without_cann(cann, names)
            plan = kvcore.plan_scatter_pa_kv_cache(**placed.arrays)
            ways: dict[str, Callable[[], object]] = {
                "plan.run": plan.run,
                "one-shot": lambda: kvcore.scatter_pa_kv_cache(**placed.arrays),
            }
            names = names or called(double, plan.run)
            for name, call in ways.items():
                took[name].append(measure(call, repetitions, settle))
        vars(cann).clear()
        vars(cann).update(kept[0], _unchecked=kept[1])
        for name, (whole, own) in took.items():
            print(
                f"{name}: cpu {cpu[name]:.2f} us; aclnn {whole:.0f} us ({whole / cpu[name]:.0f}x), "
                f"of which own {own:.0f} us ({own / cpu[name]:.0f}x)"
            )
        print(f"{len(names)} calls of CANN: {', '.join(names)}")
        settle()
        placed.free()
        launch.release(None, 0)


if __name__ == "__main__":
    main()
