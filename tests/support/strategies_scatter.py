# SPDX-License-Identifier: Apache-2.0
"""Legal ScatterPaKvCache and ScatterPaCache calls, by scenario."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cases import Case
from oracle_numbers import FLOAT4, ITEMSIZE, Array
from oracle_scatter import run_tokens
from strategies_arrays import DTYPES, Builder, Draw

RULES = {3: ("Alibi", "Rope", "Omni"), 4: ("Alibi",), 5: ("Rope", "Omni")}
SCENARIOS = (1, 2, 3, 4, 5, 6, 7)
COUNTS = st.integers(1, 3)
HEAD_SIZES = st.sampled_from([1, 2, 3, 5, 8, 16, 17, 32, 33, 64])


def draw_slots(draw: Draw, tokens: int, num_slots: int) -> list[int]:
    """Slots of single tokens: runs, repeats, negative ones."""
    negative = st.sampled_from([-1, -1, -7, -(2**31)])
    if num_slots == 0:
        return [draw(negative) for _ in range(tokens)]
    kind = draw(st.sampled_from(["run", "any", "few", "backwards", "negative"]))
    first = draw(st.integers(0, num_slots - 1))
    if kind == "run":
        return [(first + i) % num_slots for i in range(tokens)]
    if kind == "backwards":
        return [(first - i) % num_slots for i in range(tokens)]
    if kind == "negative":
        return [draw(negative) for _ in range(tokens)]
    chosen = st.integers(0, num_slots - 1)
    if kind == "few":
        chosen = st.sampled_from([first, 0, num_slots - 1])
    either = st.one_of(chosen, chosen, chosen, negative)
    return [draw(either) for _ in range(tokens)]


def _sizes(draw: Draw, empty: bool) -> tuple[int, int]:
    """num_blocks, block_size."""
    return draw(st.integers(0 if empty else 1, 4)), draw(st.integers(1, 6))


def _add_lanes(
    b: Builder,
    arguments: dict[str, Any],
    elements: tuple[str, str],
    sources: tuple[tuple[int, ...], tuple[int, ...]],
    caches: tuple[tuple[int, ...], tuple[int, ...]],
    key_only: bool,
) -> None:
    if key_only:
        arguments["key"] = b.data("key", sources[0], elements[0], output=False)
        arguments["key_cache"] = b.data("key_cache", caches[0], elements[0], output=True)
    else:
        arguments["key"], arguments["value"] = b.pair(
            ("key", "value"), sources, elements, output=False
        )
        arguments["key_cache"], arguments["value_cache"] = b.pair(
            ("key_cache", "value_cache"), caches, elements, output=True
        )
    _name_types(b, arguments, elements, key_only)


def _name_types(
    b: Builder, arguments: dict[str, Any], elements: tuple[str, str], key_only: bool
) -> None:
    b.name_type(arguments, "dtype", elements[0])
    if not key_only:
        b.name_type(arguments, "value_dtype", elements[1])
        return
    form = b.draw(st.sampled_from(["absent", "none", "scalar"]))
    if form == "none":
        arguments |= {"value": None, "value_cache": None}
    elif form == "scalar":
        scalar = np.zeros((), b.numpy_dtype(elements[0]))
        arguments |= {"value": scalar, "value_cache": scalar.copy()}


def _optional_mode(b: Builder, arguments: dict[str, Any], keyword: str, *modes: str | None) -> None:
    """Pass one of the spellings of a mode, or leave the default."""
    mode = b.draw(st.sampled_from([*modes, "leave"]))
    if mode != "leave":
        arguments[keyword] = mode


def _nz(b: Builder, dtypes: Sequence[str]) -> dict[str, Any]:
    draw = b.draw
    key_element = draw(st.sampled_from(dtypes))
    value_element = draw(st.sampled_from([key_element, *dtypes]))
    elements = (key_element, value_element)
    key_only = draw(st.integers(0, 4)) == 4
    tokens, heads = draw(st.integers(0, 9)), draw(COUNTS)
    nb, bs = _sizes(draw, empty=True)
    five = draw(st.booleans())
    arguments: dict[str, Any] = {}
    sources, caches = [], []
    for element in elements:
        lane = 32 // ITEMSIZE[element]
        columns = draw(st.integers(1, 3))
        sources.append((tokens, heads, columns * lane))
        inner = (heads, columns) if five else (heads * columns,)
        caches.append((nb, *inner, bs, lane))
    _add_lanes(b, arguments, elements, (sources[0], sources[1]), (caches[0], caches[1]), key_only)
    arguments["slot_mapping"] = b.indices("slot_mapping", draw_slots(draw, tokens, nb * bs))
    arguments["cache_mode"] = "PA_NZ"
    _optional_mode(b, arguments, "scatter_mode", None, "", "None", "Alibi", "Rope", "NHSD", "Nct")
    return arguments


def _rows(b: Builder, number: int, dtypes: Sequence[str]) -> dict[str, Any]:
    """Scenarios 2 and 6 with mode None, and 7."""
    draw = b.draw
    element = draw(st.sampled_from(dtypes))
    key_only = number == 6 or (number == 7 and draw(st.integers(0, 4)) == 4)
    tokens, heads = draw(st.integers(0, 9)), draw(COUNTS)
    nb, bs = _sizes(draw, empty=True)
    sizes = draw(HEAD_SIZES), draw(HEAD_SIZES)
    if draw(st.integers(0, 15)) == 15:
        sizes = (0, 0)
    sources = [(tokens, heads, size) for size in sizes]
    order = (heads, bs) if number == 7 else (bs, heads)
    caches = [(nb, *order, size) for size in sizes]
    arguments: dict[str, Any] = {}
    _add_lanes(
        b, arguments, (element, element), (sources[0], sources[1]), (caches[0], caches[1]), key_only
    )
    arguments["slot_mapping"] = b.indices("slot_mapping", draw_slots(draw, tokens, nb * bs))
    _optional_mode(b, arguments, "cache_mode", None, "", "Norm")
    if number == 7:
        arguments["scatter_mode"] = "NHSD"
    else:
        _optional_mode(b, arguments, "scatter_mode", None, "", "None")
    return arguments


class Lent:
    """An array's memory as numpy takes it from somebody it knows nothing of."""

    def __init__(self, array: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.array = array
        self.__array_interface__ = {
            "version": 3,
            "data": (array.ctypes.data, False),
            "shape": shape,
            "strides": strides,
            "typestr": np.dtype(f"u{array.itemsize}").str,
        }


def _nct(b: Builder, number: int, dtypes: Sequence[str]) -> dict[str, Any]:
    """A view [T, H, D] of a fused buffer, or that buffer flat (rarely: no SoC takes it)."""
    draw = b.draw
    element = draw(st.sampled_from([d for d in dtypes if d not in FLOAT4]))
    tokens, heads = draw(st.integers(0, 7)), draw(COUNTS)
    nb, bs = _sizes(draw, empty=True)
    sizes = draw(HEAD_SIZES), draw(HEAD_SIZES)
    named = draw(st.integers(0, 7)) < 7
    strides, offsets = [1, 1], [0, 0]
    if named:
        strides = [draw(st.integers(1, 2 * heads * max(sizes))) for _ in range(2)]
        offsets = [draw(st.integers(0, 20)) for _ in range(2)]
    needed = [offsets[i] + heads * sizes[i] + strides[i] * max(tokens - 1, 0) for i in range(2)]
    is_flat = draw(st.integers(0, 3)) == 3
    # Flat buffers may be one for both.
    shared = is_flat and number == 2 and draw(st.booleans())
    arguments: dict[str, Any] = {}

    def source(name: str, lane: int, size: int) -> Array:
        size += draw(st.sampled_from([0, 0, 1, 9]))
        if is_flat:
            shape = draw(st.sampled_from([(size,), (-(-size // 3), 3), (2, 1, -(-size // 2), 1)]))
            return b.data(name, shape, element, output=False, plain=True)
        shape = (tokens, heads, sizes[lane])
        if draw(st.booleans()):
            # The array's own strides mean nothing; its first element does.  Memory below it is
            # known, and what lies before its first element is not counted.
            begin = draw(st.sampled_from([0, 0, 5]))
            size = max(size, heads * sizes[lane] * max(tokens, 1))
            whole = b.data(name, (begin + size,), element, output=False, plain=True)
            return whole[begin:][: tokens * heads * sizes[lane]].reshape(shape)
        # Nothing is known of the memory but what the array's own strides reach.
        room = max(needed[lane] - heads * sizes[lane], 0)
        apart = max(-(-room // max(tokens - 1, 1)), heads * sizes[lane], 1)
        size = apart * tokens + draw(st.sampled_from([0, 3]))
        flat = b.data(name, (max(size, needed[lane]),), element, output=False, plain=True)
        item = flat.itemsize
        strides = (apart * item, sizes[lane] * item, item)
        if tokens == 1:
            return np.ndarray(shape, flat.dtype, buffer=flat.view(np.uint8), strides=strides)
        return np.asarray(Lent(flat, shape, strides)).view(flat.dtype)

    caches = [(nb, bs, heads, size) for size in sizes]
    if number == 6:
        arguments["key"] = source("key", 0, needed[0])
        arguments["key_cache"] = b.data("key_cache", caches[0], element, output=True)
    else:
        arguments["key"] = source("key", 0, max(needed) if shared else needed[0])
        arguments["value"] = arguments["key"] if shared else source("value", 1, needed[1])
        arguments["key_cache"], arguments["value_cache"] = b.pair(
            ("key_cache", "value_cache"), (caches[0], caches[1]), (element, element), output=True
        )
    _name_types(b, arguments, (element, element), number == 6)
    arguments["slot_mapping"] = b.indices("slot_mapping", draw_slots(draw, tokens, nb * bs))
    kind = draw(st.sampled_from([list, tuple]))
    arguments["scatter_mode"] = "Nct"
    if named:
        arguments |= {"strides": kind(strides), "offsets": kind(offsets)}
    return arguments


def _windows(
    b: Builder, number: int, dtypes: Sequence[str], rules: Sequence[str]
) -> dict[str, Any]:
    """Scenarios 3, 4 and 5."""
    draw = b.draw
    rule = draw(st.sampled_from(rules))
    element = draw(st.sampled_from([d for d in dtypes if rule != "Rope" or d not in FLOAT4]))
    key_only = draw(st.integers(0, 4)) == 4
    batch, heads = draw(st.integers(0, 3)), draw(COUNTS)
    lengths = [draw(st.integers(0, 6)) for _ in range(batch)]
    longest = max(lengths, default=0) + draw(st.integers(0, 2))
    windows: list[int] = []
    starts: list[int] = []
    runs: list[int] = []
    for n in lengths:
        for _ in range(heads):
            o = -1
            if rule != "Alibi":
                o = draw(st.integers(-1, n))
            # without compression the window is ignored, however long
            w = draw(st.integers(0, 9 if rule != "Alibi" and o == -1 else n - max(o, 0)))
            windows.append(w)
            starts.append(o)
            runs.append(len(run_tokens(rule, n, w, o)))
    bs = draw(st.integers(1, 5))
    nb = -(-max(runs, default=0) // bs) + draw(st.integers(0, 3))
    slots = []
    for run in runs:
        last = nb * bs - max(run, 1)
        skip = last < 0 or draw(st.integers(0, 7)) == 7
        slots.append(draw(st.sampled_from([-1, -9]) if skip else st.integers(0, last)))
    sizes = draw(HEAD_SIZES), draw(HEAD_SIZES)
    outer = (batch, longest) if number == 3 else (sum(lengths),)
    sources = [(*outer, heads, size) for size in sizes]
    caches = [(nb, bs, 1, size) for size in sizes]
    arguments: dict[str, Any] = {}
    _add_lanes(
        b, arguments, (element, element), (sources[0], sources[1]), (caches[0], caches[1]), key_only
    )
    square = np.array(slots, np.int64).reshape(batch, heads)
    arguments["slot_mapping"] = b.indices("slot_mapping", square if number == 3 else slots)
    wide = number == 3 and draw(st.booleans())
    widths = np.array(windows, np.int64)
    arguments["compress_lens"] = b.indices(
        "compress_lens", widths.reshape(batch, heads) if wide else widths
    )
    arguments["seq_lens"] = b.indices("seq_lens", lengths)
    if rule != "Alibi":
        arguments["compress_seq_offset"] = b.indices("compress_seq_offset", starts)
    if number == 3 and rule != "Omni":
        _optional_mode(b, arguments, "scatter_mode", None, "", "None", rule)
    else:
        arguments["scatter_mode"] = rule
    _optional_mode(b, arguments, "cache_mode", None, "", "Norm")
    return arguments


@st.composite
def scatter_cases(
    draw: Draw, scenarios: Sequence[int] = SCENARIOS, dtypes: Sequence[str] = DTYPES
) -> Case:
    """Legal scatter_pa_kv_cache calls of those scenarios, without a SoC."""
    number = draw(st.sampled_from(scenarios))
    b = Builder.make(draw)
    if number == 1:
        arguments = _nz(b, dtypes)
    elif number in (3, 4, 5):
        arguments = _windows(b, number, dtypes, RULES[number])
    elif number in (2, 6) and draw(st.integers(0, 2)) == 2:
        arguments = _nct(b, number, dtypes)
    else:
        arguments = _rows(b, number, dtypes)
    note = "; ".join([f"scenario {number}", *b.note])
    return Case("scatter_pa_kv_cache", arguments, b.arena, note)


@st.composite
def scatter_pa_cache_cases(draw: Draw, dtypes: Sequence[str] = DTYPES) -> Case:
    """Legal scatter_pa_cache calls: one lane, scenarios 2 (mode None) and 3."""
    number = draw(st.sampled_from([2, 3]))
    b = Builder.make(draw)
    arguments = _rows(b, 6, dtypes) if number == 2 else _windows(b, 3, dtypes, ("Alibi", "Rope"))
    keep = ("key", "key_cache", "slot_mapping", "compress_lens", "compress_seq_offset", "seq_lens")
    arguments = {n: a for n, a in arguments.items() if n in (*keep, "dtype")}
    return Case("scatter_pa_cache", arguments, b.arena, f"scenario {number}, key only")
