# SPDX-License-Identifier: Apache-2.0
"""Legal calls of each scenario as (shape, dtype) pairs, for questions about SoCs."""

from __future__ import annotations

from typing import Any

import kvcore

NAMES = ("A2", "A3", "950")
OLDER = ("A2", "A3")
SHORT = ("float16", "bfloat16", "int8")
HALF = ("float16", "bfloat16")
FLOAT4 = ("float4_e2m1", "float4_e1m2")
FLOAT8 = ("hifloat8", "float8_e5m2", "float8_e4m3fn")
ALL = (
    *("float16", "bfloat16", "float32", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *FLOAT8,
    *FLOAT4,
)
SIZES = {name: 1 if "8" in name or "float4" in name else 2 for name in ALL}
SIZES |= {"float32": 4, "int32": 4, "uint32": 4}


def pair(*shape: int, dtype: str) -> tuple[tuple[int, ...], str]:
    """A shape of stored items and its dtype; float4 is two elements an item."""
    return (*shape[:-1], shape[-1] * 2) if dtype in FLOAT4 else shape, dtype


def arguments(
    variant: str,
    dtype: str = "float16",
    *,
    value_dtype: str | None = None,
    tokens: int = 4,
    heads: int = 2,
    size: int = 32,
    value_size: int | None = None,
    blocks: int = 8,
    block_size: int = 4,
    index: str = "int32",
    axes: int = 4,
) -> dict[str, Any]:
    """A legal call of one scenario: "1", "2", "2 Nct", "3 Alibi", "3 Rope", "4", "5 Omni", ..."""
    number, _, mode = variant.partition(" ")
    dtypes = (dtype, value_dtype or dtype)
    sizes = (size, size if value_size is None else value_size)
    batch = 2
    found: dict[str, Any] = {}
    for lane, d, which in zip(("key", "value"), sizes, dtypes, strict=True):
        source: tuple[int, ...] = (tokens, heads, d)
        cache: tuple[int, ...] = (blocks, block_size, heads, d)
        if number == "1":
            c0 = 32 // SIZES[which]
            columns = (heads * d // c0,) if axes == 4 else (heads, d // c0)
            cache = (blocks, *columns, block_size, c0)
        elif number == "3":
            source = (batch, tokens, heads, d)
        elif number == "7":
            cache = (blocks, heads, block_size, d)
        if number in "345":
            cache = (blocks, block_size, 1, d)
        found[lane] = pair(*source, dtype=which)
        found[f"{lane}_cache"] = pair(*cache, dtype=which)
    found["slot_mapping"] = pair(tokens, dtype=index)
    if number in "345":
        flat = pair(batch * heads, dtype=index)
        found["slot_mapping"] = pair(batch, heads, dtype=index) if number == "3" else flat
        found["compress_lens"] = flat
        found["seq_lens"] = pair(batch, dtype=index)
        if number == "5" or mode in ("Rope", "Omni"):
            found["compress_seq_offset"] = flat
    if number == "1":
        found["cache_mode"] = "PA_NZ"
    found["scatter_mode"] = {"4": "Alibi", "7": "NHSD"}.get(number, mode or "None")
    if mode == "Nct":
        # Tokens lie closer than their width, which the 950's tiling asks for.
        found["strides"], found["offsets"] = (1, 1), (0, 0)
    if number == "6":
        del found["value"], found["value_cache"]
    if "float4" in dtype:
        found["dtype"] = dtype
    return found


def verdict(soc: str, variant: str, dtype: str = "float16", **sizes: Any) -> str | None:
    """None when that SoC runs the call, else its reason."""
    scenario = kvcore.scenario_of(**arguments(variant, dtype, **sizes))
    assert scenario.number == int(variant[0])
    return scenario.runs[soc]


VARIANTS = {
    "1": ("A2", "A3", "950"),
    "2": ("A2", "A3", "950"),
    "2 Nct": ("A2", "A3", "950"),
    "3 Alibi": ("950",),
    "3 Rope": ("950",),
    "3 Omni": ("950",),
    "4": ("A2", "A3", "950"),
    "5 Rope": ("A2", "A3", "950"),
    "5 Omni": ("A2", "A3", "950"),
    "6": ("A2", "A3"),
    "6 Nct": ("A2", "A3"),
    "7": ("A2", "A3"),
}
RUNS = [(v, s) for v, has in VARIANTS.items() for s in has]
REFUSED = [(v, s) for v, has in VARIANTS.items() for s in NAMES if s not in has]
