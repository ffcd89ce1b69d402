# SPDX-License-Identifier: Apache-2.0
"""Calls with random faults: none may leave a handle or a byte of the device behind.

    python tests/tools/fuzz_npu.py 100000 [seed]

Every call of CANN fails with a probability of 2 % (a task on a stream, too), so that a call of an
operator, which makes some 20 of them, fails in one of three ways more often than not.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "npu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from double.direct import Double

import kvcore
import npu as calls
from kvcore.errors import KVCoreError
from kvcore.npu import options
from kvcore.npu.call import launch
from kvcore.npu.cann import library

RATE = 20_000  # per million
#: A pass over all plans makes at most this many rounds between two counts of what is left.
ROUND = 200


def plans() -> tuple[list[Any], list[calls.Placed]]:
    """One plan a path: views, copies, host values, key only, gathers, selection, update."""
    fused = np.arange(4 * 3 * 2 * 16, dtype=np.float16).reshape(4, 3, 2, 16)
    scatter = calls.Placed(
        key=fused[:, 1],
        value=fused[:, 2],
        key_cache=np.zeros((2, 4, 2, 16), np.float16),
        value_cache=np.zeros((2, 4, 2, 16), np.float16),
        slot_mapping=np.array([0, 3, 5, 6], np.int32),
    )
    arrays = scatter.arrays
    key_only = {k: v for k, v in arrays.items() if not k.startswith("value")}
    host_slots = arrays | {"slot_mapping": np.array([1, 2, -1, 7], np.int32)}
    update = calls.Placed(
        new_kv=np.ones((3, 32), np.float16),
        past=np.zeros((2, 2, 8, 32), np.float16),
        token_offset=np.array([4, 7], np.int32),
        seq_len=np.array([2, 1], np.int32),
    )
    gather = calls.Placed(
        key_cache=np.ones((3, 4, 2, 16), np.float16),
        value_cache=np.ones((3, 4, 2, 16), np.float16),
        block_tables=np.array([[2, 0], [1, 1]], np.int32),
        seq_lens=np.array([6, 3], np.int32),
        key=np.zeros((9, 2, 16), np.float16),
        value=np.zeros((9, 2, 16), np.float16),
    )
    nct = calls.Placed(
        key=np.ones((4, 2, 16), np.float16),
        key_cache=np.zeros((2, 4, 2, 16), np.float16),
        slot_mapping=np.array([0, 3, 5, 6], np.int32),
        value=np.ones((4, 2, 16), np.float16),
        value_cache=np.zeros((2, 4, 2, 16), np.float16),
    )
    made = [
        kvcore.plan_scatter_pa_kv_cache(**arrays),
        kvcore.plan_scatter_pa_kv_cache(**key_only),
        kvcore.plan_scatter_pa_kv_cache(**host_slots, backend="aclnn"),
        kvcore.plan_scatter_pa_kv_cache(
            **nct.arrays, scatter_mode="Nct", strides=(32, 16), offsets=(0, 32)
        ),
        kvcore.plan_kv_cache_update(**update.arrays, layer_id=1),
        kvcore.plan_gather_pa_kv_cache(**gather.arrays),
    ]
    return made, [scatter, update, gather, nct]


def recover(double: Double) -> None:
    """Wait until the streams have passed: a failed task is told once, and then no more."""
    cann = library.current()
    for _ in range(3):
        with contextlib.suppress(KVCoreError):
            cann.set_device(0)
            cann.aclrtSynchronizeDevice()
    launch.release(None, 0)


def fuzz(double: Double, count: int, seed: int) -> dict[str, int]:
    """Run ``count`` calls; AssertionError when one leaves something behind.

    Returns how many ended how.
    """
    made, placed = plans()
    random = np.random.default_rng(seed)
    for plan in made:
        plan.run()
    recover(double)
    live = double.live()
    ends = {"right": 0}
    for start in range(0, count, ROUND):
        double.runtime.kvdouble_fail_at_random(seed + start, RATE)
        for _ in range(min(ROUND, count - start)):
            plan = made[random.integers(len(made))]
            try:
                with options.use_options(check="device" if random.integers(2) else "host"):
                    plan.run()
                ends["right"] += 1
            except KVCoreError as error:
                name = type(error).__name__
                ends[name] = ends.get(name, 0) + 1
        double.runtime.kvdouble_fail_never()
        recover(double)
        left = double.violations()
        assert not left, left[:5]
        assert double.live() == live, f"after {start + ROUND}: {double.live_text()}"
    for array in placed:
        array.free()
    return ends


def main(run: Callable[[Double, int, int], dict[str, int]] = fuzz, what: str = "calls") -> None:
    """From the command line: a count and a seed."""
    from double import build

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory() as folder:
        installed = build.build(Path(folder))
        os.environ.update(installed.environment())
        double = Double(installed)
        double.reset()
        double.soc(calls.MACHINES["A3"])
        double.start()
        library.forget()
        began = time.monotonic()
        ends = run(double, count, seed)
        seconds = time.monotonic() - began
    print(f"{count} {what} in {seconds:.0f} s, seed {seed}: {ends}; 0 handles left")


if __name__ == "__main__":
    main()
