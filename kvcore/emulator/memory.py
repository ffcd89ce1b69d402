# SPDX-License-Identifier: Apache-2.0
"""How much device memory this process can promise without being killed for keeping the promise."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["DEVICE_BYTES", "available", "default"]

#: Memory of one device: A2 and A3 64 GB (a die), 950 128 GB, as published.
DEVICE_BYTES = {"A2": 64 << 30, "A3": 64 << 30, "950": 128 << 30}
_SMALLEST = 64 << 20


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup() -> int | None:
    """Bytes that the process's control group has left, None without a limit."""
    left: list[int] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    folders = [Path("/sys/fs/cgroup")]
    for line in lines:
        if line.startswith("0::/"):
            below = folders[0] / line[4:]
            folders += [below, *below.parents]
    for folder in folders:
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            left.append(max(0, limit - used))
    return min(left, default=None)


def _machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _SMALLEST


def _address_space() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(0, limit - pages * resource.getpagesize())


def available() -> int:
    """Bytes that this process may still have: free memory, control group and RLIMIT_AS counted."""
    known = (_machine(), _cgroup(), _address_space())
    return min(value for value in known if value is not None)


def default(soc: str, devices: int) -> int:
    """Bytes of each device: the SoC's, but all together no more than half of what is available."""
    share = available() // 2 // devices
    return max(_SMALLEST, min(DEVICE_BYTES[soc], share) >> 20 << 20)
