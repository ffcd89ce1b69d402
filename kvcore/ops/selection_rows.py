# SPDX-License-Identifier: Apache-2.0
"""The books of a selection between two gathers: rows that change places, entries that expire.

A selection is what gather_selection_kv_cache left: bytes in the selection cache, the blocks each
row owns (table), and what each place holds (status).  These functions touch the books only; no
data moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore._core.write_rows import write_rows
from kvcore.errors import shown
from kvcore.ops import checks
from kvcore.ops.index_arrays import Indices, index_array, written_array

__all__ = ["invalidate", "permute_rows"]

STATUS_AXES = "[B, S, 1, topk+1] or [rows, 1, topk+1]"


def permute_rows(order: Any, table: Any, status: Any) -> None:
    """Move rows of a selection to other places of the batch, without moving data.

    order:  [R], a permutation of 0..R-1: place i takes what place order[i] had. R divides the
            rows, and an entry stands for rows/R rows that follow each other: R = B moves whole
            requests, R = rows single rows.
    table:  selection_kv_block_table [N, SMAX], N >= rows, written in place; rows past ``rows``
            stay.
    status: selection_kv_block_status [B, S, 1, topk+1] or [rows, 1, topk+1], written in place.

    The two are one thing: a status beside another row's blocks claims bytes that are not there.
    What belongs to requests (full block table, lengths, top-k ids) is the caller's to permute.
    ParamInvalidError, with nothing written, for an order that is no permutation, shapes that
    disagree, arrays that cannot be written or share memory.
    """
    shared = [
        written_array(status, "status", (3, 4), STATUS_AXES),
        written_array(table, "table", (2,), "[N, SMAX]"),
    ]
    wanted = index_array(order, "order", (1,), "[R]").astype(np.int64)
    if np.shares_memory(shared[0], shared[1]):
        checks.fail("table", "memory of its own", "bytes shared with status")
    # What was held is read once; write_rows sees whether the arrays are still what they were.
    books, blocks = [np.array(array, order="C") for array in shared]
    rows = _rows(books)
    if len(blocks) < rows:
        checks.fail("table", f"at least {rows} rows", list(blocks.shape))
    count = len(wanted)
    if rows % count if count else rows:
        checks.fail("order", f"a length that divides {rows} rows", count)
    if not np.array_equal(np.sort(wanted), np.arange(count)):
        checks.fail("order", f"each of 0..{count - 1} once", wanted.tolist())
    each = rows // count if count else 0
    old = (wanted[:, None] * each + np.arange(each)).reshape(-1)
    if rows:
        at = np.arange(rows)
        moved = books.reshape(rows, books.shape[-1])[old]
        write_rows(
            [
                (table, "table", blocks.shape, at, np.ascontiguousarray(blocks[old])),
                (status, "status", books.shape, at, np.ascontiguousarray(moved)),
            ]
        )


def invalidate(
    status: Any, row: Any, from_position: Any, *, selection_topk_block_size: int = 64
) -> int:
    """Forget what a row holds from a position on; returns how many places were emptied.

    status: selection_kv_block_status [B, S, 1, topk+1] or [rows, 1, topk+1], written in place.
    row:    b * S + s, or [n] of them; of a row named twice the lower position counts.
    from_position: the first token of the request that changed (rejected drafts, a rewritten
            prompt; 0 for another request altogether), or one for each row.
    selection_topk_block_size: that of the gathers.

    A block that reaches past from_position is read again when it is next wanted. The gather does
    so by itself for the newest q tokens of its own step; a row that sat out the step in which its
    drafts were rejected, or tokens rewritten further back, need this.
    ParamInvalidError, with nothing written, for rows outside the status or negative positions.
    """
    books = np.array(written_array(status, "status", (3, 4), STATUS_AXES))
    rows = _numbers(row, "row", _rows(books) - 1)
    first = _numbers(from_position, "from_position", checks.INT64_MAX)
    if first.size not in (1, rows.size):
        checks.fail("from_position", f"one position, or {rows.size} as row", first.size)
    size = _numbers(selection_topk_block_size, "selection_topk_block_size", checks.INT64_MAX)
    if size.size != 1 or size[0] < 1:
        checks.fail("selection_topk_block_size", "an int > 0", selection_topk_block_size)
    # Block id ends at (id + 1) * size, past the position exactly from this id on.
    own, which = np.unique(rows, return_inverse=True)
    limit = np.full(own.shape, checks.INT64_MAX)
    np.minimum.at(limit, which, np.broadcast_to(first // size[0], rows.shape))
    at: tuple[Any, ...] = (own,) if books.ndim == 3 else tuple(np.divmod(own, books.shape[1]))
    ids = np.ascontiguousarray(books[(*at, 0, slice(None, -1))])
    expired = ids >= limit[:, None]
    count = int(expired.sum())
    ids[expired] = -1
    write_rows([(status, "status", books.shape, own, ids)])
    return count


def _rows(status: Indices) -> int:
    if status.shape[-2] != 1 or status.shape[-1] < 1:
        checks.fail("status", f"shape {STATUS_AXES}", list(status.shape))
    return int(np.prod(status.shape[:-2], dtype=np.int64))


def _numbers(value: Any, name: str, most: int) -> Indices:
    """One number or an array of them, as int64 [n], each in 0..most."""
    if isinstance(value, bool | np.bool_):
        checks.fail(name, "an int or an index array", shown(value))
    if hasattr(value, "__index__") and not getattr(value, "shape", ()):
        number = int(value.__index__())
        if not 0 <= number <= most:
            checks.fail(name, f"0 <= {name} <= {most}", number)
        return np.array([number], np.int64)
    array = index_array(value, name, (1,), "[n]").astype(np.int64)
    bad = np.flatnonzero((array < 0) | (array > most))
    if bad.size:
        checks.fail(f"{name}[{bad[0]}]", f"0 <= {name} <= {most}", int(array[bad[0]]))
    return array
