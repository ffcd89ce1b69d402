# SPDX-License-Identifier: Apache-2.0
"""The same run writes the same figures: on CPUs with fewer instructions, and in other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.replay import ModelProfile, OffloadOptions, TraceRequest
from kvcore.replay.answer.run import answered
from kvcore.replay.sweep import grid, run_processes

MODEL = ModelProfile.named("tiny-sparse").replace(layers=3, index_layers=(0, 1), topk=64)
REQUESTS = [TraceRequest(i, 40.0 * i, 500 - 12 * (i % 9), 12, (i,)) for i in range(10)]
OPTIONS = OffloadOptions(
    fidelity="sampled", pool=128, batch=4, host_blocks=200, drafts=1, slo="ttft=2s",
    sample_requests=9,
)  # fmt: skip


def figures() -> dict[str, Any]:
    """Of the run, but for how long it took."""
    found = answered(REQUESTS, MODEL, OPTIONS)
    del found["seconds"]
    return found


def dispatched() -> list[str]:
    """The features of this CPU that numpy has loops for beside its baseline."""
    module: Any = getattr(np, "_core", None)
    module = getattr(module, "_multiarray_umath", None)
    names = getattr(module, "__cpu_dispatch__", [])
    have = getattr(module, "__cpu_features__", {})
    return [name for name in names if have.get(name)]


def test_a_cpu_with_fewer_instructions_writes_the_same() -> None:
    plain = {
        **os.environ,
        "NPY_DISABLE_CPU_FEATURES": " ".join(dispatched()),
        "OPENBLAS_CORETYPE": "Nehalem",
        "KVCORE_ISA": "portable",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    program = "import json, test_same_everywhere as t; print(json.dumps(t.figures()))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=plain
    )
    assert done.stdout.strip() == json.dumps(figures())


def test_processes_write_what_one_process_writes(tmp_path: Path) -> None:
    points = grid(["sample_seed=0,1"], OPTIONS, MODEL, REQUESTS, tmp_path)
    reports = {point.name: report for point, report in run_processes(points, MODEL, REQUESTS, 2)}
    alone = figures()
    for name, found in reports.items():
        kept = json.loads((tmp_path / f"{name}.json").read_text())
        assert kept == json.loads(json.dumps(found))
        del found["seconds"], found["sweep_key"]
        assert (json.dumps(found) == json.dumps(alone)) == (name == "sample_seed=0")
