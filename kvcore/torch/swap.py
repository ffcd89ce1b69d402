# SPDX-License-Identifier: Apache-2.0
"""swap_blocks_batch of vllm-ascend: copies between addresses given as numbers.

Nothing can check what an address means, but whether it is memory of this process can: a wrong
one is an error here, not the end of the process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcore._core.adopt import as_raw
from kvcore._core.arrays import read
from kvcore._core.overlap import Access, merge
from kvcore.errors import fail

__all__ = ["Swap", "plan_swap_blocks_batch", "swap_blocks_batch"]

MAPS = "/proc/self/maps"
ARGUMENTS = ("x", "y", "z")
DIRECTIONS = ("host to device", "device to host", "device to device")
TO_DEVICE, TO_HOST, WITHIN = range(3)
Numbers = NDArray[np.int64]


def swap_blocks_batch(x: Tensor, y: Tensor, z: Tensor, direction: int) -> None:
    """Copy z[i] bytes from address x[i] to address y[i], for every i in order.

    x, y, z: int64 [n] on the CPU, read at the call.  direction: 0, 1 or 2 (host to device, device
    to host, device to device), which makes no difference here.  Every range is checked before the
    first copy.
    """
    plan_swap_blocks_batch(x, y, z, direction).run()


def plan_swap_blocks_batch(x: Tensor, y: Tensor, z: Tensor, direction: int) -> Swap:
    """The same, to run later: the three lists are copied now, the bytes when it runs."""
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
    found = Swap(sources, targets, sizes, direction)
    found.check_values()
    return found


class Swap:
    """One call as a plan: it runs any number of times.

    demands, host_bytes, h2d_bytes, d2h_bytes: what it asks of a modelled device, as the runtime's
    own copies do.
    """

    workspace_size = 0

    def __init__(self, sources: Numbers, targets: Numbers, sizes: Numbers, direction: int) -> None:
        from kvcore.runtime.profile import D2H, H2D, HBM

        # Where the entries were in the caller's lists, for errors.
        self._places = np.flatnonzero(sizes)
        # Rows (target, source, bytes) of memory that nobody else has.
        self._table = np.stack([targets, sources, sizes], 1)[self._places]
        self.num_descriptors: int = len(self._places)
        self.bytes_moved: int = sum(self._table[:, 2].tolist())
        link = {TO_DEVICE: H2D, TO_HOST: D2H}.get(direction)
        self.host_bytes = 0
        self.h2d_bytes: int = self.bytes_moved if direction == TO_DEVICE else 0
        self.d2h_bytes: int = self.bytes_moved if direction == TO_HOST else 0
        self.demands: list[tuple[int, int, int]] = [
            (HBM, self.bytes_moved * (1 + (link is None)), self.num_descriptors)
        ]
        if link is not None:
            self.demands.insert(0, (link, self.bytes_moved, self.num_descriptors))

    def check_values(self) -> None:
        """Raise unless every range is memory of this process that may be used so."""
        targets, sources, sizes = self._table.T
        for name, starts, write in (("x", sources, False), ("y", targets, True)):
            bad = _first_outside(starts, sizes, write)
            if bad >= 0:
                what = "writable" if write else "readable"
                fail(
                    f"{name}[{self._places[bad]}]",
                    f"{sizes[bad]} bytes of {what} memory of this process",
                    f"address {starts[bad]:#x}",
                )

    def run(self) -> None:
        """Copy; checked anew, since memory may have gone since the call."""
        from kvcore.runtime._storage import move

        self.check_values()
        move(self._table)

    def run_at_once(self) -> None:
        """Copy, just after the call was checked."""
        from kvcore.runtime._storage import move

        move(self._table)

    def touched(self) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        """(reads, writes): every range."""
        targets, sources, sizes = self._table.T
        return (
            (Access("x", None, merge(sources, sizes)),),
            (Access("y", None, merge(targets, sizes)),),
        )


def _numbers(tensor: Any, name: str) -> Numbers:
    """A copy of one of the lists: what is copied may lie over the lists themselves."""
    info = read(tensor, name)
    if info.on_device:
        fail(name, "int64 [n] on the CPU", f"a tensor on {tensor.device}")
    if info.dtype_name != "int64" or len(info.shape) != 1:
        fail(name, "int64 [n]", f"{info.dtype_name} {list(info.shape)}")
    return np.array(as_raw(tensor, name).view(np.int64))


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
