# SPDX-License-Identifier: Apache-2.0
"""What a sampled replay takes of this machine's memory: the formula of the page on replays."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from kvcore.replay import ModelProfile, OffloadOptions, OffloadReplay
from kvcore.replay.serving.rehearsal import most_bytes
from kvcore.replay.traces.reader import TraceRequest

def peak():
    # Of this program alone: what getrusage says begins with the process that started it.
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))

model = ModelProfile.named("glm-5.2")
options = OffloadOptions(
    fidelity="sampled", pool=4096, batch=6, sample_requests=6, verify_samples=6
)
requests = [
    TraceRequest(n, 0.0, 20_000, 3, tuple(range(100 * n, 100 * n + 40))) for n in range(6)
]
before = peak()
replay = OffloadReplay(requests, model, options)
report = replay.run()
print(peak() - before, most_bytes(model, options, 4096, 20_003), report.totals.real_rows)
"""


def test_the_sample_takes_what_the_formula_says() -> None:
    """Six requests of 20,000 tokens, of which four could be served at a time: 184 MB of rows."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, most, rows = (int(value) for value in done.stdout.split())
    assert rows > 0
    assert most < 130e6
    assert grown < most
    assert grown > 0.3 * most  # the rows of prompts are there
