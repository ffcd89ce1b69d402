# SPDX-License-Identifier: Apache-2.0
"""The selection gather's numbers in Python: its lanes, and the byte ranges a run touched."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore._core.overlap import merge

__all__ = ["STATS", "IndexArray", "SelectionLane", "lane_ranges"]

#: Keys of the stats dict, in the order of its table.
STATS = ("reused", "moved", "refreshed", "read", "swapped", "bytes_read", "bytes_moved")

# select_op and select_row of _kernels/select.pxd.
OP = np.dtype([("src", "i8"), ("place", "i4"), ("kind", "i4")])
ROW = np.dtype(
    [
        (name, "i8")
        for name in (
            *("n", "length", "tail", "partial", "partial_held", "n_ops", "n_used"),
            *("reused", "moved", "refreshed", "read", "swapped"),
            *("swap", "swap_place", "swap_slot", "last_slot", "largest_id", "other_id"),
            *("fault", "fault_at", "fault_seen"),
        )
    ]
)
READ = 0
EXCHANGE, TO_LAST, FROM_LAST = 1, 2, 3


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


def lane_ranges(
    rows: bytes,
    ops: bytes,
    used: bytes,
    topk: int,
    block: int,
    here: dict[str, int],
    full: dict[str, int],
    pieces: int,
    piece_bytes: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Ranges (read in the selection, read in the full cache, written in the selection)."""
    row = np.frombuffer(rows, ROW)
    every = np.frombuffer(ops, OP).reshape(len(row), topk)
    bring = np.arange(topk) < row["n_ops"][:, None]
    op = every[bring]
    tokens = np.full(every.shape, block, np.int64)
    partial = np.flatnonzero(row["partial"] >= 0)
    tokens[partial, row["partial"][partial]] = row["tail"][partial]
    tokens = tokens[bring]
    reads = op["kind"] == READ
    # Swapped blocks are whole.
    exchange, to_last, from_last = (row["swap"] == kind for kind in (EXCHANGE, TO_LAST, FROM_LAST))
    place, last = row["swap_slot"], row["last_slot"]
    out = [place[exchange | to_last], last[exchange | from_last]]
    into = [last[exchange | to_last], place[exchange | from_last]]
    moved = op["src"][~reads]
    sources = np.concatenate([moved, *out])
    per_page = here["page"] // block
    entry = np.frombuffer(used, np.int64)[np.nonzero(bring)[0] * topk + op["place"] // per_page]
    placed = entry * here["page"] + op["place"] % per_page * block
    targets = np.concatenate([placed, *into])

    def ranges(side: dict[str, int], slots: Any, counts: Any) -> NDArray[np.int64]:
        first = np.repeat(slots, counts)
        ends = np.cumsum(counts)
        slot = first + np.arange(len(first)) - np.repeat(ends - counts, counts)
        page = max(side["page"], 1)
        starts = slot // page * side["block_stride"] + slot % page * side["row_stride"]
        steps = np.arange(pieces, dtype=np.int64) * side["step"]
        return merge((side["base"] + starts[:, None] + steps).reshape(-1), piece_bytes)

    whole = np.full(len(sources), block, np.int64)
    written = np.concatenate([tokens, np.full(len(targets) - len(op), block, np.int64)])
    return (
        ranges(here, sources, whole),
        ranges(full, op["src"][reads], tokens[reads]),
        ranges(here, targets, written),
    )
