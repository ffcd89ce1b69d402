# SPDX-License-Identifier: Apache-2.0
"""assert_kv_equal: what its message says of the first difference, and its map."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.layout import paged_nd_to_nz
from kvcore.testing import LAYOUTS, assert_kv_equal

NB, BS, H, D = 6, 8, 2, 32


def cache(dtype: Any = np.float16) -> Any:
    rng = np.random.default_rng(3)
    return rng.integers(1, 100, (NB, BS, H, D)).astype(dtype)


def in_layout(nd: Any, layout: str, rank: int) -> Any:
    if layout == "Norm":
        return nd if rank == 4 else nd.reshape(NB, BS, H * D)
    if layout == "NHSD":
        return np.ascontiguousarray(nd.transpose(0, 2, 1, 3))
    return paged_nd_to_nz(nd, five=rank == 5)


FORMS = [(layout, rank) for layout, ranks in LAYOUTS.items() for rank in ranks]


def failure(seen: Any, want: Any, *args: Any, **keywords: Any) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        assert_kv_equal(seen, want, *args, **keywords)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("layout", "rank"), FORMS)
@pytest.mark.parametrize("dtype", [np.float16, np.int8, ml_dtypes.bfloat16, np.float32])
@given(st.integers(0, NB * BS - 1), st.integers(0, H - 1), st.integers(0, D - 1))
def test_the_first_difference_is_named(
    layout: str, rank: int, dtype: Any, slot: int, head: int, element: int
) -> None:
    want = cache(dtype)
    seen = want.copy()
    block, row = divmod(slot, BS)
    seen[block, row, head, element] += 1
    lines = failure(
        in_layout(seen, layout, rank), in_layout(want, layout, rank), layout, num_heads=H
    )
    places = f"block {block}, row {row}, head {head}, element {element}"
    if (layout, rank) == ("Norm", 3):
        places = f"block {block}, row {row}, element {head * D + element}"
    before, after = want[block, row, head, element], seen[block, row, head, element]
    assert lines[1].startswith(
        f"first difference: {places} (slot {slot}): expected {before.item()} ("
    )
    assert f", got {after.item()} (0x" in lines[1]
    assert f"wrong slots: {slot}" in lines
    assert lines[0].startswith(
        f"cache differs from what is expected in 1 of {NB * BS} slots ({layout}"
    )
    (drawn,) = (line for line in lines if line.strip().startswith("block "))
    assert drawn == f"  block {block} |{'.' * row}#{'.' * (BS - row - 1)}|"


def test_a_four_axis_nz_cache_without_heads() -> None:
    want = cache()
    seen = want.copy()
    seen[2, 5, 1, 7] = 0
    lines = failure(paged_nd_to_nz(seen), paged_nd_to_nz(want), "PA_NZ")
    assert lines[1].startswith(f"first difference: block 2, row 5, element {D + 7} (slot 21): ")


def test_the_whole_message() -> None:
    want = np.arange(NB * BS * H * D, dtype=np.float32).reshape(NB, BS, H, D)
    seen = want.copy()
    seen[1, 3] = want[1, 4]
    seen[4, 6:] = 0
    seen[4, 0, 1, 2] = np.nan
    with pytest.raises(AssertionError) as caught:
        assert_kv_equal(seen, want, name="key_cache")
    assert str(caught.value) == (
        "key_cache differs from what is expected in 4 of 48 slots "
        "(Norm, float32 [6, 8, 2, 32])\n"
        "first difference: block 1, row 3, head 0, element 0 (slot 11): "
        "expected 704.0 (0x44300000), got 768.0 (0x44400000)\n"
        "it holds what slot 12 should hold\n"
        "wrong slots: 11, 32, 38, 39\n"
        "blocks with wrong slots (a character is a row; . right, x some wrong, # all wrong):\n"
        "  block 1 |...#....|\n"
        "  block 4 |#.....##|"
    )


def test_a_large_cache_has_a_small_map() -> None:
    want = np.zeros((40, 200, 1, 4), np.int8)
    seen = want.copy()
    seen[::3, :5] = 1
    seen[9] = 2
    lines = failure(seen, want)
    assert "a character is 4 rows" in lines[3]
    assert lines[4] == f"  block  0 |#x{'.' * 48}|"
    assert lines[7] == f"  block  9 |{'#' * 50}|"
    assert lines[-1] == "  ... and 6 more blocks"
    assert re.search(r"wrong slots: 0, 1, 2, 3, 4, 600, .*, \.\.\. \(\d+ more\)$", lines[2])


def test_equal_to_the_bit() -> None:
    want = cache(np.float32)
    want[0, 0, 0, 0] = np.nan
    assert_kv_equal(want, want.copy())
    assert_kv_equal(want[::2, ::2], want.copy()[::2, ::2])
    assert_kv_equal(np.zeros((0, 8, 2, 4)), np.zeros((0, 8, 2, 4)))
    zero = np.zeros((1, 1, 1, 1), np.float16)
    assert "expected -0.0 (0x8000), got 0.0 (0x0000)" in failure(zero, -zero)[1]
    raw = np.zeros((1, 1, 1, 1), np.uint16)
    assert "expected 0x8000, got 0x0000" in failure(raw, (-zero).view(np.uint16))[1]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            np.zeros((NB, BS, H, D), np.float32),
            "cache: expected float32 [6, 8, 2, 32], got float16",
        ),
        (np.zeros((NB, BS, H, 8), np.float16), "cache: expected float16 [6, 8, 2, 8], got float16"),
    ],
)
def test_shapes_and_dtypes_are_compared(other: Any, message: str) -> None:
    assert failure(cache(), other)[0].startswith(message)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((cache(), cache(), "ND"), {}, "layout: expected one of 'Norm', 'NHSD', 'PA_NZ', got 'ND'"),
        ((cache(), cache(), None), {}, "layout: expected one of"),
        ((cache()[0, 0], cache()[0, 0]), {}, "cache: expected axes ['block', 'row', 'head'"),
        ((cache()[0], cache()[0], "NHSD"), {}, "cache: expected axes ['block', 'head', 'row'"),
        (([1], cache()), {}, "cache: expected an array"),
        ((cache(), None), {}, "expected: expected an array"),
    ],
)
def test_what_is_no_cache(arguments: Any, keywords: Any, message: str) -> None:
    with pytest.raises(kvcore.KVCoreError, match="^" + re.escape(message)):
        assert_kv_equal(*arguments, **keywords)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    want = torch.randn(NB, BS, H, D).to(torch.bfloat16)
    assert_kv_equal(want, want.clone())
    seen = want.clone()
    seen[3, 1] = 0
    assert "block 3, row 1, head 0, element 0 (slot 25)" in failure(seen, want)[1]
    assert_kv_equal(np.zeros((1, 2, 1, 4), np.float32), torch.zeros(1, 2, 1, 4))
