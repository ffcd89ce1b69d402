# SPDX-License-Identifier: Apache-2.0
"""What the emulated machine's checks cost: a step of 32 layers for 8 requests, under torch_npu.

    python bench/emulated_step.py              # "off" and "report" in processes of their own
    python bench/emulated_step.py report 10000 # one of them, with the memory after so many steps

Each layer: rms_norm, a product of 256 x 256, one scatter into a paged cache, one block gathered,
four additions, and a copy with a record and a wait on a second stream.  Medians; torch_npu's
default queue.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS, REQUESTS, WIDTH = 32, 8, 256


def step_of(torch: Any, npu: Any) -> Callable[[], None]:
    """A step, with everything it needs made before."""
    x = torch.randn(REQUESTS, WIDTH).npu()
    weight, scale = torch.randn(WIDTH, WIDTH).npu() / 16, torch.ones(WIDTH, device="npu")
    caches = [torch.zeros(16, 16, 8, 128, dtype=torch.float16, device="npu") for _ in range(2)]
    rows = [torch.randn(REQUESTS, 8, 128).half().npu() for _ in range(2)]
    slots = torch.arange(0, 16 * REQUESTS, 16, dtype=torch.int32).npu()
    table = torch.tensor([[3]], dtype=torch.int32).npu()
    length = torch.tensor([16], dtype=torch.int32).npu()
    block = [torch.zeros(16, 8, 128, dtype=torch.float16, device="npu") for _ in range(2)]
    host = torch.zeros(16, 8, 128, dtype=torch.float16).pin_memory()
    side = torch.npu.Stream()
    ready, copied = torch.npu.Event(), torch.npu.Event()

    def norm(value: Any) -> Any:
        return torch.rms_norm(value, (WIDTH,), scale)

    def step() -> None:
        main = torch.npu.current_stream()
        value = x
        for _ in range(LAYERS):
            value = norm(value) @ weight
            npu.npu_scatter_pa_kv_cache(*rows, *caches, slots, cache_mode="Norm")
            npu.npu_gather_pa_kv_cache(*caches, table, length, *block)
            for _ in range(4):
                value = value + x
            ready.record(main)
            side.wait_event(ready)
            with torch.npu.stream(side):
                host.copy_(block[0], non_blocking=True)
                copied.record(side)
            main.wait_event(copied)
        torch.npu.synchronize()

    return step


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def one(check: str, steps: int) -> None:
    """Print the median of a step in milliseconds, and what memory grew by over the last half."""
    import kvcore.emulator

    kvcore.emulator.start(memory=1 << 30, check=check)
    import torch
    import torch_npu

    torch.set_num_threads(1)
    step = step_of(torch, torch_npu)
    times, half = [], 0
    for i in range(steps):
        before = time.perf_counter()
        step()
        times.append(time.perf_counter() - before)
        if i == steps // 2:
            half = resident()
    late = times[len(times) // 2 :]
    print(
        f"{check}: {1e3 * statistics.median(late):.2f} ms a step (best {1e3 * min(late):.2f}), "
        f"{steps} steps; memory grew by {(resident() - half) / 2**20:.1f} MiB in the last half, "
        f"{len(kvcore.emulator.reports())} reports"
    )


def main(arguments: list[str]) -> None:
    """See above."""
    if arguments:
        one(arguments[0], int(arguments[1]) if len(arguments) > 1 else 200)
        return
    for check in ("off", "report", "off", "report"):
        subprocess.run([sys.executable, __file__, check], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
