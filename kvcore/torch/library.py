# SPDX-License-Identifier: Apache-2.0
"""torch.ops.kvcore: the operators under this library's own names.

Every mutating operator has a ``_functional`` twin that returns new tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvcore
from kvcore.torch.calls import as_tensor
from kvcore.torch.registration import register_pair

__all__ = ["LIBRARY", "OPERATORS", "selection_lengths"]

LIBRARY = torch.library.Library("kvcore", "DEF")
#: Names registered under torch.ops.kvcore.
OPERATORS: list[str] = []

COMPRESS = "Tensor? compress_lens=None, Tensor? compress_seq_offset=None, Tensor? seq_lens=None"
SCATTER = (
    f"*, {COMPRESS}, str? cache_mode='Norm', str? scatter_mode='None', int[]? strides=None, "
    "int[]? offsets=None, str? dtype=None, str? value_dtype=None"
)


def _update(*arrays: Tensor, **keywords: Any) -> None:
    kvcore.kv_cache_update(*arrays, **keywords)  # what it returns is one of them


def _gather_selection(*arrays: Tensor, **keywords: Any) -> Tensor:
    return as_tensor(kvcore.gather_selection_kv_cache(*arrays, **keywords))


def selection_lengths(
    selection_k_rope: Tensor,
    selection_kv_cache: Tensor,
    selection_kv_block_table: Tensor,
    *rest: Tensor,
    **keywords: Any,
) -> Tensor:
    """The shape function of gather_selection_kv_cache: int32 [rows of the block table]."""
    rows = selection_kv_block_table.shape[0]
    return selection_kv_block_table.new_empty((rows,), dtype=torch.int32)


OPERATORS += register_pair(
    LIBRARY,
    "scatter_pa_kv_cache(Tensor key, Tensor(a!) key_cache, Tensor slot_mapping, "
    f"Tensor? value=None, Tensor(b!)? value_cache=None, {SCATTER}) -> ()",
    kvcore.scatter_pa_kv_cache,
)
OPERATORS += register_pair(
    LIBRARY,
    "reshape_and_cache(Tensor key, Tensor? value, Tensor(a!) key_cache, "
    f"Tensor(b!)? value_cache, Tensor slot_mapping, {SCATTER}) -> ()",
    kvcore.reshape_and_cache,
)
OPERATORS += register_pair(
    LIBRARY,
    "scatter_pa_cache(Tensor key, Tensor(a!) key_cache, Tensor slot_mapping, "
    f"*, {COMPRESS}, str? dtype=None) -> ()",
    kvcore.scatter_pa_cache,
)
OPERATORS += register_pair(
    LIBRARY,
    "kv_cache_update(Tensor new_kv, Tensor layer_id, Tensor(a!) past, Tensor token_offset, "
    "Tensor seq_len, *, str? dtype=None) -> ()",
    _update,
)
OPERATORS += register_pair(
    LIBRARY,
    "gather_selection_kv_cache(Tensor(a!) selection_k_rope, Tensor(b!) selection_kv_cache, "
    "Tensor(c!) selection_kv_block_table, Tensor(d!) selection_kv_block_status, "
    "Tensor selection_topk_indices, Tensor full_k_rope, Tensor full_kv_cache, "
    "Tensor full_kv_block_table, Tensor full_kv_actual_seq, Tensor full_q_actual_seq, *, "
    "int selection_topk_block_size=64, bool q_lens_cumulative=False, str? dtype=None) -> Tensor",
    _gather_selection,
    selection_lengths,
)
OPERATORS += register_pair(
    LIBRARY,
    "gather_pa_kv_cache(Tensor key_cache, Tensor? value_cache, Tensor block_tables, "
    "Tensor seq_lens, Tensor(a!) key, Tensor(b!)? value, *, Tensor? seq_offset=None, "
    "str? cache_mode='Norm', bool is_seq_lens_cumsum=False, str? dtype=None, "
    "str? value_dtype=None) -> ()",
    kvcore.gather_pa_kv_cache,
)
