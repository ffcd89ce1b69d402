# SPDX-License-Identifier: Apache-2.0
"""Draws arrays: where they lie in memory, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from memory import Arena, Layout, interleaved
from oracle_numbers import FLOAT4, FLOATS, ITEMSIZE, TYPED, Array, bits, encode, raw_dtype

Draw = Any

DTYPES = tuple(ITEMSIZE)
#: Plain first: that is what a failing example shrinks to.
OUTPUT_LAYOUTS = (
    *("plain", "plain", "padded", "steps", "backwards", "transposed", "unaligned"),
    *("scattered_last", "mixed"),
)
INPUT_LAYOUTS = (*OUTPUT_LAYOUTS, "repeated")
INDEX_LAYOUTS = ("plain", "plain", "padded", "steps", "backwards", "repeated_outer", "mixed")
CONTENTS = ("bits", "wide", "close", "ties", "zeros")


def draw_layout(draw: Draw, shape: tuple[int, ...], itemsize: int, kinds: Sequence[str]) -> Layout:
    """A layout of one of those kinds; its details come from one drawn seed."""
    kind = draw(st.sampled_from(kinds))
    if kind == "plain" or not shape:
        return Layout.plain(shape, itemsize)
    rng = np.random.default_rng(draw(st.integers(0, 255)))
    rank = len(shape)
    inner = rank - 1
    order = list(range(rank))
    steps, pads = [1] * rank, [0] * rank
    backwards, repeated = [False] * rank, [False] * rank
    mixed = kind == "mixed"
    if kind == "padded" or mixed:
        pads = (rng.integers(0, 4, rank) * itemsize).tolist()
    if kind == "steps" or mixed:
        steps = rng.integers(1, 3, rank).tolist()
        steps[inner] = 1
    if kind == "backwards" or mixed:
        backwards = (rng.random(rank) < 0.6).tolist()
        backwards[inner] = rank == 1 and bool(rng.random() < 0.5)
    if kind == "transposed" or mixed:
        order = [*rng.permutation(inner).tolist(), inner]
    if kind == "unaligned":
        pads = rng.integers(0, 2 * itemsize, rank).tolist()
        pads[inner] = int(rng.integers(1, 2 * itemsize))
    if kind in ("repeated", "repeated_outer"):
        repeated = (rng.random(rank) < 0.5).tolist()
        if kind == "repeated_outer":
            repeated[inner] = False
    if kind == "scattered_last":
        how = int(rng.integers(3))
        if how == 0:
            steps[inner] = int(rng.integers(2, 4))
        elif how == 1:
            backwards[inner] = True
        else:
            order = [inner, *range(inner)]
    return Layout.make(
        shape,
        itemsize,
        order=order,
        steps=steps,
        pads=pads,
        backwards=backwards,
        repeated=repeated,
    )


def content(rng: np.random.Generator, shape: tuple[int, ...], element: str, kind: str) -> Array:
    """Raw bits of ``shape``.

    bits:  any bits, NaN payloads, infinities and denormals among them.
    wide:  floats of both signs over the whole range of exponents.
    close: floats of nearly one exponent, so that the order of a sum shows.
    ties:  neighbouring bit patterns, whose means lie halfway.
    zeros: zeros of both signs.
    """
    raw = raw_dtype(element)
    if element not in FLOATS or kind == "bits":
        return rng.integers(0, 1 << (8 * raw.itemsize), shape, raw, endpoint=False)
    if kind == "ties":
        base = int(encode(np.ones(1, np.float32), element)[0])
        return np.asarray(base + rng.integers(0, 4, shape)).astype(raw)
    sign = rng.choice(np.array([1, -1], np.float32), shape)
    if kind == "zeros":
        return encode(np.asarray(sign * np.float32(0)), element)
    low, high = {"float16": (-24, 15), "hifloat8": (-22, 15)}.get(element, (-149, 127))
    if element.startswith("float8"):
        low, high = (-16, 15) if element == "float8_e5m2" else (-9, 8)
    if kind == "close":
        low, high = 0, 3
    magnitude = rng.uniform(1, 1.75, shape) * np.exp2(rng.integers(low, high + 1, shape))
    with np.errstate(under="ignore"):
        return encode((sign * magnitude).astype(np.float32), element)


@dataclass
class Builder:
    """Draws the arrays of one case into one arena.

    index:  int32 or int64, for every index array of the case.
    typed:  data arrays have their own numpy types where there is one; else raw bits, and the
            keyword that names the type.
    """

    draw: Draw
    arena: Arena = field(default_factory=Arena)
    index: str = "int32"
    typed: bool = True
    content_kind: str = "bits"
    note: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, draw: Draw) -> Builder:
        """Draw what all arrays of a case share."""
        return cls(
            draw,
            index=draw(st.sampled_from(["int32", "int64"])),
            typed=draw(st.booleans()),
            content_kind=draw(st.sampled_from(CONTENTS)),
        )

    def is_typed(self, element: str) -> bool:
        """True when arrays of that type say so themselves."""
        return element in TYPED and (self.typed or TYPED[element] == raw_dtype(element))

    def name_type(self, arguments: dict[str, Any], keyword: str, element: str) -> None:
        """Name the type of raw arrays among the arguments."""
        if not self.is_typed(element):
            arguments[keyword] = element

    def numpy_dtype(self, element: str) -> np.dtype[Any]:
        """The dtype of data arrays of that type in this case."""
        return TYPED[element] if self.is_typed(element) else raw_dtype(element)

    def fill(self, array: Array, element: str) -> Array:
        """Random content, in place."""
        rng = np.random.default_rng(self.draw(st.integers(0, 2**16)))
        bits(array)[...] = content(rng, array.shape, element, self.content_kind)
        return array

    def data(
        self, name: str, shape: tuple[int, ...], element: str, *, output: bool, plain: bool = False
    ) -> Array:
        """A data array of its own."""
        kinds = ("plain",) if plain else OUTPUT_LAYOUTS if output else INPUT_LAYOUTS
        layout = draw_layout(self.draw, shape, ITEMSIZE[element], kinds)
        shift = 0
        if not plain and self.draw(st.integers(0, 7)) == 7:
            shift = self.draw(st.integers(0, 2 * ITEMSIZE[element]))
        array = self.arena.place(name, layout, self.numpy_dtype(element), shift=shift)
        return self.fill(array, element)

    def pair(
        self,
        names: tuple[str, str],
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        elements: tuple[str, str],
        *,
        output: bool,
    ) -> list[Array]:
        """Two data arrays, sometimes interleaved in one buffer (slab halves, packed rows)."""
        agree = -1
        while agree + 1 < min(map(len, shapes)) and shapes[0][agree + 1] == shapes[1][agree + 1]:
            agree += 1
        # Behind the last axis there is nothing to lie side by side but items of one type.
        most = min(agree, len(shapes[0]) - 2, len(shapes[1]) - 2)
        if self.draw(st.integers(0, 3)) != 3:
            return [
                self.data(n, s, e, output=output)
                for n, s, e in zip(names, shapes, elements, strict=True)
            ]
        axis = self.draw(st.integers(-1, most))
        self.note.append(f"{names[0]} and {names[1]} interleaved behind axis {axis}")
        pad = self.draw(st.sampled_from([0, 0, 4, 3]))
        layouts = interleaved(shapes, [ITEMSIZE[e] for e in elements], axis, pad)
        number = self.arena.buffer(layouts[0].extent)
        return [
            self.fill(self.arena.place(n, layout, self.numpy_dtype(e), buffer=number), e)
            for n, layout, e in zip(names, layouts, elements, strict=True)
        ]

    def indices(self, name: str, values: Any, *, output: bool = False) -> Array:
        """An index array holding those values (nested lists or an array)."""
        wanted = np.asarray(values, self.index)
        kinds = [k for k in INDEX_LAYOUTS if not output or not k.startswith("repeated")]
        layout = draw_layout(self.draw, wanted.shape, wanted.dtype.itemsize, kinds)
        array = self.arena.place(name, layout, wanted.dtype)
        array[...] = wanted
        if not np.array_equal(array, wanted):  # a repeated axis cannot hold them
            array = self.arena.place(name, Layout.plain(wanted.shape, wanted.itemsize), self.index)
            array[...] = wanted
        return array


def element_types(*, packed: bool = True) -> st.SearchStrategy[str]:
    """The types data may have; float4 (packed pairs) only when asked for."""
    return st.sampled_from([d for d in DTYPES if packed or d not in FLOAT4])
