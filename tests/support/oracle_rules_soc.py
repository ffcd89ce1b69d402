# SPDX-License-Identifier: Apache-2.0
"""Which legal calls a SoC refuses, from the raw arguments; shares nothing with the package."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracle_numbers import FLOAT4, logical_name
from oracle_rules import Arguments
from oracle_scatter import NO_MODE, absent, run_tokens, scenario

OLDER = ("A2", "A3")
FLOAT8 = ("hifloat8", "float8_e5m2", "float8_e4m3fn")


def refuses(operator: str, a: Arguments, soc: str) -> str | None:
    """Why that SoC refuses a call that is legal without one; None: it runs it."""
    if operator == "kv_cache_update":
        return _update(a, soc)
    return _scatter(a, soc, operator == "scatter_pa_cache")


def _scatter(a: Arguments, soc: str, key_operator: bool) -> str | None:
    alone = absent(a.get("value")) and absent(a.get("value_cache"))
    mode = a.get("scatter_mode", "None")
    number = scenario(a["key"], a.get("cache_mode", "Norm"), mode, alone)
    nct = mode == "Nct" and number in (2, 6)
    if mode in NO_MODE and number == 3:
        mode = "Rope" if a.get("compress_seq_offset") is not None else "Alibi"
    key = logical_name(a["key"], a.get("dtype"))
    value = key if alone else logical_name(a["value"], a.get("value_dtype") or a.get("dtype"))
    cache = a["key_cache"]
    rows = cache.shape[0] * (cache.shape[-2] if number in (1, 7) else cache.shape[1])
    tokens = len(a["slot_mapping"]) if number in (1, 2, 6, 7) else a["key"].shape[0]
    if nct and any(a[n].ndim != 3 for n in ("key", "value")[: 1 if alone else 2]):
        return "no [T, H, D] in Nct"
    if key_operator:
        if soc in OLDER:
            return "no such operator"
        if number == 3 and key in (*FLOAT8, *FLOAT4):
            return "dtype"
    elif soc in OLDER:
        if number == 3:
            return "scenario"
        if alone and number != 6:
            return "key only"
        scalars = [a[n] for n in ("value", "value_cache") if alone and a.get(n) is not None]
        if any(logical_name(one, a.get("dtype")) != key for one in scalars):
            return "dtype of a scalar"
        short = ("float16", "bfloat16") if number in (5, 7) else ("float16", "bfloat16", "int8")
        if key not in short or value not in short:
            return "dtype"
        if value == "int8" and key != "int8":
            return "int8 value"
        if number == 7 and any(
            a[lane].shape[2] * a[lane].itemsize % 32 for lane in ("key", "value")
        ):
            return "head size"
    else:
        if number in (6, 7) or alone:
            return "scenario or key only"
        if number == 5 and key not in ("float16", "bfloat16"):
            return "dtype"
        if key in FLOAT4 and (number not in (1, 2) or nct):
            return "float4"
    if number != 3 and rows < tokens:
        return "slots"
    return "rows" if number in (3, 4, 5) and len(written_slots(a)) > rows else None


def written_slots(a: Arguments) -> list[int]:
    """Every slot that a legal call writes, as often as it writes it, in order."""
    found: list[int] = []
    for slot, rows in _runs(a):
        if slot >= 0:
            found += range(slot, slot + rows)
    return found


def repeats(a: Arguments) -> bool:
    """Whether a slot is written twice, which the documents forbid."""
    written = written_slots(a)
    return len(set(written)) < len(written)


def breaks_only_the_documents_sum(a: Arguments) -> bool:
    """Alibi: sum(seq_lens - compress_lens), as the documents have it, is past the cache."""
    key, cache = a["key"], a["key_cache"]
    mode = a.get("scatter_mode", "None")
    bare = mode in NO_MODE and key.ndim == 4 and a.get("compress_seq_offset") is None
    if a.get("compress_lens") is None or not (mode == "Alibi" or bare) or key.size == 0:
        return False
    heads = key.shape[-2]
    total = 0
    for i, w in enumerate(a["compress_lens"].reshape(-1).tolist()):
        if a["slot_mapping"].reshape(-1)[i] >= 0:
            total += int(a["seq_lens"][i // heads]) - w
    return total > cache.shape[0] * cache.shape[1]


def _runs(a: Arguments) -> list[tuple[int, int]]:
    """(first slot, rows) of each place of slot_mapping."""
    slots = [int(s) for s in a["slot_mapping"].reshape(-1)]
    if a["key_cache"].size == 0 or a["key"].size == 0:
        return [(slot, 0) for slot in slots]
    if a.get("compress_lens") is None:
        return [(slot, 1) for slot in slots]
    mode = a.get("scatter_mode", "None")
    if mode in NO_MODE:
        mode = "Alibi" if a.get("compress_seq_offset") is None else "Rope"
    heads = a["key"].shape[-2]
    found = []
    for i, slot in enumerate(slots):
        start = -1 if mode == "Alibi" else int(a["compress_seq_offset"][i])
        window = int(a["compress_lens"].reshape(-1)[i])
        rows = len(run_tokens(mode, int(a["seq_lens"][i // heads]), window, start))
        found.append((slot, rows))
    return found


def _update(a: Arguments, soc: str) -> str | None:
    if soc not in OLDER:
        return "no such operator"
    element = logical_name(a["new_kv"], a.get("dtype"))
    if element not in ("float16", "int8"):
        return "dtype"
    if a["past"].shape[3] * a["past"].itemsize % 32:
        return "hidden"
    for name in ("layer_id", "token_offset", "seq_len"):
        if isinstance(a[name], np.ndarray) and a[name].dtype != np.int32:
            return "index dtype"
    return _update_values(a)


def _update_values(a: Arguments) -> str | None:
    longest: Any = a["past"].shape[2]
    if (np.asarray(a["seq_len"]) < 1).any():
        return "seq_len"
    if (np.asarray(a["token_offset"]) >= longest).any():
        return "token_offset"
    return None
