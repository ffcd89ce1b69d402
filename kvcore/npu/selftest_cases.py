# SPDX-License-Identifier: Apache-2.0
"""The calls that the self test makes: one small call for each path through the NPU's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvcore.soc import SoC

__all__ = ["SelftestCase", "cases_of"]

Arrays = dict[str, NDArray[Any]]


@dataclass
class SelftestCase:
    """One call: arrays by argument, other arguments, and which arrays it writes.

    proves: what a pass says beyond the result, where only hardware can say it.
    views:  arrays that are views of another on the device too.
    """

    name: str
    operator: str
    arrays: Arrays
    outputs: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    proves: str = ""


def cases_of(soc: str) -> Iterator[SelftestCase]:
    """Every case that a SoC has."""
    random = np.random.default_rng(20)
    machine = SoC(soc).profile
    scatter = machine.scatter
    yield _norm("ScatterPaKvCache, Norm, float16", random, np.dtype(np.float16), 64, 64)
    yield _norm(
        "ScatterPaKvCache, Norm, bfloat16, Dk != Dv", random, np.dtype(ml_dtypes.bfloat16), 128, 64
    )
    yield _norm("ScatterPaKvCache, Norm, int8", random, np.dtype(np.int8), 64, 64)
    yield _slab(random)
    yield _fused(random)
    yield _nz(random)
    yield _nct(random)
    if scatter.key_only:
        yield _key_only(random, "scatter_pa_kv_cache", "scenario 6: 0-dim tensors as the value")
    if scatter.nhsd is not None:
        yield _nhsd(random)
    if scatter.windows is not None:
        for mode in ("Alibi", "Rope", "Omni"):
            yield _windows(random, mode)
    if machine.update is not None:
        yield _update(random)
    if scatter.key_alone:
        yield _key_only(random, "scatter_pa_cache", "")
    if 3 in scatter.scenarios:
        for mode in ("Alibi", "Rope"):
            yield _padded_windows(random, mode)
    for mode in ("Norm", "PA_NZ"):
        yield _gather(random, mode)
    if machine.selection is not None:
        yield _selection(random, topk=64, block=1, steps=2)
        yield _selection(random, topk=8, block=64, steps=1)


def _values(random: np.random.Generator, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
    return random.integers(-50, 50, shape).astype(kind)


def _slots(random: np.random.Generator, count: int, bound: int) -> NDArray[Any]:
    slots = random.permutation(bound)[:count].astype(np.int32)
    slots[1] = -1
    return slots


def _pair(
    random: np.random.Generator, tokens: tuple[int, ...], cache: Callable[[int], Any], kind: Any
) -> Arrays:
    return {
        "key": _values(random, tokens, kind),
        "value": _values(random, tokens, kind),
        "key_cache": _values(random, cache(tokens[-1]), kind),
        "value_cache": _values(random, cache(tokens[-1]), kind),
    }


BOTH = ("key_cache", "value_cache")


def _norm(name: str, random: np.random.Generator, kind: Any, dk: int, dv: int) -> SelftestCase:
    arrays: Arrays = {
        "key": _values(random, (9, 2, dk), kind),
        "value": _values(random, (9, 2, dv), kind),
        "key_cache": _values(random, (4, 16, 2, dk), kind),
        "value_cache": _values(random, (4, 16, 2, dv), kind),
        "slot_mapping": _slots(random, 9, 64),
    }
    proves = "a negative slot is skipped"
    return SelftestCase(name, "scatter_pa_kv_cache", arrays, BOTH, proves=proves)


def _slab(random: np.random.Generator) -> SelftestCase:
    slab = _values(random, (4, 2, 16, 2, 64), np.float16)
    arrays: Arrays = {
        "key": _values(random, (9, 2, 64), np.float16),
        "value": _values(random, (9, 2, 64), np.float16),
        "key_cache": slab[:, 0],
        "value_cache": slab[:, 1],
        "slot_mapping": _slots(random, 9, 64),
    }
    return SelftestCase(
        "ScatterPaKvCache, Norm, caches are halves of one slab",
        "scatter_pa_kv_cache",
        arrays,
        BOTH,
        proves="the block stride of the caches is honoured",
    )


def _fused(random: np.random.Generator) -> SelftestCase:
    fused = _values(random, (9, 4, 2, 64), np.float16)
    arrays: Arrays = {
        "key": fused[:, 1],
        "value": fused[:, 2],
        "key_cache": _values(random, (4, 16, 2, 64), np.float16),
        "value_cache": _values(random, (4, 16, 2, 64), np.float16),
        "slot_mapping": _slots(random, 9, 64),
    }
    name = "ScatterPaKvCache, Norm, key and value are slices of a fused tensor"
    return SelftestCase(name, "scatter_pa_kv_cache", arrays, BOTH)


def _nz(random: np.random.Generator) -> SelftestCase:
    arrays: Arrays = {
        "key": _values(random, (9, 2, 64), np.int8),
        "value": _values(random, (9, 2, 64), np.float16),
        "key_cache": _values(random, (4, 4, 16, 32), np.int8),
        "value_cache": _values(random, (4, 8, 16, 16), np.float16),
        "slot_mapping": _slots(random, 9, 64),
    }
    name = "ScatterPaKvCache, PA_NZ, int8 key and float16 value"
    return SelftestCase(name, "scatter_pa_kv_cache", arrays, BOTH, {"cache_mode": "PA_NZ"})


def _nct(random: np.random.Generator) -> SelftestCase:
    arrays: Arrays = {
        "key": _values(random, (9, 2, 64), np.float16),
        "value": _values(random, (9, 2, 64), np.float16),
        "key_cache": _values(random, (4, 16, 2, 64), np.float16),
        "value_cache": _values(random, (4, 16, 2, 64), np.float16),
        "slot_mapping": _slots(random, 9, 64),
    }
    # Tokens that overlap, so that they fit the memory of an array [T, H, D] and the 950's tiling,
    # which wants T * stride + offset <= (T-1) * H * D.
    options = {"scatter_mode": "Nct", "strides": (96, 96), "offsets": (0, 128)}
    return SelftestCase("ScatterPaKvCache, Nct", "scatter_pa_kv_cache", arrays, BOTH, options)


def _key_only(random: np.random.Generator, operator: str, proves: str) -> SelftestCase:
    arrays: Arrays = {
        "key": _values(random, (9, 2, 64), np.float16),
        "key_cache": _values(random, (4, 16, 2, 64), np.float16),
        "slot_mapping": _slots(random, 9, 64),
    }
    return SelftestCase(f"key only ({operator})", operator, arrays, ("key_cache",), proves=proves)


def _nhsd(random: np.random.Generator) -> SelftestCase:
    arrays = _pair(random, (9, 2, 64), lambda d: (4, 2, 16, d), np.float16)
    arrays["slot_mapping"] = np.random.default_rng(3).permutation(64)[:9].astype(np.int32)
    options = {"scatter_mode": "NHSD"}
    return SelftestCase("ScatterPaKvCache, NHSD", "scatter_pa_kv_cache", arrays, BOTH, options)


def _windows(random: np.random.Generator, mode: str) -> SelftestCase:
    arrays = _pair(random, (12, 2, 64), lambda d: (8, 16, 1, d), np.float16)
    arrays |= {
        "slot_mapping": np.array([0, 32, 64, 96], np.int32),
        "compress_lens": np.array([2, 3, 1, 2], np.int32),
        "seq_lens": np.array([5, 7], np.int32),
    }
    if mode != "Alibi":
        arrays["compress_seq_offset"] = np.array([1, 2, 0, 3], np.int32)
    name = f"ScatterPaKvCache, {mode}, 3-D key"
    return SelftestCase(name, "scatter_pa_kv_cache", arrays, BOTH, {"scatter_mode": mode})


def _padded_windows(random: np.random.Generator, mode: str) -> SelftestCase:
    arrays = _pair(random, (2, 7, 2, 64), lambda d: (8, 16, 1, d), np.float16)
    arrays |= {
        "slot_mapping": np.array([[0, 32], [64, 96]], np.int32),
        "compress_lens": np.array([[2, 3], [1, 2]], np.int32),
        "seq_lens": np.array([5, 7], np.int32),
    }
    if mode != "Alibi":
        arrays["compress_seq_offset"] = np.array([1, 2, 0, 3], np.int32)
    name = f"ScatterPaKvCache, {mode}, 4-D key"
    proves = "the tail behind a window starts where it should" if mode != "Alibi" else ""
    return SelftestCase(name, "scatter_pa_kv_cache", arrays, BOTH, proves=proves)


def _update(random: np.random.Generator) -> SelftestCase:
    arrays: Arrays = {
        "new_kv": _values(random, (5, 64), np.float16),
        "past": _values(random, (3, 2, 16, 64), np.float16),
        "token_offset": np.array([4, 9], np.int32),
        "seq_len": np.array([2, 3], np.int32),
    }
    return SelftestCase(
        "KVCacheOperation through ScatterPaKvCache",
        "kv_cache_update",
        arrays,
        ("past",),
        {"layer_id": 1},
        proves="scenario 6: 0-dim tensors as the value, a cache at an offset",
    )


def _gather(random: np.random.Generator, mode: str) -> SelftestCase:
    nz = mode == "PA_NZ"
    cache = (6, 8, 16, 16) if nz else (6, 16, 2, 64)
    out = (25, 128) if nz else (25, 2, 64)
    arrays: Arrays = {
        "key_cache": _values(random, cache, np.float16),
        "value_cache": _values(random, cache, np.float16),
        "block_tables": np.array([[3, 1, 0], [5, 2, 4]], np.int32),
        "seq_lens": np.array([18, 7], np.int32),
        "key": np.zeros(out, np.float16),
        "value": np.zeros(out, np.float16),
    }
    name = f"GatherPaKvCache, {mode}"
    return SelftestCase(name, "gather_pa_kv_cache", arrays, ("key", "value"), {"cache_mode": mode})


def _selection(random: np.random.Generator, topk: int, block: int, steps: int) -> SelftestCase:
    batch, page, full_blocks = 2, 64, 24
    rows, columns = batch * steps, -(-topk * block // page)
    tokens = 700
    ids = np.stack([random.permutation(tokens // block)[:topk] for _ in range(rows)])
    arrays: Arrays = {
        "selection_k_rope": np.zeros((rows * columns, page, 64), np.float16),
        "selection_kv_cache": np.zeros((rows * columns, page, 512), np.float16),
        "selection_kv_block_table": np.arange(rows * columns, dtype=np.int32).reshape(rows, -1),
        "selection_kv_block_status": np.full((batch, steps, 1, topk + 1), -1, np.int32),
        "selection_topk_indices": ids.astype(np.int32).reshape(batch, steps, 1, topk),
        "full_k_rope": _values(random, (full_blocks, page, 64), np.float16),
        "full_kv_cache": _values(random, (full_blocks, page, 512), np.float16),
        "full_kv_block_table": random.permutation(full_blocks).astype(np.int32).reshape(batch, -1),
        "full_kv_actual_seq": np.full(batch, tokens, np.int32),
        "full_q_actual_seq": np.full(batch, steps, np.int32),
    }
    outputs = ("selection_k_rope", "selection_kv_cache", "selection_kv_block_status")
    options = {"selection_topk_block_size": block}
    name = f"GatherSelectionKvCache, top {topk} blocks of {block}"
    return SelftestCase(name, "gather_selection_kv_cache", arrays, outputs, options)
