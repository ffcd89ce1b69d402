# SPDX-License-Identifier: Apache-2.0
"""The arenas notice every byte."""

from __future__ import annotations

import numpy as np
import pytest

from memory import GUARD, MARGIN, Arena, Layout, interleaved
from oracle_rules import addresses, folds, share_bytes


def two_halves() -> Arena:
    arena = Arena()
    layouts = interleaved(((3, 2, 4), (3, 5)), (2, 2), 0, pad=2)
    number = arena.buffer(layouts[0].extent)
    for name, layout in zip("kv", layouts, strict=True):
        arena.place(name, layout, "u2", buffer=number)[...] = 7
    return arena


def test_interleaved_halves_share_no_byte_and_leave_the_padding() -> None:
    arena = two_halves()
    k, v = (arena.places[n].over(arena.buffers[0]) for n in "kv")
    assert not share_bytes(k, v)
    assert not folds(k)
    assert k.strides == (28, 8, 2)
    assert v.strides == (28, 2)
    body = arena.buffers[0][MARGIN:-MARGIN].reshape(3, 28)
    assert (body[:, 26:] == GUARD).all()
    assert (body[:, :26].view("u2") == 7).all()


@pytest.mark.parametrize(
    ("byte", "whose"),
    [
        (MARGIN - 1, r"no array's byte -1 of buffer 0"),
        (MARGIN + 26, r"no array's byte 26 of buffer 0"),
        (MARGIN, r"k\[0, 0, 0\] byte 0"),
        (MARGIN + 28 + 16 + 3, r"v\[1, 1\] byte 1"),
    ],
)
def test_any_stray_byte_is_seen_and_named(byte: int, whose: str) -> None:
    arena = two_halves()
    before = arena.snapshot()
    arena.assert_untouched(before)
    arena.buffers[0][byte] ^= 1
    with pytest.raises(AssertionError, match=rf"^1 bytes differ; the first is {whose}: "):
        arena.assert_untouched(before)


def test_a_missing_write_is_seen() -> None:
    arena = two_halves()
    before = arena.snapshot()
    with pytest.raises(AssertionError, match=r"v\[0, 0\] byte 0: expected 0x08, got 0x07"):
        arena.assert_written(before, {"v": np.full((3, 5), 8, np.uint16)})


def test_layouts_lie_where_numpy_puts_the_same_views() -> None:
    parent = np.zeros((4, 6, 8), np.uint32)
    view = parent[::-1, ::2, :5]
    layout = Layout.make(
        (4, 3, 5), 4, steps=(1, 2, 1), pads=(0, 0, 12), backwards=(True, False, False)
    )
    assert layout.strides == view.strides
    assert layout.origin == view.__array_interface__["data"][0] - parent.ctypes.data
    assert layout.extent == parent.nbytes
    arena = Arena()
    array = arena.place("x", layout, "u4")
    here = addresses(array) - arena.buffers[0].ctypes.data - MARGIN
    np.testing.assert_array_equal(here, addresses(view) - parent.ctypes.data)
    np.testing.assert_array_equal(arena.places["x"].addresses().reshape(-1) - MARGIN, here)
