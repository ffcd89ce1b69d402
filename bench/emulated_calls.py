# SPDX-License-Identifier: Apache-2.0
"""What the emulated machine itself costs: one operator of torch, one of the vendor's, the start.

    python bench/emulated_calls.py                  # all three, each in a process of its own
    python bench/emulated_calls.py calls off        # operators of torch on 1 KiB, with check="off"
    python bench/emulated_calls.py scatter          # npu_scatter_pa_kv_cache of one token
    python bench/emulated_calls.py start            # kvcore.emulator.start(), all of it

Medians of 200 with torch_npu's default queue, and of five such medians the least: other work on the
machine only adds.  Times of the CPU kernel alone are taken off.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

CALLS, ROUNDS = 200, 5
Work = Callable[[], Any]


def started(check: str) -> tuple[Any, Any]:
    """torch and torch_npu on the machine."""
    import kvcore.emulator

    kvcore.emulator.start(memory=1 << 30, check=check)
    import torch
    import torch_npu

    torch.set_num_threads(1)
    return torch, torch_npu


def nothing() -> None:
    """Stands where there is nobody to wait for."""


def median(call: Work, after: Work = nothing, *, inside: bool = False) -> float:
    """Microseconds from call to return; ``after`` follows each, and counts if it is ``inside``."""
    rounds = []
    for _ in range(ROUNDS):
        times = []
        for _ in range(CALLS):
            begin = time.perf_counter()
            call()
            if inside:
                after()
            times.append(time.perf_counter() - begin)
            if not inside:
                after()
        rounds.append(statistics.median(times))
    return 1e6 * min(rounds)


def processor(call: Work, after: Work = nothing) -> float:
    """Microseconds of all threads for each of 200 calls in a row, with one wait behind them."""
    rounds = []
    for _ in range(4 * ROUNDS):
        begin = time.process_time()
        for _ in range(CALLS):
            call()
        after()
        rounds.append((time.process_time() - begin) / CALLS)
    return 1e6 * min(rounds)


def operators(torch: Any, device: str) -> dict[str, Work]:
    """The five calls on 1 KiB."""
    one, two = torch.randn(16, 16).to(device), torch.randn(16, 16).to(device)
    index = torch.arange(16).to(device)
    half = torch.randn(8, 16).to(device)
    return {
        "add": lambda: one + two,
        "mul_": lambda: one.mul_(1.0),
        "index_select": lambda: torch.index_select(one, 0, index),
        "cat": lambda: torch.cat((half, half)),
        "mm": lambda: torch.mm(one, two),
    }


def calls(check: str) -> None:
    """Print for each operator what a call costs beside the CPU kernel."""
    torch, npu = started(check)
    here, there = operators(torch, "cpu"), operators(torch, "npu")
    wait = npu.npu.synchronize
    print(f"check={check!r}, us a call beside the CPU kernel:")
    print(f"{'':14}{'to return':>11}{'processor':>11}{'with wait':>11}{'CPU kernel':>12}")
    for name, call in there.items():
        for _ in range(CALLS):
            call()
        wait()
        kernel, kernel_processor = median(here[name]), processor(here[name])
        print(
            f"{name:14}{median(call, wait):11.1f}{processor(call, wait) - kernel_processor:11.1f}"
            f"{median(call, wait, inside=True) - kernel:11.1f}{kernel:12.1f}"
        )


#: "return 0" for each processor.
RETURN_ZERO = {"x86_64": b"\x31\xc0\xc3", "aarch64": b"\x00\x00\x80\x52\xc0\x03\x5f\xd6"}


def emptied(function: Any) -> None:
    """Have a function of a loaded library return 0 and do nothing, from now on."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    code = RETURN_ZERO[platform.machine()]
    page = address & -mmap.PAGESIZE
    everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    libc = ctypes.CDLL(None)
    libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), everything)
    ctypes.memmove(address, code, len(code))


def scatter() -> None:
    """Print what a scatter of one token costs from call to return, and with phase two empty."""
    torch, npu = started("off")
    from kvcore.emulator import machine

    rows = [torch.randn(1, 8, 128).half().npu() for _ in range(2)]
    caches = [torch.zeros(16, 16, 8, 128, dtype=torch.float16, device="npu") for _ in range(2)]
    slots = torch.zeros(1, dtype=torch.int32).npu()

    def call() -> None:
        npu.npu_scatter_pa_kv_cache(*rows, *caches, slots, cache_mode="Norm")

    wait = npu.npu.synchronize
    for _ in range(CALLS):
        call()
    wait()
    apart, in_a_row = median(call, wait), median(call)
    wait()
    for library in machine.load().libraries[-2:-1]:
        emptied(library.aclnnScatterPaKvCache)
    empty_apart, empty_in_a_row = median(call, wait), median(call)
    for words, with_it, without in (
        ("a wait after each", apart, empty_apart),
        ("200 in a row", in_a_row, empty_in_a_row),
    ):
        print(
            f"npu_scatter_pa_kv_cache, {words}: {with_it:.1f} us from call to return, "
            f"{without:.1f} with phase two empty: {with_it / without:.2f} times"
        )


START = """
import time
begin = time.perf_counter()
import kvcore.emulator
kvcore.emulator.start()
started = time.perf_counter()
from kvcore.emulator import hooks
complete, behind = hooks._complete, []
def timed():
    before = time.perf_counter()
    complete()
    behind.append(time.perf_counter() - before)
hooks._complete = timed
import torch, torch_npu
imported = time.perf_counter()
torch.ones(3).npu().add(1).cpu()
print(started - begin, behind[0], time.perf_counter() - imported)
"""


def start() -> None:
    """Print what the start takes: before torch, behind its import, and the first operator.

    With compiled modules beside the sources, as pip leaves them: the first run writes them.
    """
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for _ in range(8):
        done = subprocess.run(
            [sys.executable, "-c", START], check=True, capture_output=True, text=True, env=environ
        )
        found.append([float(number) for number in done.stdout.split()])
    found = found[1:]
    before, behind, first = (1e3 * statistics.median(part) for part in zip(*found, strict=True))
    print(
        f"start: {before:.0f} ms before torch, {behind:.0f} ms behind torch_npu's import, together "
        f"{before + behind:.0f} ms; the first operator with its device {first:.0f} ms"
    )


def main(arguments: list[str]) -> None:
    """See above."""
    if not arguments:
        for name in ("calls", "scatter", "start"):
            subprocess.run([sys.executable, __file__, name], check=True)
        return
    name, *rest = arguments
    if name == "calls":
        calls(rest[0] if rest else "off")
    else:
        {"scatter": scatter, "start": start}[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
