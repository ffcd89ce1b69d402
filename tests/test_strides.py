# SPDX-License-Identifier: Apache-2.0
"""Integers about shapes, beside what numpy and plain loops say of the same arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import strides
from kvcore.dtypes import BY_NAME, named

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def views(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and item size of any view; strides of all signs, often dense ones."""
    shape = draw(SHAPES)
    itemsize = draw(st.sampled_from([1, 2, 4]))
    dense = strides.dense_strides(shape, itemsize)
    steps = tuple(draw(st.sampled_from([d, 2 * d, -d, 0, 7, itemsize])) for d in dense)
    return shape, steps, itemsize


def offsets(shape: tuple[int, ...], steps: tuple[int, ...]) -> list[int]:
    """Where each item lies, in C order, by plain loops."""
    places = itertools.product(*(range(n) for n in shape))
    return [sum(i * step for i, step in zip(place, steps, strict=True)) for place in places]


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.sampled_from([1, 2, 4, 8]))
def test_dense_strides_are_those_of_a_new_array(shape: tuple[int, ...], itemsize: int) -> None:
    assert strides.dense_strides(shape, itemsize) == np.empty(shape, f"u{itemsize}").strides


def test_an_empty_axis_counts_as_one_item() -> None:
    assert strides.dense_strides((3, 0, 2), 4) == (8, 8, 4)


@given(views())
def test_items_that_follow_one_another_are_dense(view: Any) -> None:
    shape, steps, itemsize = view
    places = offsets(shape, steps)
    in_order = places == [i * itemsize for i in range(len(places))]
    assert strides.is_dense(shape, steps, itemsize) == in_order
    for first in range(len(shape)):
        inner = offsets(shape[first:], steps[first:])
        wanted = 0 in shape or inner == [i * itemsize for i in range(len(inner))]
        assert strides.is_dense(shape, steps, itemsize, first) == wanted


@given(views())
def test_strides_that_are_meant_lead_to_the_same_items(view: Any) -> None:
    shape, steps, itemsize = view
    meant = strides.meant_strides(shape, steps, itemsize)
    moving = strides.moving_strides(shape, steps)
    for found in (meant, moving):
        assert offsets(shape, found) == offsets(shape, steps)
    assert all(step == 0 for size, step in zip(shape, moving, strict=True) if size < 2)
    if strides.is_dense(shape, steps, itemsize) and 0 not in shape:
        assert meant == strides.dense_strides(shape, itemsize)


@given(views())
def test_an_extent_is_from_the_lowest_byte_to_past_the_highest(view: Any) -> None:
    shape, steps, itemsize = view
    places = offsets(shape, steps)
    wanted = (min(places), max(places) + itemsize) if places else (0, 0)
    assert strides.extent(shape, steps, itemsize) == wanted


@given(views(), st.booleans())
def test_joined_axes_step_along_the_same_items_on_each_side(view: Any, alike: bool) -> None:
    shape, steps, itemsize = view
    other = steps if alike else strides.dense_strides(shape, itemsize)
    axes = strides.join(zip(shape, steps, other, strict=True))
    sizes = tuple(count for count, *_ in axes)
    assert 1 not in sizes
    for side, wanted in ((1, steps), (2, other)):
        assert offsets(sizes, tuple(axis[side] for axis in axes)) == offsets(shape, wanted)
    assert strides.join(axes) == axes


@given(views())
def test_pieces_hold_the_same_bytes_in_the_same_order(view: Any) -> None:
    shape, steps, itemsize = view
    axes, piece = strides.coalesce(zip(shape, steps, strict=True), itemsize)
    sizes = tuple(count for count, _ in axes)
    starts = offsets(sizes, tuple(step for _, step in axes))
    if 0 not in shape:
        found = [start + i for start in starts for i in range(piece)]
        assert found == [at + i for at in offsets(shape, steps) for i in range(itemsize)]
    assert not axes or axes[-1][1] != piece


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)


@given(RANGES)
def test_merged_ranges_hold_the_same_bytes(pairs: list[tuple[int, int]]) -> None:
    pairs = [(start, size) for start, size in pairs if size]
    starts = np.array([start for start, _ in pairs], np.int64)
    sizes = np.array([size for _, size in pairs], np.int64)
    found = strides.merge_ranges(starts, starts + sizes).tolist()
    covered = {at for start, size in pairs for at in range(start, start + size)}
    assert {at for start, end in found for at in range(start, end)} == covered
    # Ascending, with a gap between any two.
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("spelled", "row"),
    [
        ("bfloat16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("torch.float4_e2m1fn_x2", "float4_e2m1"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_a_type_is_known_by_its_own_name_and_by_torchs(spelled: str, row: str) -> None:
    assert named(spelled) is BY_NAME[row]


@pytest.mark.parametrize("spelled", ["", "float64", "torch", "torch.torch.int8", "float4_e2m1fn"])
def test_other_names_have_no_row(spelled: str) -> None:
    assert named(spelled) is None
