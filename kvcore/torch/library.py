# SPDX-License-Identifier: Apache-2.0
"""Schemas, CPU kernels and shape functions of torch.ops.kvcore.

torch.library.Library's define/impl is used rather than the custom_op decorator, which costs some
40 us a call.  Every mutating operator has a ``_functional`` twin that returns new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import kvcore

__all__ = ["LIBRARY", "OPERATORS"]

Ints = Sequence[int] | None

LIBRARY = torch.library.Library("kvcore", "DEF")
#: Names registered under torch.ops.kvcore.
OPERATORS: list[str] = []

_COMPRESS = "Tensor? compress_lens=None, Tensor? compress_seq_offset=None, Tensor? seq_lens=None"
_SCATTER = (
    f"*, {_COMPRESS}, str? cache_mode='Norm', str? scatter_mode='None', int[]? strides=None, "
    "int[]? offsets=None, str? dtype=None, str? value_dtype=None"
)


def _register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    # Pointers are read and bytes written in the kernel: nothing in it can be traced.
    LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"kvcore::{name}", fake, lib=LIBRARY)
    OPERATORS.append(name)


def _nothing(*args: Any, **keywords: Any) -> None:
    """The shape function of an operator that only mutates."""


def _scatter(
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    value: Tensor | None = None,
    value_cache: Tensor | None = None,
    **keywords: Any,
) -> None:
    kvcore.scatter_pa_kv_cache(key, key_cache, slot_mapping, value, value_cache, **keywords)


def _scatter_functional(
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    value: Tensor | None = None,
    value_cache: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor]:
    key_cache = key_cache.clone()
    value_cache = None if value_cache is None else value_cache.clone()
    kvcore.scatter_pa_kv_cache(key, key_cache, slot_mapping, value, value_cache, **keywords)
    return key_cache, key_cache.new_empty(0) if value_cache is None else value_cache


def _scatter_functional_fake(
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    value: Tensor | None = None,
    value_cache: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor]:
    made = key_cache.clone()
    return made, key_cache.new_empty(0) if value_cache is None else value_cache.clone()


def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **keywords: Any,
) -> None:
    kvcore.scatter_pa_kv_cache(key, key_cache, slot_mapping, value, value_cache, **keywords)


def _scatter_cache(key: Tensor, key_cache: Tensor, slot_mapping: Tensor, **keywords: Any) -> None:
    kvcore.scatter_pa_cache(key, key_cache, slot_mapping, **keywords)


def _update(
    new_kv: Tensor,
    layer_id: Tensor,
    past: Tensor,
    token_offset: Tensor,
    seq_len: Tensor,
    **keywords: Any,
) -> None:
    kvcore.kv_cache_update(new_kv, layer_id, past, token_offset, seq_len, **keywords)


def _update_functional(
    new_kv: Tensor,
    layer_id: Tensor,
    past: Tensor,
    token_offset: Tensor,
    seq_len: Tensor,
    **keywords: Any,
) -> Tensor:
    past = past.clone()
    kvcore.kv_cache_update(new_kv, layer_id, past, token_offset, seq_len, **keywords)
    return past


def _update_functional_fake(
    new_kv: Tensor, layer_id: Tensor, past: Tensor, *rest: Any, **keywords: Any
) -> Tensor:
    return past.clone()


def _gather_selection(*arrays: Tensor, **keywords: Any) -> Tensor:
    return torch.from_numpy(kvcore.gather_selection_kv_cache(*arrays, **keywords))


def _gather_selection_fake(
    selection_k_rope: Tensor,
    selection_kv_cache: Tensor,
    selection_kv_block_table: Tensor,
    *rest: Tensor,
    **keywords: Any,
) -> Tensor:
    return selection_kv_block_table.new_empty(
        (selection_kv_block_table.shape[0],), dtype=torch.int32
    )


def _gather_selection_functional(
    selection_k_rope: Tensor,
    selection_kv_cache: Tensor,
    selection_kv_block_table: Tensor,
    selection_kv_block_status: Tensor,
    *rest: Tensor,
    **keywords: Any,
) -> tuple[Tensor, ...]:
    mutated = [
        t.clone()
        for t in (
            selection_k_rope,
            selection_kv_cache,
            selection_kv_block_table,
            selection_kv_block_status,
        )
    ]
    return (_gather_selection(*mutated, *rest, **keywords), *mutated)


def _gather_selection_functional_fake(
    selection_k_rope: Tensor,
    selection_kv_cache: Tensor,
    selection_kv_block_table: Tensor,
    selection_kv_block_status: Tensor,
    *rest: Tensor,
    **keywords: Any,
) -> tuple[Tensor, ...]:
    made = selection_kv_block_table.new_empty(
        (selection_kv_block_table.shape[0],), dtype=torch.int32
    )
    return (
        made,
        selection_k_rope.clone(),
        selection_kv_cache.clone(),
        selection_kv_block_table.clone(),
        selection_kv_block_status.clone(),
    )


def _gather_pa(*arrays: Tensor, **keywords: Any) -> None:
    kvcore.gather_pa_kv_cache(*arrays, **keywords)


def _gather_pa_functional(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    **keywords: Any,
) -> tuple[Tensor, Tensor]:
    key, value = key.clone(), value.clone()
    kvcore.gather_pa_kv_cache(
        key_cache, value_cache, block_tables, seq_lens, key, value, **keywords
    )
    return key, value


def _gather_pa_functional_fake(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    **keywords: Any,
) -> tuple[Tensor, Tensor]:
    return key.clone(), value.clone()


_SELECTION_TAIL = (
    "Tensor selection_topk_indices, Tensor full_k_rope, Tensor full_kv_cache, "
    "Tensor full_kv_block_table, Tensor full_kv_actual_seq, Tensor full_q_actual_seq, *, "
    "int selection_topk_block_size=64, bool q_lens_cumulative=False"
)
_PA_TAIL = (
    "*, Tensor? seq_offset=None, str? cache_mode='Norm', bool is_seq_lens_cumsum=False, "
    "str? dtype=None, str? value_dtype=None"
)

_register(
    "scatter_pa_kv_cache(Tensor key, Tensor(a!) key_cache, Tensor slot_mapping, "
    f"Tensor? value=None, Tensor(b!)? value_cache=None, {_SCATTER}) -> ()",
    _scatter,
    _nothing,
)
_register(
    "scatter_pa_kv_cache_functional(Tensor key, Tensor key_cache, Tensor slot_mapping, "
    f"Tensor? value=None, Tensor? value_cache=None, {_SCATTER}) -> (Tensor, Tensor)",
    _scatter_functional,
    _scatter_functional_fake,
)
_register(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    f"Tensor slot_mapping, {_SCATTER}) -> ()",
    _reshape_and_cache,
    _nothing,
)
_register(
    "scatter_pa_cache(Tensor key, Tensor(a!) key_cache, Tensor slot_mapping, "
    f"*, {_COMPRESS}, str? dtype=None) -> ()",
    _scatter_cache,
    _nothing,
)
_register(
    "kv_cache_update(Tensor new_kv, Tensor layer_id, Tensor(a!) past, Tensor token_offset, "
    "Tensor seq_len, *, str? dtype=None) -> ()",
    _update,
    _nothing,
)
_register(
    "kv_cache_update_functional(Tensor new_kv, Tensor layer_id, Tensor past, "
    "Tensor token_offset, Tensor seq_len, *, str? dtype=None) -> Tensor",
    _update_functional,
    _update_functional_fake,
)
_register(
    "gather_selection_kv_cache(Tensor(a!) selection_k_rope, Tensor(b!) selection_kv_cache, "
    "Tensor(c!) selection_kv_block_table, Tensor(d!) selection_kv_block_status, "
    f"{_SELECTION_TAIL}) -> Tensor",
    _gather_selection,
    _gather_selection_fake,
)
_register(
    "gather_selection_kv_cache_functional(Tensor selection_k_rope, Tensor selection_kv_cache, "
    "Tensor selection_kv_block_table, Tensor selection_kv_block_status, "
    f"{_SELECTION_TAIL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gather_selection_functional,
    _gather_selection_functional_fake,
)
_register(
    "gather_pa_kv_cache(Tensor key_cache, Tensor? value_cache, Tensor block_tables, "
    f"Tensor seq_lens, Tensor(a!) key, Tensor(b!)? value, {_PA_TAIL}) -> ()",
    _gather_pa,
    _nothing,
)
_register(
    "gather_pa_kv_cache_functional(Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    f"Tensor seq_lens, Tensor key, Tensor value, {_PA_TAIL}) -> (Tensor, Tensor)",
    _gather_pa_functional,
    _gather_pa_functional_fake,
)
