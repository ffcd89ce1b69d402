# SPDX-License-Identifier: Apache-2.0
"""Hostile gather_selection calls, many: python tests/tools/fuzz_gather.py [ROWS] [SEED]

For a build with the sanitizers (see CONTRIBUTING.md), which end the process at the first access out
of range. Status, ids, lengths and tables hold nonsense of every kind; a call either raises a typed
error and writes nothing, or runs and leaves the full cache and the bytes around the selection
alone. Ends when ROWS rows (default 100,000) were gathered.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import kvcore

GUARD = 0xA5
Generator = np.random.Generator


def hostile(rng: Generator, shape: tuple[int, ...], low: int, high: int, kind: Any) -> Any:
    """Mostly numbers in range, some outside, some extreme."""
    values = rng.integers(low, high + 1, shape)
    odd = rng.random(shape)
    limits = np.iinfo(kind)
    values = np.where(odd < 0.05, -1 - values, values)
    values = np.where((odd >= 0.05) & (odd < 0.08), high + 1 + values, values)
    values = np.where((odd >= 0.08) & (odd < 0.085), limits.max, values)
    values = np.where((odd >= 0.085) & (odd < 0.09), limits.min, values)
    return values.astype(kind)


def guarded(shape: tuple[int, ...], kind: Any) -> tuple[Any, Any]:
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    buffer = np.full(size + 128, GUARD, np.uint8)
    return buffer, buffer[64 : 64 + size].view(kind).reshape(shape)


def one_call(rng: Generator) -> int:
    """Make one call; returns the rows it gathered, 0 when it was refused."""
    batch, steps = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    rows = batch * steps
    block = int(rng.choice([1, 1, 2, 16]))
    topk = int(rng.choice([1, 4, 31, 32, 33, 64]))
    page, full_page = block * int(rng.integers(1, 5)), block * int(rng.integers(1, 9))
    columns = -(-topk * block // page)
    full_columns = int(rng.integers(1, 12))
    longest = full_columns * full_page
    index = rng.choice([np.int32, np.int64])
    kind = rng.choice([np.uint8, np.uint16, np.uint32])
    sizes = (int(rng.integers(1, 40)), int(rng.integers(0, 9)))
    arrays: dict[str, Any] = {}
    guards = []
    for lane, size in zip(("kv_cache", "k_rope"), sizes, strict=True):
        arrays[f"full_{lane}"] = rng.integers(
            0, 200, (batch * full_columns, full_page, size)
        ).astype(kind)
        buffer, view = guarded((rows * columns, page, size), kind)
        arrays[f"selection_{lane}"] = view
        guards.append(buffer)
    table = rng.permutation(rows * columns).reshape(rows, columns).astype(index)
    full_table = rng.permutation(batch * full_columns).reshape(batch, full_columns).astype(index)
    if rng.random() < 0.1:
        table[rng.integers(rows), rng.integers(columns)] = rng.choice(
            [-1, 0, rows * columns, 99999]
        )
    if rng.random() < 0.1:
        full_table[rng.integers(batch), rng.integers(full_columns)] = rng.choice([-1, 99999])
    status = hostile(rng, (batch, steps, 1, topk + 1), -1, longest // block, index)
    ids = hostile(rng, (batch, steps, 1, topk), -1, max(longest // block - 1, 0), index)
    lengths = rng.integers(-1, longest + 1, batch).astype(index)
    queries = rng.integers(0, steps + 1, batch).astype(index)
    arrays["selection_kv_block_table"] = table
    arrays["selection_kv_block_status"] = status
    arrays["selection_topk_indices"] = ids
    arrays["full_kv_block_table"] = full_table
    arrays["full_kv_actual_seq"] = lengths
    arrays["full_q_actual_seq"] = queries
    before = {name: array.copy() for name, array in arrays.items()}
    try:
        kvcore.gather_selection_kv_cache(
            **arrays, selection_topk_block_size=block, num_threads=int(rng.integers(1, 4))
        )
    except kvcore.KVCoreError:
        for name, array in arrays.items():
            assert (array == before[name]).all(), f"{name} changed in a call that was refused"
        rows = 0
    for name in before:
        if not name.startswith("selection") or name.endswith(("table", "indices")):
            assert (arrays[name] == before[name]).all(), f"{name} changed"
    for buffer in guards:
        assert (buffer[:64] == GUARD).all()
        assert (buffer[-64:] == GUARD).all()
    return rows


def main() -> None:
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    rng = np.random.default_rng(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    calls = refused = rows = 0
    while rows < wanted:
        gathered = one_call(rng)
        calls += 1
        refused += gathered == 0
        rows += gathered
    print(f"{rows} rows gathered in {calls} calls, {refused} calls refused")


if __name__ == "__main__":
    main()
