# SPDX-License-Identifier: Apache-2.0
"""Slots of tokens, from block tables and positions: what callers write by hand otherwise.

A slot is ``block * block_size + row``; position p of a request lies in column ``p // block_size``
of its row of the block table.  Everything is worked out in 64 bits, whatever the tables hold: a
cache of 2**31 slots is a few hundred thousand blocks away.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import ParamInvalidError, shown
from kvcore.ops import checks
from kvcore.ops.index_arrays import Indices, index_array

__all__ = ["decode", "from_positions", "prefill", "speculative"]

Slots = NDArray[np.int64]


def from_positions(block_tables: Any, requests: Any, positions: Any, block_size: int) -> Slots:
    """The slot of each token: int64 [T].

    block_tables: [B, M] int32 or int64.
    requests:     [T], the row of the block table a token belongs to.
    positions:    [T], where in its request it stands; a negative one is padding, slot -1.
    block_size:   rows of a block.

    ParamInvalidError for a request outside the table, a position past its columns, or a block
    below 0 in an entry that is used (a table says nothing of how many blocks there are).

    >>> from kvcore import slots
    >>> tables = [[0, 1, 2], [7, 5, 3]]  # block 3 holds positions 256 to 383 of request 1
    >>> slots.from_positions(tables, [0, 1, 1], [0, 300, -1], 128).tolist()
    [0, 428, -1]
    >>> 3 * 128 + (300 - 256)
    428
    """
    tables = index_array(block_tables, "block_tables", (2,), "[B, M]")
    rows = index_array(requests, "requests", (1,), "[T]")
    where = index_array(positions, "positions", (1,), "[T]")
    if rows.shape != where.shape:
        checks.fail("positions", f"shape {list(rows.shape)} as requests", list(where.shape))
    return _slots(tables, rows.astype(np.int64), where.astype(np.int64), _size(block_size))


def prefill(block_tables: Any, num_computed_tokens: Any, query_lens: Any, block_size: int) -> Slots:
    """Slots of a prefill chunk of each request, one request after the other: int64 [sum].

    block_tables:        [B, M] int32 or int64.
    num_computed_tokens: [B], tokens of each request that are in the cache already.
    query_lens:          [B], tokens of this chunk; 0 is none.
    block_size:          rows of a block.

    Errors as from_positions; and counts below 0.

    >>> from kvcore import slots
    >>> tables = [[4, -1], [7, 5]]  # the blocks of two requests, of 64 rows
    >>> slots.prefill(tables, [0, 62], [2, 3], 64).tolist()  # 0, 1 of one; 62 to 64 of the other
    [256, 257, 510, 511, 320]
    """
    tables = index_array(block_tables, "block_tables", (2,), "[B, M]")
    batch = len(tables)
    starts = _counts(num_computed_tokens, "num_computed_tokens", batch)
    lengths = _counts(query_lens, "query_lens", batch)
    _fits(starts, lengths, tables, block_size)
    requests = np.repeat(np.arange(batch), lengths)
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = np.repeat(starts, lengths) + np.arange(len(requests)) - before
    return _slots(tables, requests, positions, _size(block_size))


def decode(block_tables: Any, seq_lens: Any, block_size: int) -> Slots:
    """The slot of each request's newest token: int64 [B].

    block_tables: [B, M] int32 or int64.
    seq_lens:     [B], tokens of each request, the new one included; 0 gives slot -1.
    block_size:   rows of a block.

    Errors as from_positions; and lengths below 0.

    >>> from kvcore import slots
    >>> tables = [[4, 2], [7, 5]]  # the blocks of two requests, of 16 rows
    >>> slots.decode(tables, [18, 0], 16).tolist()  # position 17 is row 1 of block 2
    [33, -1]
    """
    tables = index_array(block_tables, "block_tables", (2,), "[B, M]")
    lengths = _counts(seq_lens, "seq_lens", len(tables))
    return _slots(tables, np.arange(len(tables)), lengths - 1, _size(block_size))


def speculative(
    block_tables: Any, seq_lens: Any, query_lens: Any, block_size: int, num_steps: int
) -> Slots:
    """Slots of the newest tokens of each request, drafts and all: int64 [B, num_steps].

    block_tables: [B, M] int32 or int64.
    seq_lens:     [B], tokens of each request, the new ones included.
    query_lens:   [B], how many of them are new: 0 to num_steps, and no more than there are.
    block_size:   rows of a block.
    num_steps:    columns of the result (S); those a request does not use are -1.

    Row b holds positions seq_lens[b] - query_lens[b] to seq_lens[b] - 1: flattened, it is the
    slot_mapping of B * num_steps tokens in the order of GatherSelectionKvCache's rows.
    Errors as from_positions; and counts out of range.

    >>> from kvcore import slots
    >>> tables = [[4, 2], [7, 5]]  # the blocks of two requests, of 16 rows
    >>> slots.speculative(tables, [18, 3], [3, 1], 16, num_steps=3).tolist()
    [[79, 32, 33], [114, -1, -1]]
    """
    tables = index_array(block_tables, "block_tables", (2,), "[B, M]")
    batch = len(tables)
    lengths = _counts(seq_lens, "seq_lens", batch)
    new = _counts(query_lens, "query_lens", batch)
    steps = _whole(num_steps, "num_steps", 0)
    most = np.minimum(lengths, steps)
    bad = np.flatnonzero(new > most)
    if bad.size:
        b = int(bad[0])
        checks.fail(
            f"query_lens[{b}]",
            f"at most {most[b]} (num_steps {steps}, seq_lens[{b}] {lengths[b]})",
            int(new[b]),
        )
    step = np.arange(steps)
    positions = np.where(step < new[:, None], (lengths - new)[:, None] + step, -1)
    requests = np.repeat(np.arange(batch), steps)
    found = _slots(tables, requests, positions.reshape(-1), _size(block_size))
    return found.reshape(batch, steps)


def _whole(value: Any, name: str, least: int) -> int:
    expected = f"an int >= {least}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        checks.fail(name, expected, shown(value))
    number = operator.index(value)
    if not least <= number <= checks.INT64_MAX:
        checks.fail(name, expected, number)
    return number


def _size(block_size: Any) -> int:
    return _whole(block_size, "block_size", 1)


def _counts(obj: Any, name: str, batch: int) -> Slots:
    array = index_array(obj, name, (1,), "[B]")
    if array.shape != (batch,):
        checks.fail(name, f"shape [{batch}] (B of block_tables)", list(array.shape))
    bad = np.flatnonzero(array < 0)
    if bad.size:
        checks.fail(f"{name}[{bad[0]}]", "a count >= 0", int(array[bad[0]]))
    return array.astype(np.int64)


def _fits(starts: Slots, lengths: Slots, tables: Indices, block_size: Any) -> None:
    """Refuse chunks past the table before anything as long as they are is made."""
    room = tables.shape[1] * _size(block_size)
    for b in np.flatnonzero(lengths):
        if int(starts[b]) + int(lengths[b]) > room:
            last = int(starts[b]) + int(lengths[b]) - 1
            raise _past_the_table(int(b), last, tables, _size(block_size))


def _past_the_table(b: int, position: int, tables: Indices, size: int) -> ParamInvalidError:
    expected = f"more than {position // size} columns for position {position} of request {b}"
    return ParamInvalidError(
        f"block_tables: expected {expected}, got {tables.shape[1]}",
        argument="block_tables",
        seen=tables.shape[1],
        expected=expected,
    )


def _slots(tables: Indices, requests: Slots, positions: Slots, size: int) -> Slots:
    found = np.full(len(positions), -1, np.int64)
    used = positions >= 0
    rows, where = requests[used], positions[used]
    bad = np.flatnonzero((rows < 0) | (rows >= len(tables)))
    if bad.size:
        at = int(np.flatnonzero(used)[bad[0]])
        checks.fail(f"requests[{at}]", f"0 <= request < {len(tables)}", int(rows[bad[0]]))
    columns = where // size
    bad = np.flatnonzero(columns >= tables.shape[1])
    if bad.size:
        raise _past_the_table(int(rows[bad[0]]), int(where[bad[0]]), tables, size)
    blocks = tables[rows, columns].astype(np.int64)
    most = checks.INT64_MAX // size - 1
    bad = np.flatnonzero((blocks < 0) | (blocks > most))
    if bad.size:
        at = int(bad[0])
        checks.fail(
            f"block_tables[{rows[at]}, {columns[at]}]",
            "a block >= 0 whose slots fit int64, in an entry that is used",
            int(blocks[at]),
        )
    found[used] = blocks * size + where % size
    return found
