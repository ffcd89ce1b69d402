# SPDX-License-Identifier: Apache-2.0
"""Operators of vllm-ascend's own library that torch_npu has as well, where that library is absent.

The library is compiled for the device.  Its sparse indexer and sparse attention take what those of
torch_npu take and return the same, so that they are handed on; vendor.py has its copies of blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found,unused-ignore]

__all__ = ["define"]

_EVERYTHING = "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807"
_LENGTHS = (
    "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_{}=None, str layout_query='BSND', str layout_{}='BSND', "
    "int sparse_mode=3, "
)

_libraries: list[Any] = []


def _indexer(*args: Any, **kwargs: Any) -> Any:
    return torch_npu.npu_lightning_indexer(*args, **kwargs)


def _attention(*args: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("attention_mode", 2)  # its own default, which torch_npu's is not
    return torch_npu.npu_sparse_flash_attention(*args, **kwargs)


_OPERATORS = (
    (
        "npu_lightning_indexer",
        f"(Tensor query, Tensor key, Tensor weights, *, {_LENGTHS.format('key', 'key')}"
        f"int sparse_count=2048, {_EVERYTHING}, bool return_value=False) -> (Tensor, Tensor)",
        _indexer,
    ),
    (
        "npu_sparse_flash_attention",
        "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *, "
        f"Tensor? query_rope=None, Tensor? key_rope=None, {_LENGTHS.format('kv', 'kv')}"
        f"int sparse_block_size=1, {_EVERYTHING}, int attention_mode=2, "
        "bool return_softmax_lse=False) -> (Tensor, Tensor, Tensor)",
        _attention,
    ),
)


def define() -> None:
    """Define those that no library has defined and that this torch_npu has."""
    for name, schema, function in _OPERATORS:
        if hasattr(torch.ops._C_ascend, name) or not hasattr(torch_npu, name):  # noqa: SLF001
            continue
        library = torch.library.Library("_C_ascend", "FRAGMENT")
        library.define(f"{name}{schema}")
        library.impl(name, function, "PrivateUse1")
        _libraries.append(library)
