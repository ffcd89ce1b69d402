# SPDX-License-Identifier: Apache-2.0
"""RmsNorm and rotary embedding of a latent KV row, written to the caches of MLA.

kv [B, 1, S, Dc + Dr] is split into the latent part, which is normalised, and the rotary part, whose
pairs stand side by side.  Modes: Norm: caches [B, 1, L, D], index [B, S] is a row of the request;
PA and PA_BNSD: index [B * S] are slots of paged caches [blocks, size, 1, D]; PA_NZ: the same slots
in pages of 32-byte columns; PA_BLK_BNSD and PA_BLK_NZ: index [B * ceil(S / size)] is the first slot
of each page.  Negative indices write nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcore.emulator.operators import Special
from kvcore.emulator.reference.normalization import rms_norm
from kvcore.emulator.reference.quantise import to_int8
from kvcore.emulator.reference.refusals import none_of, one_of, refuse
from kvcore.emulator.reference.rotary import deinterleaved, turned
from kvcore.emulator.touched import Elements, Used

__all__ = ["TABLE"]

_MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")


def _slots(index: Any, mode: str, batch: int, length: int, size: int) -> Any:
    """A slot for each token; negative ones write nothing."""
    if "BLK" not in mode:
        return index.reshape(-1).long()
    pages = -(-length // size)
    first = index.reshape(batch, pages).long().repeat_interleave(size, 1)[:, :length]
    within = torch.arange(length) % size
    return torch.where(first < 0, first, first // size * size + within).reshape(-1)


def _write(cache: Any, rows: Any, slots: Any, mode: str) -> None:
    """rows [tokens, D] into a paged cache."""
    kept = slots >= 0
    slots, rows = slots[kept], rows[kept].to(cache.dtype)
    blocks, size = cache.shape[0], cache.shape[1]
    if len(slots) and int(slots.max()) >= blocks * size:
        raise RuntimeError(f"index: expected slots below {blocks * size}, got {int(slots.max())}")
    page, place = slots // size, slots % size
    if not mode.endswith("NZ"):
        cache[page, place, 0] = rows
        return
    lane = 32 // cache.element_size()
    pages = cache.view(blocks, -1, size, lane)
    pages[page, :, place] = rows.view(len(rows), -1, lane)


def _write_norm(cache: Any, rows: Any, index: Any) -> None:
    """rows [B, S, D] into [B, 1, L, D]."""
    for b in range(len(index)):
        kept = index[b] >= 0
        cache[b, 0, index[b][kept].long()] = rows[b][kept].to(cache.dtype)


def _rows(cache: Any, mode: str, index: Any, batch: int, length: int) -> Elements:
    """Where the rows of a cache lie that are written."""
    blocks, size, width = cache.shape[0], cache.shape[1], cache.shape[3]
    if mode == "Norm":
        most = cache.shape[2]
        places = index.view(batch, length).long()
        kept = (places >= 0) & (places < most)
        offsets = (torch.arange(batch).unsqueeze(1) * most + places)[kept] * width
        return Elements(torch.unique(offsets), [width], [1])
    slots = _slots(index, mode, batch, length, size)
    slots = torch.unique(slots[(slots >= 0) & (slots < blocks * size)])
    if not mode.endswith("NZ"):
        return Elements(slots * width, [width], [1])
    lane = 32 // cache.element_size()
    offsets = slots // size * (size * width) + slots % size * lane
    return Elements(offsets, [width // lane, lane], [size * lane, 1])


def _used(
    kv: Any, gamma: Any, cos: Any, sin: Any, index: Any, k_cache: Any, ckv_cache: Any, **given: Any
) -> dict[str, list[Elements]]:
    mode, (batch, _one, length, _width) = given.get("cache_mode", "Norm"), kv.shape
    return {
        name: [_rows(cache, mode, index, batch, length)]
        for name, cache in (("k_cache", k_cache), ("ckv_cache", ckv_cache))
    }


def _computed(kv: Any, gamma: Any, cos: Any, sin: Any, v: Any, epsilon: float) -> tuple[Any, Any]:
    """Float32 rotary (or key) rows and latent (or value) rows."""
    if v is None:
        latent, rest = kv.float().split([gamma.shape[0], kv.shape[-1] - gamma.shape[0]], -1)
        return turned(deinterleaved(rest), cos, sin), rms_norm(latent, gamma, epsilon)[0]
    key, _ = rms_norm(kv, gamma, epsilon)
    width = cos.shape[-1]
    front = turned(deinterleaved(key[..., :width]), cos, sin)
    return torch.cat((front, key[..., width:]), -1), v.float()


def _run(
    kv: Any,
    gamma: Any,
    cos: Any,
    sin: Any,
    index: Any,
    k_cache: Any,
    ckv_cache: Any,
    *,
    k_rope_scale: Any = None,
    c_kv_scale: Any = None,
    k_rope_offset: Any = None,
    c_kv_offset: Any = None,
    v: Any = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **_: Any,
) -> tuple[Any, Any]:
    rope, latent = _computed(kv, gamma, cos, sin, v, epsilon)
    batch, _one, length, _width = kv.shape
    for cache, rows, scale in ((k_cache, rope, k_rope_scale), (ckv_cache, latent, c_kv_scale)):
        stored = rows[:, 0] if scale is None else to_int8(rows[:, 0] * scale.float())
        if cache_mode == "Norm":
            _write_norm(cache, stored, index.view(batch, length))
        else:
            slots = _slots(index, cache_mode, batch, length, cache.shape[1])
            _write(cache, stored.reshape(batch * length, -1), slots, cache_mode)
    return rope.to(kv.dtype), latent.to(kv.dtype)


def _four(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    k_cache, ckv_cache = args[5:7] if len(args) > 6 else (kwargs["k_cache"], kwargs["ckv_cache"])
    return k_cache, ckv_cache, *_run(*args, **kwargs)


def _check(
    kv: Any,
    gamma: Any,
    cos: Any,
    sin: Any,
    index: Any,
    k_cache: Any,
    ckv_cache: Any,
    *,
    k_rope_scale: Any = None,
    c_kv_scale: Any = None,
    k_rope_offset: Any = None,
    c_kv_offset: Any = None,
    v: Any = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    k_cache_dtype: int | None = None,
    ckv_cache_dtype: int | None = None,
) -> None:
    operator = "npu_kv_rmsnorm_rope_cache"
    one_of(operator, "cache_mode", cache_mode, _MODES)
    none_of(
        operator,
        {
            "k_rope_offset": k_rope_offset,
            "c_kv_offset": c_kv_offset,
            "k_cache_dtype": k_cache_dtype,
            "ckv_cache_dtype": ckv_cache_dtype,
        },
    )
    if kv.dim() != 4 or kv.shape[1] != 1:
        refuse(operator, f"kv: expected [B, 1, S, D], got {list(kv.shape)}")
    if gamma.dim() != 1 or cos.dim() != 4:
        refuse(
            operator,
            f"expected gamma [Dc] and cos [B, 1, S, Dr], got {list(gamma.shape)}, "
            f"{list(cos.shape)}",
        )
    rotary, latent = (
        (kv.shape[3] - gamma.shape[0], gamma.shape[0]) if v is None else (kv.shape[3], v.shape[3])
    )
    if v is None and cos.shape[3] != rotary:
        refuse(operator, f"cos: expected a last axis of {rotary}, got {cos.shape[3]}")
    for name, cache, width in (("k_cache", k_cache, rotary), ("ckv_cache", ckv_cache, latent)):
        if cache.dim() != 4 or cache.shape[3] != width or not cache.is_contiguous():
            refuse(
                operator,
                f"{name}: expected four contiguous axes, the last of {width}, got "
                f"{list(cache.shape)}",
            )
    for name, scale, cache in (
        ("k_rope_scale", k_rope_scale, k_cache),
        ("c_kv_scale", c_kv_scale, ckv_cache),
    ):
        if (scale is None) == (cache.dtype == torch.int8):
            refuse(operator, f"{name}: goes with an int8 cache, and with no other")
    tokens = kv.shape[0] * kv.shape[2]
    if "BLK" in cache_mode:
        tokens = kv.shape[0] * -(-kv.shape[2] // k_cache.shape[1])
    if index.numel() != tokens:
        refuse(operator, f"index: expected {tokens} values, got {index.numel()}")


def _functional(
    kv: Any, gamma: Any, cos: Any, sin: Any, index: Any, k_cache: Any, ckv_cache: Any, **given: Any
) -> tuple[Any, ...]:
    caches = k_cache.clone(), ckv_cache.clone()
    return *_run(kv, gamma, cos, sin, index, *caches, **given), *caches


_WRITES = ("k_cache", "ckv_cache")
_USED = Used(frozenset(_WRITES), _used)

TABLE = {
    "npu_kv_rmsnorm_rope_cache": Special(
        _four, check=_check, writes=_WRITES, returns=(*_WRITES, None, None), used=_USED
    ),
    "npu_kv_rmsnorm_rope_cache_v2": Special(_run, check=_check, used=_USED),
    "npu_kv_rmsnorm_rope_cache_v2_functional": Special(_functional, check=_check),
}
