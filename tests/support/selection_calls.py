# SPDX-License-Identifier: Apache-2.0
"""gather_selection_kv_cache calls by hand: small legal ones to vary, run and break."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
import oracle
from oracle_numbers import Array

STATS = ("reused", "moved", "refreshed", "read", "swapped", "bytes_read", "bytes_moved")
OUTPUTS = ("selection_k_rope", "selection_kv_cache", "selection_kv_block_status")


def call(
    topk: int = 4,
    *,
    batch: int = 1,
    steps: int = 1,
    block: int = 1,
    kv: int | list[int] = 40,
    q: int | list[int] = 1,
    ids: Any = None,
    held: Any = None,
    pages: int = 1,
    full_pages: int = 8,
    sizes: tuple[int, int] = (3, 2),
    index: str = "int32",
    dtype: str = "uint16",
    **changes: Any,
) -> dict[str, Any]:
    """A legal BSND call.

    ids: [rows, n] wanted.  held: [rows, n] what status lists from place 0 on, whole blocks, with
    the right bytes there.  Blocks of selection and full cache hold ``pages`` and ``full_pages``
    top-k blocks; every row owns just what it needs, in a shuffled order.
    """
    rng = np.random.default_rng(7)
    rows = batch * steps
    page, full_page = pages * block, full_pages * block
    columns = -(-topk * block // page)
    longest = int(np.max(kv)) if np.size(kv) else 0
    full_columns = max(-(-longest // full_page), 1)
    table = rng.permutation(rows * columns).reshape(rows, columns)
    full_table = rng.permutation(batch * full_columns).reshape(batch, full_columns)
    a: dict[str, Any] = {}
    for lane, size in zip(("kv_cache", "k_rope"), sizes, strict=True):
        item = np.dtype(dtype).itemsize
        nbytes = rng.integers(0, 256, (batch * full_columns, full_page, size * item), np.uint8)
        full = nbytes.view(dtype)
        a[f"full_{lane}"] = full
        a[f"selection_{lane}"] = np.full((rows * columns, page, size * item), 0xEE, np.uint8).view(
            dtype
        )
    topk_ids = np.full((batch, steps, 1, topk), -1, index)
    status = np.full((batch, steps, 1, topk + 1), -1, index)
    status[..., topk] = 0
    for r in range(rows):
        b, s = divmod(r, steps)
        if ids is not None:
            topk_ids[b, s, 0, : len(ids[r])] = ids[r]
        if held is not None:
            status[b, s, 0, : len(held[r])] = held[r]
            status[b, s, 0, topk] = len(held[r]) * block
            for place, block_id in enumerate(held[r]):
                for t in range(block if block_id >= 0 else 0):
                    here, there = place * block + t, block_id * block + t
                    if there < full_columns * full_page:
                        for lane in ("kv_cache", "k_rope"):
                            a[f"selection_{lane}"][table[r, here // page], here % page] = a[
                                f"full_{lane}"
                            ][full_table[b, there // full_page], there % full_page]
    a["selection_kv_block_table"] = table.astype(index)
    a["selection_kv_block_status"] = status
    a["selection_topk_indices"] = topk_ids
    a["full_kv_block_table"] = full_table.astype(index)
    a["full_kv_actual_seq"] = np.broadcast_to(np.array(kv, index), (batch,)).copy()
    a["full_q_actual_seq"] = np.broadcast_to(np.array(q, index), (batch,)).copy()
    a["selection_topk_block_size"] = block
    return a | changes


def run(a: dict[str, Any], **more: Any) -> tuple[Array, dict[str, Array]]:
    """Make the call, and hold it to the oracle: (returned, stats)."""
    want = oracle.run("gather_selection_kv_cache", a)
    stats: dict[str, Array] = {}
    returned = kvcore.gather_selection_kv_cache(**a, stats=stats, **more)
    assert returned.dtype == np.int32
    np.testing.assert_array_equal(returned, want.returned)
    for name, expected in want.outputs.items():
        settled = oracle.settle(want, name, a[name], a.get("dtype"))
        np.testing.assert_array_equal(oracle.bits(a[name]), settled, err_msg=name)
        assert expected.shape == a[name].shape
    assert want.stats is not None
    for name in STATS:
        np.testing.assert_array_equal(stats[name], want.stats[name], err_msg=name)
        assert stats[name].dtype == np.int64
    return returned, stats


def status_of(a: dict[str, Any], row: int = 0) -> list[int]:
    topk = a["selection_topk_indices"].shape[-1]
    return a["selection_kv_block_status"].reshape(-1, topk + 1)[row].tolist()


def held_tokens(a: dict[str, Any], row: int) -> list[tuple[Array, Array]]:
    """(bits in the selection, bits in the full cache) of each token a row says it holds."""
    block = a["selection_topk_block_size"]
    status, table = status_of(a, row), a["selection_kv_block_table"][row]
    batch = len(a["full_kv_actual_seq"])
    request = (
        row * batch // (a["selection_topk_indices"].size // a["selection_topk_indices"].shape[-1])
    )
    full_table = a["full_kv_block_table"][request]
    found = []
    for token in range(status[-1]):
        there = status[token // block] * block + token % block
        for lane in ("kv_cache", "k_rope"):
            here, full = a[f"selection_{lane}"], a[f"full_{lane}"]
            found.append(
                (
                    here[table[token // here.shape[1]], token % here.shape[1]],
                    full[full_table[there // full.shape[1]], there % full.shape[1]],
                )
            )
    return found


def counts(stats: dict[str, Array], row: int = 0) -> tuple[int, int, int, int]:
    return tuple(int(stats[n][row]) for n in STATS[:4])  # type: ignore[return-value]


def refuse(a: dict[str, Any], argument: str, match: str, null: bool = False) -> None:
    """The call raises the right class, names that argument, and writes nothing."""
    before = {n: a[n].copy() for n in OUTPUTS if isinstance(a.get(n), np.ndarray)}
    kind = kvcore.ParamNullError if null else kvcore.ParamInvalidError
    with pytest.raises(kind, match=match) as caught:
        kvcore.gather_selection_kv_cache(**a)
    assert caught.value.argument == argument
    assert caught.value.code == (161001 if null else 161002)
    for name, was in before.items():
        np.testing.assert_array_equal(a[name], was)


def zeros(*shape: int, dtype: str = "int32") -> Array:
    return np.zeros(shape, dtype)


def data(*shape: int) -> Array:
    return np.zeros(shape, np.uint16)
