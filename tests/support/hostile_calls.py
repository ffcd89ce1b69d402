# SPDX-License-Identifier: Apache-2.0
"""Calls of every operator and layout on arrays of their own, for tests that disturb a call.

A ``Case`` makes its arrays anew each time, so that one may be shrunk, refused memory for or left
half written, and it knows what the undisturbed call leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvcore

Arrays = dict[str, np.ndarray[Any, Any]]


def counted(*shape: int, dtype: Any = np.uint16, start: int = 1) -> np.ndarray[Any, Any]:
    return ((np.arange(np.prod(shape)) + start) % 251 + 1).astype(dtype).reshape(shape)


@dataclass(frozen=True)
class Case:
    """make: the arrays by name; call, plan: what is done with them; outputs: which are written."""

    make: Callable[[], Arrays]
    call: Callable[..., Any]
    plan: Callable[..., Any] | None
    outputs: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def expected(self) -> Arrays:
        """The outputs of an undisturbed call."""
        arrays = self.make()
        self.call(**arrays, **self.options)
        return {name: arrays[name] for name in self.outputs}


def _scatter(shape: tuple[int, ...], slots: list[int], dtype: Any = np.uint16) -> Arrays:
    return {
        "key": counted(len(slots), 2, 32, dtype=dtype),
        "value": counted(len(slots), 2, 32, dtype=dtype, start=90),
        "key_cache": np.zeros(shape, dtype),
        "value_cache": np.zeros(shape, dtype),
        "slot_mapping": np.array(slots, np.int32),
    }


def _windows(padded: bool, means: bool, dtype: Any = np.uint16) -> Arrays:
    batch, heads, length = 2, 2, 6
    outer = (batch, length) if padded else (batch * length,)
    slots = np.array([[40, 3], [20, 60]] if padded else [40, 3, 20, 60], np.int32)
    made: Arrays = {
        "key": counted(*outer, heads, 32, dtype=dtype),
        "value": counted(*outer, heads, 32, dtype=dtype, start=90),
        "key_cache": np.zeros((8, 16, 1, 32), dtype),
        "value_cache": np.zeros((8, 16, 1, 32), dtype),
        "slot_mapping": slots,
        "compress_lens": np.array([2, 3, 1, 0], np.int32),
        "seq_lens": np.array([length, length], np.int32),
    }
    if means:
        made["compress_seq_offset"] = np.array([1, 0, 2, -1], np.int32)
    return made


def _update() -> Arrays:
    return {
        "new_kv": counted(5, 64),
        "past": np.zeros((2, 3, 12, 64), np.uint16),
        "token_offset": np.array([2, 0, 6], np.int32),
        "seq_len": np.array([2, 0, 3], np.int32),
    }


def _gather() -> Arrays:
    return {
        "key_cache": counted(6, 4, 2, 32),
        "value_cache": counted(6, 4, 2, 32, start=90),
        "block_tables": np.array([[5, 0, 2], [1, 3, 4]], np.int32),
        "seq_lens": np.array([9, 6], np.int32),
        "key": np.zeros((15, 2, 32), np.uint16),
        "value": np.zeros((15, 2, 32), np.uint16),
    }


def _selection() -> Arrays:
    rows, block = 2, 4
    return {
        "selection_k_rope": counted(8, 8, 32, start=40),
        "selection_kv_cache": counted(8, 8, 64, start=50),
        "selection_kv_block_table": np.array([[1, 5], [2, 7]], np.int32),
        "selection_kv_block_status": np.array([[[[2, 0, -1, 8]]], [[[1, 3, -1, 8]]]], np.int32),
        "selection_topk_indices": np.array([[[[0, 4, 2]]], [[[5, 3, -1]]]], np.int32),
        "full_k_rope": counted(8, 8, 32),
        "full_kv_cache": counted(8, 8, 64, start=7),
        "full_kv_block_table": np.array([[0, 3, 6], [1, 2, 4]], np.int32),
        "full_kv_actual_seq": np.full(rows, 6 * block - 2, np.int32),
        "full_q_actual_seq": np.ones(rows, np.int32),
    }


def _layout(shape: tuple[int, ...], out: tuple[int, ...], name: str = "x") -> Arrays:
    return {name: counted(*shape), "out": np.zeros(out, np.uint16)}


def _rows() -> Arrays:
    return {
        "order": np.array([2, 0, 3, 1]),
        "table": np.arange(4 * 64, dtype=np.int32).reshape(4, 64),
        "status": np.arange(4 * 65, dtype=np.int32).reshape(4, 1, 65),
    }


def _expiring() -> Arrays:
    return {
        "status": np.arange(4 * 65, dtype=np.int32).reshape(4, 1, 65) % 7,
        "row": np.array([2, 0]),
        "from_position": np.array([3, 5]),
    }


KV = ("key_cache", "value_cache")
SCATTER = (kvcore.scatter_pa_kv_cache, kvcore.plan_scatter_pa_kv_cache, KV)
SLOTS = [9, -1, 3, 30, 12, 63]
ROWS, NHSD, NZ = (8, 8, 2, 32), (4, 2, 16, 32), (8, 4, 8, 16)

CASES: dict[str, Case] = {
    "Norm": Case(lambda: _scatter(ROWS, SLOTS), *SCATTER),
    "NHSD": Case(lambda: _scatter(NHSD, SLOTS), *SCATTER, {"scatter_mode": "NHSD"}),
    "NHSD with a warning": Case(
        lambda: _scatter(NHSD, SLOTS, np.float16), *SCATTER, {"scatter_mode": "NHSD", "soc": "A2"}
    ),
    "PA_NZ": Case(lambda: _scatter(NZ, SLOTS), *SCATTER, {"cache_mode": "PA_NZ"}),
    "Alibi": Case(lambda: _windows(True, False), *SCATTER, {"scatter_mode": "Alibi"}),
    "Rope": Case(lambda: _windows(False, True), *SCATTER, {"scatter_mode": "Rope"}),
    "Omni with a warning": Case(
        lambda: _windows(True, True, np.float16), *SCATTER, {"scatter_mode": "Omni", "soc": "950"}
    ),
    "update": Case(
        _update, kvcore.kv_cache_update, kvcore.plan_kv_cache_update, ("past",), {"layer_id": 1}
    ),
    "gather": Case(
        _gather, kvcore.gather_pa_kv_cache, kvcore.plan_gather_pa_kv_cache, ("key", "value")
    ),
    "selection": Case(
        _selection,
        kvcore.gather_selection_kv_cache,
        kvcore.plan_gather_selection_kv_cache,
        ("selection_k_rope", "selection_kv_cache", "selection_kv_block_status"),
        {"selection_topk_block_size": 4, "stats": {}},
    ),
    "nd_to_nz": Case(
        lambda: _layout((3, 16, 64), (3, 4, 16, 16)), kvcore.layout.nd_to_nz, None, ("out",)
    ),
    "nz_to_nd": Case(
        lambda: _layout((3, 4, 16, 16), (3, 16, 64)), kvcore.layout.nz_to_nd, None, ("out",)
    ),
    "paged_nd_to_nz": Case(
        lambda: _layout((3, 16, 2, 24), (3, 3, 16, 16), "cache"),
        kvcore.layout.paged_nd_to_nz,
        None,
        ("out",),
    ),
    "paged_nz_to_nd": Case(
        lambda: _layout((3, 3, 16, 16), (3, 16, 2, 24), "cache"),
        kvcore.layout.paged_nz_to_nd,
        None,
        ("out",),
        {"num_heads": 2},
    ),
    "permute_rows": Case(_rows, kvcore.permute_rows, None, ("table", "status")),
    "invalidate": Case(
        _expiring, kvcore.invalidate, None, ("status",), {"selection_topk_block_size": 2}
    ),
}
