# SPDX-License-Identifier: Apache-2.0
"""A selection's table and status between two gathers: rows change places, entries expire.

A selection is what gather_selection_kv_cache left: bytes in the selection cache, the blocks each
row owns (table), and what each place holds (status).  These functions change the two arrays only;
no data moves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvcore._core.selection_rows import expire_rows, move_rows
from kvcore.errors import shown
from kvcore.ops import checks
from kvcore.ops.index_arrays import index_array, written_array

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

    The two belong together: a status with another row's blocks claims bytes that are not there.
    What belongs to requests (full block table, lengths, top-k ids) is the caller's to permute.
    ParamInvalidError, with nothing written, for an order that is no permutation, shapes that
    disagree, arrays that cannot be written or share memory.

    >>> import numpy as np, kvcore
    >>> table = np.array([[10, 11], [20, 21], [30, 31]])  # the blocks of three rows
    >>> status = np.array([[[5, 64]], [[6, 64]], [[7, 64]]])  # one place each, and a length
    >>> kvcore.permute_rows([2, 0, 1], table, status)  # place 0 takes what place 2 had
    >>> table.tolist(), status[:, 0, 0].tolist()
    ([[30, 31], [10, 11], [20, 21]], [7, 5, 6])
    """
    held = written_array(status, "status", (3, 4), STATUS_AXES)
    blocks = written_array(table, "table", (2,), "[N, SMAX]")
    wanted: list[int] = index_array(order, "order", (1,), "[R]").tolist()
    shapes = (tuple(held.shape), tuple(blocks.shape))
    rows = _rows(shapes[0])
    if shapes[1][0] < rows:
        checks.fail("table", f"at least {rows} rows", list(shapes[1]))
    if np.shares_memory(blocks, held):
        checks.fail("table", "memory of its own", "bytes shared with status")
    count = len(wanted)
    if rows % count if count else rows:
        checks.fail("order", f"a length that divides {rows} rows", count)
    if sorted(wanted) != list(range(count)):
        checks.fail("order", f"each of 0..{count - 1} once", wanted)
    each = rows // count if count else 0
    if rows:
        old = [place * each + step for place in wanted for step in range(each)]
        move_rows(
            [(table, "table", shapes[1]), (status, "status", shapes[0])], np.array(old, np.int64)
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

    >>> import numpy as np, kvcore
    >>> status = np.array([[[0, 3, 2, 192]]])  # one row holds blocks 0, 3 and 2 of 64 tokens
    >>> kvcore.invalidate(status, 0, 200)  # 200 is in block 3: 3 * 64 = 192
    1
    >>> status.ravel().tolist()
    [0, -1, 2, 192]
    """
    shape = tuple(written_array(status, "status", (3, 4), STATUS_AXES).shape)
    rows = _numbers(row, "row", _rows(shape) - 1)
    first = _numbers(from_position, "from_position", checks.INT64_MAX)
    if len(first) not in (1, len(rows)):
        checks.fail("from_position", f"one position, or {len(rows)} as row", len(first))
    size = _numbers(selection_topk_block_size, "selection_topk_block_size", checks.INT64_MAX)
    if len(size) != 1 or size[0] < 1:
        checks.fail("selection_topk_block_size", "an int > 0", selection_topk_block_size)
    # Block id ends at (id + 1) * size, past the position exactly from this id on.
    limits: dict[int, int] = {}
    for i, number in enumerate(rows):
        limit = first[i if len(first) > 1 else 0] // size[0]
        limits[number] = min(limit, limits.get(number, limit))
    return expire_rows(
        status,
        "status",
        shape,
        np.array([*limits], np.int64),
        np.array([*limits.values()], np.int64),
    )


def _rows(shape: tuple[int, ...]) -> int:
    if shape[-2] != 1 or shape[-1] < 1:
        checks.fail("status", f"shape {STATUS_AXES}", list(shape))
    return math.prod(shape[:-2])


def _numbers(value: Any, name: str, most: int) -> list[int]:
    """One number or an array of them, each in 0..most."""
    if isinstance(value, bool | np.bool_):
        checks.fail(name, "an int or an index array", shown(value))
    if hasattr(value, "__index__") and not getattr(value, "shape", ()):
        number = int(value.__index__())
        if not 0 <= number <= most:
            checks.fail(name, f"0 <= {name} <= {most}", number)
        return [number]
    numbers: list[int] = index_array(value, name, (1,), "[n]").tolist()
    for i, number in enumerate(numbers):
        if not 0 <= number <= most:
            checks.fail(f"{name}[{i}]", f"0 <= {name} <= {most}", number)
    return numbers
