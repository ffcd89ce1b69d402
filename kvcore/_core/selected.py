# SPDX-License-Identifier: Apache-2.0
"""The selection gather's numbers in Python: its lanes and index arrays."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["STATS", "IndexArray", "SelectionLane"]

#: Keys of the stats dict, in the order of its table.
STATS = ("reused", "moved", "refreshed", "read", "swapped", "bytes_read", "bytes_moved")


class SelectionLane(NamedTuple):
    """One kind of data (K or rope).

    here is the selection cache, full the full one.  strides: bytes between blocks, rows, pieces.
    """

    here_arg: int
    full_arg: int
    here_strides: tuple[int, int, int]
    full_strides: tuple[int, int, int]
    pieces: int
    bytes: int


class IndexArray(NamedTuple):
    """An index array by argument; strides in bytes between requests, steps and entries."""

    argument: int
    request_stride: int
    step_stride: int
    stride: int
    itemsize: int
