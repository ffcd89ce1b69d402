# SPDX-License-Identifier: Apache-2.0
"""Loads the conformance cases: one ``.npz`` a call, with its right answers.

``meta`` is a JSON string (operator, modes, dtypes), ``in_*`` the arguments (absent: None),
``out_*`` what each output holds afterwards or, for the name of no argument, what is returned.
Types numpy lacks, and all floats, are stored as raw bits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oracle_numbers import FLOAT4, TYPED, Array

FOLDER = Path(__file__).parent / "conformance"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))

#: The element type of each data argument is that of its lane; all else are index arrays.
KEY_LANE = frozenset(
    {
        *("key", "key_cache", "new_kv", "past"),
        *("selection_k_rope", "selection_kv_cache", "full_k_rope", "full_kv_cache"),
    }
)
VALUE_LANE = frozenset({"value", "value_cache"})
OPTIONS = (
    "cache_mode",
    "scatter_mode",
    "strides",
    "offsets",
    "selection_topk_block_size",
    "is_seq_lens_cumsum",
)
ARRAYS = {
    "scatter_pa_kv_cache": "key key_cache slot_mapping value value_cache compress_lens "
    "compress_seq_offset seq_lens",
    "kv_cache_update": "new_kv layer_id past token_offset seq_len",
    "gather_pa_kv_cache": "key_cache value_cache block_tables seq_lens key value seq_offset",
    "gather_selection_kv_cache": "selection_k_rope selection_kv_cache selection_kv_block_table "
    "selection_kv_block_status selection_topk_indices full_k_rope full_kv_cache "
    "full_kv_block_table full_kv_actual_seq full_q_actual_seq",
}


@dataclass
class ConformanceCase:
    """One call: operator, keyword arguments, and the bits of every output."""

    name: str
    meta: dict[str, Any]
    operator: str
    arguments: dict[str, Any]
    expected: dict[str, Array]


def can_be_typed(name: str) -> bool:
    """True when every data array of that case has a numpy type of its own here."""
    meta = load(name).meta
    return all(meta.get(k, "int8") in TYPED for k in ("dtype", "value_dtype"))


def load(name: str, typed: bool = False) -> ConformanceCase:
    """Read a case; fresh writable arrays each time.

    typed: data arrays have their own numpy types, instead of raw bits and a ``dtype`` name.
    """
    with np.load(FOLDER / f"{name}.npz") as file:
        meta = json.loads(str(file["meta"]))
        stored = {k: file[k] for k in file.files if k != "meta"}
    operator = meta["op"]
    arguments: dict[str, Any] = {n: stored.get(f"in_{n}") for n in ARRAYS[operator].split()}
    arguments |= {n: meta[n] for n in OPTIONS if n in meta}
    for lane, keyword in ((KEY_LANE, "dtype"), (VALUE_LANE, "value_dtype")):
        element = meta.get(keyword)
        for argument in [n for n in arguments if n in lane and arguments[n] is not None]:
            array = arguments[argument]
            if typed and element not in FLOAT4:
                arguments[argument] = array.view(TYPED[element])
            elif array.dtype.name != element:
                arguments[keyword] = element
    expected = {k.removeprefix("out_"): v for k, v in stored.items() if k.startswith("out_")}
    return ConformanceCase(name, meta, operator, arguments, expected)


def as_documented(case: ConformanceCase) -> ConformanceCase:
    """The same case as SoCs take it: Nct's flat buffers as views [T, H, D] at their beginning."""
    if case.arguments.get("scatter_mode") == "Nct":
        tokens = len(case.arguments["slot_mapping"])
        for name in ("key", "value"):
            buffer = case.arguments[name]
            if buffer is not None:
                shape = (tokens, *case.arguments[f"{name}_cache"].shape[2:])
                view = buffer.reshape(-1)[: int(np.prod(shape))].reshape(shape)
                case.arguments[name] = view
    return case
