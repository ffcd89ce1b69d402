# SPDX-License-Identifier: Apache-2.0
"""The vendor's operators: their schemas, and what each amounts to here.

Schemas are those of op-plugin (npu, atb), of cann-recipes-infer's extension (custom) and of
vllm-ascend (_C_ascend), with one liberty: value and its cache may be None.  Each operator is a
function from its arguments to a Call; who runs it, on which stream, and who keeps a record of it
is the installation's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import kvcore
from kvcore._core import portability
from kvcore._core.arrays import read
from kvcore.errors import ParamInvalidError, fail
from kvcore.soc import SoC, current, resolve
from kvcore.torch.calls import Call, PrivateCopy
from kvcore.torch.formats import check_nd, is_nz
from kvcore.torch.library import selection_lengths
from kvcore.torch.scatter_nd import plan_scatter_nd_update
from kvcore.torch.selection import select
from kvcore.torch.swap import plan_swap_blocks_batch

__all__ = ["OPERATORS", "SWAP", "Vendor"]

INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Vendor:
    """One operator of the vendor's.

    namespace, schema: where and what torch.ops has.
    prepare: (soc, *arguments of the schema) -> Call.
    shapes:  the shape function; None where nothing is returned.
    twin:    whether a ``_functional`` form goes with it.
    aliases: mutated arguments that are returned as well.
    names:   the core's argument names and the schema's, where they differ: for errors.
    recorded: whether calls can be kept in a file.
    """

    namespace: str
    schema: str
    prepare: Callable[..., Call]
    shapes: Callable[..., Any] | None = None
    twin: bool = False
    aliases: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = True

    @property
    def name(self) -> str:
        """The name, without an overload's."""
        return self.schema.partition("(")[0].partition(".")[0]


# ---------------------------------------------------------------- scatter
def _scatter(
    soc: Any,
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> Call:
    # None is ND here, although the default is PA_NZ.
    mode = "Norm" if cache_mode is None else cache_mode
    if mode != "PA_NZ":
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            if cache is not None and is_nz(cache):
                fail("cache_mode", f"'PA_NZ' for a {name} tagged FRACTAL_NZ", repr(cache_mode))
    try:
        return Call(
            kvcore.plan_scatter_pa_kv_cache(
                key,
                key_cache,
                slot_mapping,
                value,
                value_cache,
                compress_lens=compress_lens,
                compress_seq_offset=compress_seq_offsets,
                seq_lens=seq_lens,
                cache_mode=mode,
                soc=soc,
            )
        )
    except ParamInvalidError as error:
        if mode == "PA_NZ" and _looks_nd(key, key_cache):
            raise _with_hint(error) from None
        raise


def _looks_nd(key: Any, cache: Any) -> bool:
    return (
        isinstance(key, Tensor)
        and isinstance(cache, Tensor)
        and key.dim() == 3
        and cache.dim() == 4
        and key.shape[1:] == cache.shape[2:]
    )


def _with_hint(error: ParamInvalidError) -> ParamInvalidError:
    made = type(error)(
        f"{error}; this operator takes PA_NZ caches unless the call says otherwise: pass "
        "cache_mode='Norm' for a cache [nb, bs, H, D]"
    )
    made.__dict__.update(error.__dict__)
    return made


def _scatter_cache(
    soc: Any,
    key: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    key_cache: Tensor,
) -> Call:
    check_nd(key_cache=key_cache)
    return Call(
        kvcore.plan_scatter_pa_cache(
            key,
            key_cache,
            slot_mapping,
            compress_lens=compress_lens,
            compress_seq_offset=compress_seq_offsets,
            seq_lens=seq_lens,
            soc=soc,
        )
    )


def _cache_mode(key_cache: Tensor | None, value_cache: Tensor | None) -> str:
    """PA_NZ where the caches' memory is tagged FRACTAL_NZ."""
    tagged = key_cache is not None and is_nz(key_cache)
    if key_cache is not None and value_cache is not None and is_nz(value_cache) != tagged:
        fail("value_cache", "the format of key_cache", "one of them tagged FRACTAL_NZ")
    return "PA_NZ" if tagged else "Norm"


def _reshape_and_cache(
    soc: Any,
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_indices: Tensor,
) -> Call:
    mode = _cache_mode(key_cache, value_cache)
    if value is None and value_cache is None and mode == "Norm" and _has_two_operators(soc):
        plan = kvcore.plan_scatter_pa_cache(key, key_cache, slot_indices, soc=soc)
    else:
        plan = kvcore.plan_scatter_pa_kv_cache(
            key, key_cache, slot_indices, value, value_cache, cache_mode=mode, soc=soc
        )
    if plan.soc is not None:
        _warn_of_int64(plan.soc, slot_indices=slot_indices)
    return Call(plan)


def _warn_of_int64(soc: SoC, **tensors: Tensor | None) -> None:
    """Warn of an accepted call's index tensors that ATB does not have: its own are int32."""
    for name, tensor in tensors.items():
        if getattr(tensor, "dtype", None) is torch.int64:
            portability.warn(f"{soc:s}: {name} is int64, and ATB's operators take int32 indices")


def _has_two_operators(soc: Any) -> bool:
    """Whether a call's machine has key only in ScatterPaCache, where ScatterPaKvCache has none of
    it, so that ATB hands it there."""
    found = current() if soc is None else resolve(soc)
    if found is None:
        return False
    scatter = found.profile.scatter
    return not scatter.key_only and bool(scatter.key_alone)


def _reshape_and_cache_siso(soc: Any, key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> Call:
    return _reshape_and_cache(soc, key, None, key_cache, None, slot_indices)


def _scatter_nd_(soc: Any, self: Tensor, indices: Tensor, updates: Tensor) -> Call:
    _check_readable(self=self, indices=indices, updates=updates)
    return Call(plan_scatter_nd_update(self, indices, updates))


def _scatter_nd(soc: Any, self: Tensor, indices: Tensor, updates: Tensor) -> Call:
    _check_readable(self=self, indices=indices, updates=updates)
    made = torch.empty_like(self)
    plan = plan_scatter_nd_update(made, indices, updates)
    return Call(plan, made, copies=(PrivateCopy(made, self, "self"),))


def _check_readable(**tensors: Tensor) -> None:
    """The typed errors of tensors that no operator can read, before torch is asked about them."""
    for name, tensor in tensors.items():
        read(tensor, name)


def _like_self(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return torch.empty_like(self)


# ---------------------------------------------------------------- gather
def _gather(
    soc: Any,
    key_cache: Tensor,
    value_cache: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> Call:
    mode = _cache_mode(key_cache, value_cache)
    if isinstance(key, Tensor) and key.dim() == 2:
        mode = "PA_NZ"
    if mode == "PA_NZ":
        key, value = _flat_tokens(key, "key"), _flat_tokens(value, "value")
    return Call(
        kvcore.plan_gather_pa_kv_cache(
            key_cache,
            value_cache,
            block_tables,
            seq_lens,
            key,
            value,
            seq_offset=seq_offset,
            cache_mode=mode,
            is_seq_lens_cumsum=is_seq_lens_cumsum,
            soc=soc,
        )
    )


def _flat_tokens(out: Any, name: str) -> Any:
    """[tokens, H, D] as [tokens, H*D] on the same memory."""
    if not isinstance(out, Tensor) or out.dim() != 3:
        return out
    tokens, heads, size = out.shape
    try:
        return out.view(tokens, heads * size)
    except RuntimeError:
        fail(name, "tokens of one piece each (PA_NZ)", f"strides {tuple(out.stride())}")


def _load_into(
    soc: Any,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    cumsum: bool = False,
    key: Tensor,
    value: Tensor,
) -> Call:
    call = _gather(
        soc,
        key_cache,
        value_cache,
        block_table,
        context_lens,
        key,
        value,
        seq_offset=seq_starts,
        is_seq_lens_cumsum=cumsum,
    )
    if call.plan.soc is not None:
        _warn_of_int64(
            call.plan.soc,
            block_table=block_table,
            context_lens=context_lens,
            seq_starts=seq_starts,
        )
    return call


def _load(
    soc: Any,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    cumsum: bool = False,
) -> Call:
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    _check_readable(**caches, context_lens=context_lens)
    if _cache_mode(key_cache, value_cache) == "PA_NZ":
        fail("key_cache", "an ND cache, or key= and value= to load FRACTAL_NZ into", "FRACTAL_NZ")
    for name, cache in caches.items():
        if cache.dim() != 4:
            fail(name, "shape [nb, bs, H, D]", list(cache.shape))
    tokens = _num_tokens(context_lens, cumsum)
    key, value = (c.new_empty((tokens, c.shape[2], c.shape[3])) for c in caches.values())
    call = _load_into(
        soc,
        key_cache,
        value_cache,
        block_table,
        context_lens,
        seq_starts=seq_starts,
        cumsum=cumsum,
        key=key,
        value=value,
    )
    call.returned = (key, value)
    return call


def _num_tokens(context_lens: Tensor, cumsum: bool) -> int:
    """Tokens of all requests; what is wrong with the lengths is for the operator to say."""
    if context_lens.numel() == 0 or context_lens.dtype not in INDEX_DTYPES:
        return 0
    lengths = context_lens.flatten()
    return max(int(lengths[-1] if cumsum else lengths.sum()), 0)


def _load_shapes(
    key_cache: Tensor, value_cache: Tensor, *rest: Any, **keywords: Any
) -> tuple[Tensor, Tensor]:
    tokens = torch.library.get_ctx().new_dynamic_size()
    return (
        key_cache.new_empty((tokens, key_cache.shape[2], key_cache.shape[3])),
        value_cache.new_empty((tokens, value_cache.shape[2], value_cache.shape[3])),
    )


# ---------------------------------------------------------------- swap
def _swap(soc: Any, x: Tensor, y: Tensor, z: Tensor, direction: int) -> Call:
    return Call(plan_swap_blocks_batch(x, y, z, direction))


# ---------------------------------------------------------------- schemas
_COMPRESS = "Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None"
_SELECTION = (
    "Tensor(a!) selection_k_rope, Tensor(b!) selection_kv_cache, "
    "Tensor(c!) selection_kv_block_table, Tensor(d!) selection_kv_block_status, "
    "Tensor selection_topk_indices, Tensor full_k_rope, Tensor full_kv_cache, "
    "Tensor full_kv_block_table, Tensor full_kv_actual_seq, Tensor full_q_actual_seq, *, "
    "int selection_topk_block_size=64"
)
_LOAD = (
    "Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor context_lens, *, "
    "Tensor? seq_starts=None, bool cumsum=False"
)
_OFFSETS = {"compress_seq_offset": "compress_seq_offsets"}
_SLOTS = {"slot_mapping": "slot_indices"}
_CONTEXT = {
    "block_tables": "block_table",
    "seq_lens": "context_lens",
    "seq_offset": "seq_starts",
    "is_seq_lens_cumsum": "cumsum",
}

OPERATORS: tuple[Vendor, ...] = (
    Vendor(
        "npu",
        "npu_scatter_pa_kv_cache(Tensor key, Tensor? value, Tensor(a!) key_cache, "
        f"Tensor(b!)? value_cache, Tensor slot_mapping, *, {_COMPRESS}, "
        "str? cache_mode='PA_NZ') -> ()",
        _scatter,
        twin=True,
        names=_OFFSETS,
    ),
    Vendor(
        "npu",
        f"npu_scatter_pa_cache.value(Tensor key, Tensor slot_mapping, *, {_COMPRESS}, "
        "Tensor(a!) key_cache) -> Tensor(a!)",
        _scatter_cache,
        aliases=("key_cache",),
        names=_OFFSETS,
    ),
    Vendor(
        "npu",
        "npu_gather_pa_kv_cache(Tensor key_cache, Tensor? value_cache, Tensor block_tables, "
        "Tensor seq_lens, Tensor(a!) key, Tensor(b!)? value, *, Tensor? seq_offset=None, "
        "bool is_seq_lens_cumsum=False) -> ()",
        _gather,
        twin=True,
    ),
    Vendor(
        "npu",
        "npu_scatter_nd_update_(Tensor(a!) self, Tensor indices, Tensor updates) -> Tensor(a!)",
        _scatter_nd_,
        aliases=("self",),
    ),
    Vendor(
        "npu",
        "npu_scatter_nd_update(Tensor self, Tensor indices, Tensor updates) -> Tensor",
        _scatter_nd,
        _like_self,
    ),
    Vendor(
        "atb",
        "_npu_reshape_and_cache(Tensor key, Tensor? value, Tensor(a!) key_cache, "
        "Tensor(b!)? value_cache, Tensor slot_indices) -> ()",
        _reshape_and_cache,
        names=_SLOTS,
    ),
    Vendor(
        "atb",
        "_npu_reshape_and_cache_siso(Tensor key, Tensor(a!) key_cache, Tensor slot_indices) -> ()",
        _reshape_and_cache_siso,
        names=_SLOTS,
    ),
    Vendor(
        "atb",
        f"npu_paged_cache_load({_LOAD}) -> (Tensor, Tensor)",
        _load,
        _load_shapes,
        names=_CONTEXT,
    ),
    Vendor(
        "atb",
        f"npu_paged_cache_load.out({_LOAD}, Tensor(a!) key, Tensor(b!) value) "
        "-> (Tensor(a!), Tensor(b!))",
        _load_into,
        aliases=("key", "value"),
        names=_CONTEXT,
    ),
    Vendor(
        "custom",
        f"npu_gather_selection_kv_cache({_SELECTION}) -> Tensor",
        select,
        selection_lengths,
        twin=True,
    ),
)

#: Under torch.ops only, and with no tensor arguments that a file could keep.
SWAP = Vendor(
    "_C_ascend",
    "swap_blocks_batch(Tensor x, Tensor y, Tensor z, int direction) -> ()",
    _swap,
    recorded=False,
)
