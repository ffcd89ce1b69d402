# SPDX-License-Identifier: Apache-2.0
"""swap_blocks_batch of vllm-ascend: copies between addresses given as numbers.

Nothing can check what an address means, but whether it is memory of this process can: a wrong
one is an error here, not the end of the process.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcore._core.arrays import read
from kvcore.errors import fail

__all__ = ["swap_blocks_batch"]

MAPS = "/proc/self/maps"
ARGUMENTS = ("x", "y", "z")
DIRECTIONS = ("host to device", "device to host", "device to device")
Numbers = NDArray[np.int64]


def swap_blocks_batch(x: Tensor, y: Tensor, z: Tensor, direction: int) -> None:
    """Copy z[i] bytes from address x[i] to address y[i], for every i in order.

    x, y, z: int64 [n] on the CPU.  direction: 0, 1 or 2 (host to device, device to host, device
    to device), which makes no difference here.  Every range is checked before the first copy.
    """
    sources, targets, sizes = (
        _numbers(tensor, name) for tensor, name in zip((x, y, z), ARGUMENTS, strict=True)
    )
    for name, numbers in (("y", targets), ("z", sizes)):
        if len(numbers) != len(sources):
            fail(name, f"shape [{len(sources)}] as x", list(numbers.shape))
    if direction not in range(len(DIRECTIONS)):
        named = ", ".join(f"{i} ({text})" for i, text in enumerate(DIRECTIONS))
        fail("direction", f"one of {named}", direction)
    for i in np.flatnonzero(sizes < 0)[:1]:
        fail(f"z[{i}]", "a size >= 0", sizes[i])
    used = np.flatnonzero(sizes)
    for name, starts, write in (("x", sources, False), ("y", targets, True)):
        bad = _first_outside(starts[used], sizes[used], write)
        if bad >= 0:
            i = used[bad]
            what = "writable" if write else "readable"
            fail(
                f"{name}[{i}]",
                f"{sizes[i]} bytes of {what} memory of this process",
                f"address {starts[i]:#x}",
            )
    for i in used:
        ctypes.memmove(int(targets[i]), int(sources[i]), int(sizes[i]))


def _numbers(tensor: Tensor, name: str) -> Numbers:
    info = read(tensor, name)
    if info.dtype_name != "int64" or len(info.shape) != 1:
        fail(name, "int64 [n]", f"{info.dtype_name} {list(info.shape)}")
    found: Numbers = tensor.numpy()
    return found


def _first_outside(starts: Numbers, sizes: Numbers, write: bool) -> int:
    """Index of the first range that is not whole inside memory of this process; -1: none."""
    regions = _regions(write)
    if regions is None or not len(starts):
        return -1
    place = np.searchsorted(regions[:, 0], starts, side="right") - 1
    inside = (place >= 0) & (starts > 0)
    # Compared by what is left, so that no sum can wrap.
    inside &= sizes <= regions[place, 1] - starts
    return -1 if inside.all() else int(np.argmin(inside))


def _regions(write: bool) -> Numbers | None:
    """[n, 2] address ranges that may be read (and written), neighbours joined."""
    found: list[list[int]] = []
    try:
        with open(MAPS) as lines:
            for line in lines:
                span, access = line.split(maxsplit=2)[:2]
                if access[0] != "r" or (write and access[1] != "w"):
                    continue
                start, end = (int(text, 16) for text in span.split("-"))
                if end >= 2**63:
                    continue
                if found and found[-1][1] == start:
                    found[-1][1] = end
                else:
                    found.append([start, end])
    except OSError:  # not Linux: the addresses are taken on trust, as on the device
        return None
    return np.array(found, np.int64).reshape(-1, 2)
