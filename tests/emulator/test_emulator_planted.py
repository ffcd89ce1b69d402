# SPDX-License-Identifier: Apache-2.0
"""Planted faults and their twins: each is found every time, with both lines, and no twin is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted
import pytest
from planted_runs import check
from wheel import needs_wheel

Program = Callable[..., "subprocess.CompletedProcess[str]"]
HERE = Path(__file__).parent


@pytest.mark.parametrize("name", planted.PROGRAMS)
def test_a_fault_and_its_twin(npu: Any, torch: Any, name: str) -> None:
    for _ in range(5):
        assert check(torch, npu, name, fault=True) == ""
        assert check(torch, npu, name, fault=False) == ""


@needs_wheel
@pytest.mark.timeout(300)
def test_with_the_task_queue_off(program: Program) -> None:
    done = program(
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import planted_runs\n"
        "sys.exit(planted_runs.main(['1']))",
        TASK_QUEUE_ENABLE="0",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{len(planted.PROGRAMS)} programs, nothing wrong\n"
