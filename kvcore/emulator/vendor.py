# SPDX-License-Identifier: Apache-2.0
"""Operators that clients reach outside of torch_npu: those of ATB, a recipe, and vllm-ascend.

ATB's library is a package of its own, without which torch_npu defines none of its operators; the
others come with libraries that are built on the device.  Where nobody has defined them, they are
defined here, on the machine's own kernels and copies.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found,unused-ignore]

import kvcore
from kvcore.emulator import machine, tasks
from kvcore.emulator.fallback import Kernel
from kvcore.emulator.operators import Special
from kvcore.emulator.reference.attention import attended, paged
from kvcore.emulator.reference.refusals import refuse
from kvcore.emulator.touched import Elements, Used, pages, pieces

__all__ = ["define"]

_NZ = 29

_LOAD = (
    "Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor context_lens, *, "
    "Tensor? seq_starts=None, bool cumsum=False"
)
_SELECTION = (
    "Tensor(a!) selection_k_rope, Tensor(b!) selection_kv_cache, "
    "Tensor(c!) selection_kv_block_table, Tensor(d!) selection_kv_block_status, "
    "Tensor selection_topk_indices, Tensor full_k_rope, Tensor full_kv_cache, "
    "Tensor full_kv_block_table, Tensor full_kv_actual_seq, Tensor full_q_actual_seq, *, "
    "int selection_topk_block_size=64"
)

_libraries: list[Any] = []


def _is_nz(cache: Any) -> bool:
    return int(torch.ops.npu.get_npu_format(cache)) == _NZ


def _writable(operator: str, **written: Any) -> None:
    """Refuse what ATB refuses to write: it reads strided tensors as copies, and writes none."""
    for name, tensor in written.items():
        if not tensor.is_contiguous():
            raise RuntimeError(
                f"{operator}: {name}: expected a contiguous tensor, which ATB writes, got shape "
                f"{tuple(tensor.shape)} with strides {tuple(tensor.stride())}"
            )


def _reshape_and_cache(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_indices: Any
) -> None:
    _writable("_npu_reshape_and_cache", key_cache=key_cache, value_cache=value_cache)
    mode = "PA_NZ" if _is_nz(key_cache) and _is_nz(value_cache) else "Norm"
    torch_npu.npu_scatter_pa_kv_cache(
        key.contiguous(),
        value.contiguous(),
        key_cache,
        value_cache,
        slot_indices.contiguous(),
        cache_mode=mode,
    )


def _write_rows(key: Any, key_cache: Any, slot_indices: Any) -> None:
    """Rows of key to their slots; negative ones are padding, and write nothing."""
    slots = slot_indices.reshape(-1).long()
    kept = slots >= 0
    key_cache.view(-1, *key_cache.shape[2:])[slots[kept]] = key[kept]


def _written_rows(key: Any, key_cache: Any, slot_indices: Any) -> dict[str, list[Elements]]:
    slots = slot_indices.reshape(-1).long()
    count = key_cache.shape[0] * key_cache.shape[1]
    slots = torch.unique(slots[(slots >= 0) & (slots < count)])
    axes = range(2, key_cache.dim())
    return {"key_cache": [pieces(key_cache, slots * key_cache.stride(1), axes)]}


_SISO = "_npu_reshape_and_cache_siso"
_ROWS = Special(
    _write_rows,
    meta=lambda *args: None,
    used=Used(frozenset(("key_cache",)), _written_rows),
)


@functools.cache
def _rows_kernel() -> Kernel:
    return Kernel("atb", _SISO, getattr(torch.ops.atb, _SISO).default, _ROWS)


def _reshape_and_cache_siso(key: Any, key_cache: Any, slot_indices: Any) -> None:
    _writable("_npu_reshape_and_cache_siso", key_cache=key_cache)
    if _is_nz(key_cache):
        raise RuntimeError("_npu_reshape_and_cache_siso: the cache must be ND, got FRACTAL_NZ")
    _rows_kernel()(key, key_cache, slot_indices)


def _load_into(
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    context_lens: Any,
    *,
    seq_starts: Any = None,
    cumsum: bool = False,
    key: Any,
    value: Any,
) -> tuple[Any, Any]:
    _writable("npu_paged_cache_load", key=key, value=value)
    # Of a strided tensor ATB reads a contiguous copy; aclnn's gather takes no account of strides
    # within a block.  seq_starts counts tokens, and both skip whole blocks of them.
    torch_npu.npu_gather_pa_kv_cache(
        key_cache.contiguous(),
        value_cache.contiguous(),
        block_table.contiguous(),
        context_lens.contiguous(),
        key,
        value,
        seq_offset=None if seq_starts is None else seq_starts.contiguous(),
        is_seq_lens_cumsum=cumsum,
    )
    return key, value


def _load(
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    context_lens: Any,
    *,
    seq_starts: Any = None,
    cumsum: bool = False,
) -> tuple[Any, Any]:
    lengths = context_lens.tolist()
    if not cumsum and min(lengths, default=0) < 0:
        raise RuntimeError(
            f"npu_paged_cache_load: context_lens: expected no negative value, got {min(lengths)}"
        )
    tokens = (lengths[-1] if lengths else 0) if cumsum else sum(lengths)
    new = [cache.new_empty((tokens, *cache.shape[2:])) for cache in (key_cache, value_cache)]
    return _load_into(
        key_cache,
        value_cache,
        block_table,
        context_lens,
        seq_starts=seq_starts,
        cumsum=cumsum,
        key=new[0],
        value=new[1],
    )


# -- ATB's paged attention: one token of each request ----------------------------------------------

_ATTENTION = "_npu_paged_attention"
_ATTENDS = (
    "Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, int num_heads, "
    "float scale_value, Tensor block_table, Tensor context_lens"
)


def _attend_pages(
    query: Any, key_cache: Any, value_cache: Any, kv_heads: int, heads: int, scale: float,
    block_table: Any, context_lens: Any, out: Any, *, workspace: Any = None,
) -> None:  # fmt: skip
    """Each request's token over its pages, of caches [blocks, size, heads, D]."""
    for request, length in enumerate(context_lens.tolist()):
        keys, values = (
            paged(cache.reshape(*cache.shape[:2], -1), block_table[request], length, kv_heads)
            for cache in (key_cache, value_cache)
        )
        found, _ = attended(query[request : request + 1], keys, values, None, scale, None)
        out[request] = found[0].reshape(out.shape[1:]).to(out.dtype)


def _check_attention(
    query: Any, key_cache: Any, value_cache: Any, kv_heads: int, heads: int, scale: float,
    block_table: Any, context_lens: Any, out: Any, *, workspace: Any = None,
) -> None:  # fmt: skip
    named = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache,
        "block_table": block_table, "out": out,
    }  # fmt: skip
    for name, tensor in named.items():
        if tensor.is_cpu:
            refuse(_ATTENTION, f"{name}: expected a tensor of the device, got one of the host")
    if query.dim() != 3 or query.shape[1] != heads:
        refuse(_ATTENTION, f"query: expected [requests, {heads}, D], got {list(query.shape)}")
    if kv_heads < 1 or heads % kv_heads:
        refuse(_ATTENTION, f"expected query heads in whole groups, got {heads} of {kv_heads}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4 or cache.shape[2] != kv_heads:
            refuse(
                _ATTENTION,
                f"{name}: expected [blocks, size, {kv_heads}, D], got {list(cache.shape)}",
            )
    if key_cache.shape[3] != query.shape[2]:
        refuse(_ATTENTION, f"key_cache: expected D {query.shape[2]}, got {key_cache.shape[3]}")
    count = query.shape[0]
    if block_table.dim() != 2 or len(block_table) < count:
        refuse(
            _ATTENTION, f"block_table: expected [{count}, columns], got {list(block_table.shape)}"
        )
    if tuple(context_lens.shape) != (count,):
        refuse(_ATTENTION, f"context_lens: expected [{count}], got {list(context_lens.shape)}")
    wanted = (count, heads, value_cache.shape[3])
    if out.dtype != query.dtype or out.numel() != math.prod(wanted):
        refuse(
            _ATTENTION,
            f"out: expected {list(wanted)} {query.dtype}, got {list(out.shape)} {out.dtype}",
        )
    for name in ("query", "key_cache", "value_cache"):
        if not named[name].is_floating_point():
            refuse(
                _ATTENTION,
                f"{name}: the emulated machine's reference has no {named[name].dtype}",
            )
    _writable(_ATTENTION, out=out)


def _seen_pages(
    query: Any, key_cache: Any, value_cache: Any, kv_heads: int, heads: int, scale: float,
    block_table: Any, context_lens: Any, out: Any, *, workspace: Any = None,
) -> dict[str, list[Elements]]:  # fmt: skip
    lengths = context_lens.tolist()
    return {
        "key_cache": pages(key_cache, 1, block_table, lengths),
        "value_cache": pages(value_cache, 1, block_table, lengths),
    }


_PAGES = Special(
    _attend_pages,
    meta=lambda *args, **given: None,
    check=_check_attention,
    used=Used(frozenset(("key_cache", "value_cache")), _seen_pages),
)


class _AttentionKernel(Kernel):
    """A kernel that takes lengths of the host, where clients have them."""

    def prepare(self) -> None:
        super().prepare()
        self.index_lists = True


@functools.cache
def _attention_kernel() -> Kernel:
    overload = getattr(torch.ops.atb, _ATTENTION).default
    return _AttentionKernel("atb", _ATTENTION, overload, _PAGES)


def _paged_attention(*args: Any, workspace: Any = None) -> None:
    _attention_kernel()(*args)


def _attention_workspace(query: Any, *args: Any) -> Any:
    """The reference needs none; the smallest that the device would give."""
    return query.new_zeros(32, dtype=torch.uint8)


def _gather_selection(*arrays: Any, selection_topk_block_size: int = 64) -> Any:
    return kvcore.gather_selection_kv_cache(
        *arrays, selection_topk_block_size=selection_topk_block_size
    )


#: Kinds of aclrtMemcpyAsync by the operator's directions: to the device, to the host, within.
_KINDS = (1, 2, 3)


def _swap_blocks_batch(x: Any, y: Any, z: Any, direction: int) -> None:
    """Copies of z[i] bytes from address x[i] to address y[i], on the current stream."""
    for name, numbers in (("x", x), ("y", y), ("z", z)):
        if numbers.dtype != torch.int64 or numbers.shape != (len(x),):
            raise RuntimeError(
                f"swap_blocks_batch: {name}: expected int64 [{len(x)}] on the CPU, got "
                f"{numbers.dtype} {list(numbers.shape)}"
            )
    if direction not in range(3):
        raise RuntimeError(
            "swap_blocks_batch: direction: expected 0 (to the device), 1 (to the host) or 2 "
            f"(within the device), got {direction}"
        )
    if len(z) and int(z.min()) < 0:
        raise RuntimeError(f"swap_blocks_batch: z: expected sizes >= 0, got {int(z.min())}")
    copy = machine.load().core.aclrtMemcpyAsync
    copy.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t,
                     ctypes.c_int, ctypes.c_void_p]  # fmt: skip
    stream = torch_npu.npu.current_stream().npu_stream
    for i, (source, target, size) in enumerate(
        zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    ):
        code = copy(target, size, source, size, _KINDS[direction], stream) if size else 0
        if code:
            raise RuntimeError(f"swap_blocks_batch: copy {i}: {tasks.failure(code)}")


_OPERATORS = (
    (
        "atb",
        "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slot_indices) -> ()",
        _reshape_and_cache,
        "torch_npu",
    ),
    (
        "atb",
        "_npu_reshape_and_cache_siso(Tensor key, Tensor(a!) key_cache, Tensor slot_indices) -> ()",
        _reshape_and_cache_siso,
        "torch_npu",
    ),
    ("atb", f"npu_paged_cache_load({_LOAD}) -> (Tensor, Tensor)", _load, "torch_npu.atb"),
    (
        "atb",
        f"npu_paged_cache_load.out({_LOAD}, Tensor(a!) key, Tensor(b!) value) "
        "-> (Tensor(a!), Tensor(b!))",
        _load_into,
        None,
    ),
    (
        "atb",
        f"{_ATTENTION}({_ATTENDS}, Tensor(a!) out, *, Tensor? workspace=None) -> ()",
        _paged_attention,
        "torch_npu",
    ),
    (
        "atb",
        f"{_ATTENTION}_get_workspace({_ATTENDS}, Tensor out) -> Tensor",
        _attention_workspace,
        "torch_npu",
    ),
    (
        "custom",
        f"npu_gather_selection_kv_cache({_SELECTION}) -> Tensor",
        _gather_selection,
        "torch_npu",
    ),
    (
        "_C_ascend",
        "swap_blocks_batch(Tensor x, Tensor y, Tensor z, int direction) -> ()",
        _swap_blocks_batch,
        None,
    ),
)


def define() -> None:
    """Define the operators that no library has defined; torch_npu is imported."""
    absent = {
        space: not hasattr(getattr(torch.ops, space), name)
        for space, name in (
            ("atb", "_npu_reshape_and_cache"),
            ("custom", "npu_gather_selection_kv_cache"),
            ("_C_ascend", "swap_blocks_batch"),
        )
    }
    for space, schema, function, module in _OPERATORS:
        if not absent[space]:
            continue
        library = torch.library.Library(space, "FRAGMENT")
        name = schema.partition("(")[0]
        library.define(schema)
        # The lists of addresses are the host's.
        library.impl(name, function, "CPU" if space == "_C_ascend" else "PrivateUse1")
        _libraries.append(library)
        if module is not None:
            place = torch_npu if module == "torch_npu" else torch_npu.atb
            setattr(place, name, getattr(getattr(torch.ops, space), name))
