# SPDX-License-Identifier: Apache-2.0
"""Legal gather_pa_kv_cache, kv_cache_update and layout calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cases import Case
from oracle_numbers import ITEMSIZE
from oracle_update import LAYOUT_FUNCTIONS
from strategies_arrays import DTYPES, Builder, Draw
from strategies_scatter import COUNTS, HEAD_SIZES


def _lane_shapes(
    draw: Draw, mode: str, element: str, nb: int, bs: int, heads: int, five: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cache of one lane, and one gathered token."""
    if mode == "PA_NZ":
        lane, columns = 32 // ITEMSIZE[element], draw(st.integers(1, 3))
        inner = (heads, columns) if five else (heads * columns,)
        return (nb, *inner, bs, lane), (heads * columns * lane,)
    size = draw(HEAD_SIZES)
    order = (heads, bs) if mode == "NHSD" else (bs, heads)
    return (nb, *order, size), (heads, size)


@st.composite
def gather_pa_cases(draw: Draw, dtypes: Sequence[str] = DTYPES, *, beyond: bool = False) -> Case:
    """Legal gather_pa_kv_cache calls, without a SoC.

    beyond: more of what no SoC takes (two types outside of PA_NZ), the default mode's other
            spellings, and larger calls.
    """
    b = Builder.make(draw)
    mode = draw(st.sampled_from(["Norm", "PA_NZ", "NHSD"]))
    key_element = draw(st.sampled_from(dtypes))
    value_element = (
        draw(st.sampled_from([key_element, *dtypes])) if mode == "PA_NZ" or beyond else key_element
    )
    elements = key_element, value_element
    batch, heads, five = draw(st.integers(0, 3 + beyond)), draw(COUNTS), draw(st.booleans())
    bs, width = draw(st.integers(1, 5 + beyond)), draw(st.integers(0, 4))
    lengths, offsets, needed = [], [], set()
    for request in range(batch):
        offset = draw(st.integers(0, bs * width + 2))
        room = max(width - offset // bs, 0) * bs
        n = draw(st.integers(0, min(room, 18 if beyond else 9)))
        lengths.append(n)
        offsets.append(offset)
        needed |= {(request, offset // bs + j // bs) for j in range(n)}
    with_offset = draw(st.booleans())
    if not with_offset:
        needed = {(r, j // bs) for r, n in enumerate(lengths) for j in range(n)}
    nb = draw(st.integers(1 if needed else 0, 5))
    nonsense = [0, -1, 2**31 - 1, *([-(2**31)] if beyond else [])]
    tables = np.full((batch, width), draw(st.sampled_from(nonsense)), np.int64)
    for entry in sorted(needed):
        tables[entry] = draw(st.integers(0, nb - 1))
    cumsum = draw(st.booleans())
    totals = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    arguments: dict[str, Any] = {
        "block_tables": b.indices("block_tables", tables),
        "seq_lens": b.indices("seq_lens", totals if cumsum else lengths),
    }
    if cumsum or draw(st.booleans()):
        arguments["is_seq_lens_cumsum"] = cumsum
    if with_offset:
        arguments["seq_offset"] = b.indices("seq_offset", offsets)
    elif draw(st.booleans()):
        arguments["seq_offset"] = None
    if mode != "Norm" or draw(st.booleans()):
        arguments["cache_mode"] = mode
    elif beyond:
        arguments["cache_mode"] = draw(st.sampled_from([None, ""]))
    shapes = [_lane_shapes(draw, mode, e, nb, bs, heads, five) for e in elements]
    caches = shapes[0][0], shapes[1][0]
    outs = (sum(lengths), *shapes[0][1]), (sum(lengths), *shapes[1][1])
    b.name_type(arguments, "dtype", key_element)
    if draw(st.integers(0, 4)) == 4:
        arguments["key_cache"] = b.data("key_cache", caches[0], key_element, output=False)
        arguments["key"] = b.data("key", outs[0], key_element, output=True)
        arguments |= {"value_cache": None, "value": None}
    else:
        b.name_type(arguments, "value_dtype", value_element)
        arguments["key_cache"], arguments["value_cache"] = b.pair(
            ("key_cache", "value_cache"), caches, elements, output=False
        )
        arguments["key"], arguments["value"] = b.pair(("key", "value"), outs, elements, output=True)
    return Case("gather_pa_kv_cache", arguments, b.arena, "; ".join([mode, *b.note]))


@st.composite
def kv_cache_update_cases(draw: Draw, dtypes: Sequence[str] = DTYPES) -> Case:
    """Legal kv_cache_update calls, without a SoC."""
    b = Builder.make(draw)
    element = draw(st.sampled_from(dtypes))
    layers, batch, max_seq = (
        draw(st.integers(1, 3)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 6)),
    )
    heads, size = draw(st.integers(1, 3)), draw(HEAD_SIZES)
    four = draw(st.booleans())
    lengths, ends = [], []
    for _ in range(batch):
        end = draw(st.integers(0, max_seq))
        ends.append(end)
        lengths.append(draw(st.integers(0, end)))
    tokens = sum(lengths)
    shape: tuple[int, ...] = (tokens, heads * size)
    if four:
        outer = draw(st.sampled_from([d for d in range(1, tokens + 1) if tokens % d == 0] or [1]))
        shape = (outer, tokens // outer, heads, size)
    layer = draw(st.integers(0, layers - 1))
    layer_id: Any = b.indices("layer_id", [layer]) if draw(st.booleans()) else layer
    arguments: dict[str, Any] = {
        "new_kv": b.data("new_kv", shape, element, output=False),
        "layer_id": layer_id,
        "past": b.data("past", (layers, batch, max_seq, heads * size), element, output=True),
        "token_offset": b.indices("token_offset", ends),
        "seq_len": b.indices("seq_len", lengths),
    }
    b.name_type(arguments, "dtype", element)
    return Case("kv_cache_update", arguments, b.arena, f"4-D {four}")


@st.composite
def layout_cases(draw: Draw, dtypes: Sequence[str] = DTYPES) -> Case:
    """Legal conversions between ND and NZ, with and without ``out``."""
    b = Builder.make(draw)
    name = draw(st.sampled_from(sorted(LAYOUT_FUNCTIONS)))
    element = draw(st.sampled_from(dtypes))
    c0 = 32 // ITEMSIZE[element]
    rows, columns, heads = draw(st.integers(0, 5)), draw(st.integers(1, 3)), draw(COUNTS)
    outer = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    nb = draw(st.integers(0, 3))
    five = draw(st.booleans())
    inner = (heads, columns) if five else (heads * columns,)
    nd, nz = (*outer, rows, columns * c0), (*outer, columns, rows, c0)
    if name.startswith("paged"):
        nd, nz = (nb, rows, heads, columns * c0), (nb, *inner, rows, c0)
    source, target = (nd, nz) if name.endswith("nd_to_nz") else (nz, nd)
    arguments: dict[str, Any] = {}
    first = "cache" if name.startswith("paged") else "x"
    arguments[first] = b.data(first, source, element, output=False)
    if name == "paged_nd_to_nz":
        arguments["five"] = five
    if name == "paged_nz_to_nd" and (not five or draw(st.booleans())):
        arguments["num_heads"] = heads
    if draw(st.booleans()):
        arguments["out"] = b.data("out", target, element, output=True)
    return Case(name, arguments, b.arena, f"{element}; {b.note}")
