# SPDX-License-Identifier: Apache-2.0
"""kvcore.layout: ND and FRACTAL_NZ, bit for bit and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import kvcore
import oracle
from kvcore import layout
from memory import Arena, Layout
from refusal import NO_ARRAYS, BadIndex, Index

DTYPES = ["float16", "float32", "int8", "uint8", "int16", "uint16", "int32", "uint32",
          ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn]  # fmt: skip
FUNCTIONS = ["nd_to_nz", "nz_to_nd", "paged_nd_to_nz", "paged_nz_to_nd"]


def filled(shape: tuple[int, ...], dtype: Any = np.uint16) -> np.ndarray:
    kind = np.dtype(dtype)
    raw = np.random.default_rng(math.prod(shape)).integers(0, 256, math.prod(shape) * kind.itemsize)
    return raw.astype(np.uint8).view(kind).reshape(shape)


def same(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(oracle.bits(a), oracle.bits(b))


def arguments(name: str) -> dict[str, Any]:
    shapes = {
        "nd_to_nz": {"x": (2, 3, 32)},
        "nz_to_nd": {"x": (2, 2, 3, 16)},
        "paged_nd_to_nz": {"cache": (2, 4, 2, 32)},
        "paged_nz_to_nd": {"cache": (2, 4, 4, 16)},
    }
    made: dict[str, Any] = {k: filled(shape) for k, shape in shapes[name].items()}
    return made | ({"num_heads": 2} if name == "paged_nz_to_nd" else {})


def function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(layout, name)
    return found


# ---------------------------------------------------------------- right


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 2), (2, 1, 2, 3)])
def test_nd_and_nz(lead: tuple[int, ...], dtype: Any) -> None:
    c0 = 32 // np.dtype(dtype).itemsize
    for rows, columns in ((1, 1), (5, 2), (16, 3), (17, 1)):
        x = filled((*lead, rows, columns * c0), dtype)
        nz = layout.nd_to_nz(x)
        same(nz, oracle.nd_to_nz(x))
        if len(lead) < 4:
            same(layout.nz_to_nd(nz), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("five", [False, True])
def test_paged(five: bool, dtype: Any) -> None:
    c0 = 32 // np.dtype(dtype).itemsize
    for shape in ((1, 1, 1, c0), (3, 4, 2, 2 * c0), (2, 5, 3, c0)):
        cache = filled(shape, dtype)
        nz = layout.paged_nd_to_nz(cache, five)
        same(nz, oracle.paged_nd_to_nz(cache, five))
        same(layout.paged_nz_to_nd(nz, None if five else shape[2]), cache)
        same(layout.paged_nz_to_nd(nz, shape[2]), cache)


def test_columns_that_span_heads() -> None:
    # H*D is whole columns, D is not.
    for heads, size in ((2, 8), (4, 12), (16, 3)):
        cache = filled((3, 5, heads, size))
        nz = layout.paged_nd_to_nz(cache)
        flat = cache.reshape(3, 5, heads * size)
        same(nz, np.ascontiguousarray(flat.reshape(3, 5, -1, 16).transpose(0, 2, 1, 3)))
        same(layout.paged_nz_to_nd(nz, heads), cache)
        out = np.zeros((3, 5, heads, 2 * size), np.uint16)[..., ::2]
        assert layout.paged_nz_to_nd(nz, heads, out) is out
        same(np.ascontiguousarray(out), cache)


@given(
    name=st.sampled_from(FUNCTIONS),
    flips=st.lists(st.booleans(), min_size=5, max_size=5),
    order=st.permutations(range(4)),
    data=st.data(),
)
def test_strides_and_guards(
    name: str, flips: list[bool], order: list[int], data: st.DataObject
) -> None:
    arena = Arena()
    given = arguments(name)
    key = "x" if "x" in given else "cache"
    source = given[key]
    wanted = function(name)(**given)

    def strided(argument: str, like: np.ndarray) -> np.ndarray:
        rank = like.ndim
        steps = data.draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
        axes = [axis for axis in order if axis < rank] + list(range(4, rank))
        made = Layout.make(
            like.shape, 2, order=axes, steps=steps, backwards=flips[:rank], pads=steps
        )
        return arena.place(argument, made, like.dtype)

    x, out = strided(key, source), strided("out", wanted)
    x[...] = source
    before = arena.snapshot()
    assert function(name)(**given | {key: x}, out=out) is out
    arena.assert_written(before, {"out": wanted})


def test_leading_axes_that_no_single_axis_can_express() -> None:
    base = filled((4, 5, 3, 32))
    x = base[::2, 1:4]
    out = np.zeros((2, 6, 2, 3, 16), np.uint16)[:, ::2]
    assert layout.nd_to_nz(x, out) is out
    same(np.ascontiguousarray(out), oracle.nd_to_nz(np.ascontiguousarray(x)))
    back = np.zeros((2, 6, 3, 32), np.uint16)[:, ::2]
    layout.nz_to_nd(out, back)
    same(np.ascontiguousarray(back), np.ascontiguousarray(x))


@pytest.mark.parametrize(
    "shape", [(0, 32), (3, 0), (0, 0), (0, 3, 32), (2, 0, 32), (2, 3, 0), (2, 0, 4, 32)]
)
def test_nothing_to_convert(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.uint16)
    nz = layout.nd_to_nz(x)
    assert nz.shape == (*shape[:-2], shape[-1] // 16, shape[-2], 16)
    assert layout.nz_to_nd(nz).shape == shape
    assert layout.nz_to_nd(nz, np.zeros(shape, np.uint16)).shape == shape


NO_CACHES = [
    *((0, 4, 2, 16), (3, 0, 2, 16), (3, 4, 0, 16), (3, 4, 2, 0)),
    *((3, 4, 2, 8), (0, 4, 2, 8), (3, 0, 2, 8)),
]


@pytest.mark.parametrize("shape", NO_CACHES)
@pytest.mark.parametrize("five", [False, True])
def test_no_cache_to_convert(shape: tuple[int, ...], five: bool) -> None:
    cache = filled(shape)
    if five and shape[3] == 8:
        with pytest.raises(kvcore.ParamInvalidError, match="D that is a multiple of 16"):
            layout.paged_nd_to_nz(cache, five)
        return
    nz = layout.paged_nd_to_nz(cache, five)
    if five or shape[2]:
        same(layout.paged_nz_to_nd(nz, shape[2] or None), cache)


def test_float4_is_packed() -> None:
    packed = filled((4, 32), np.uint8)  # 64 elements in 32 bytes
    assert layout.nd_to_nz(packed).shape == (1, 4, 32)


def test_kinds_of_arrays() -> None:
    x = filled((3, 32))
    want = oracle.nd_to_nz(x)
    same(layout.nd_to_nz(memoryview(x)), want)
    frozen = x.copy()
    frozen.flags.writeable = False
    same(layout.nd_to_nz(frozen), want)
    assert layout.nd_to_nz(frozen).flags.writeable
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(x.view(np.int16))
    made = layout.nd_to_nz(tensor)
    assert isinstance(made, torch.Tensor)
    assert made.dtype == tensor.dtype
    same(made.numpy().view(np.uint16), want)
    assert torch.equal(layout.nz_to_nd(made), tensor)
    half = tensor.view(torch.bfloat16)
    out = torch.zeros((2, 3, 16), dtype=torch.bfloat16)
    assert layout.nd_to_nz(half, out) is out
    assert torch.equal(out.view(torch.int16), made)
    with pytest.raises(kvcore.ParamInvalidError, match="detach"):
        layout.nd_to_nz(half.clone().requires_grad_())


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("thing", [None, *NO_ARRAYS], ids=lambda thing: type(thing).__name__)
def test_no_array(name: str, thing: Any) -> None:
    given = arguments(name)
    key = next(iter(given))
    error = kvcore.ParamNullError if thing is None else kvcore.ParamInvalidError
    with pytest.raises(error, match=rf"^{key}: expected") as caught:
        function(name)(**given | {key: thing})
    assert caught.value.argument == key
    if thing is not None:
        with pytest.raises(kvcore.ParamInvalidError, match=r"^out: expected") as caught:
            function(name)(**given, out=thing)
        assert caught.value.argument == "out"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float64", "bool", "O", "V2", ">u2", "S4"])
def test_dtypes(name: str, dtype: str) -> None:
    given = arguments(name)
    key = next(iter(given))
    with pytest.raises(kvcore.ParamInvalidError, match=rf"^{key}: expected .*(dtype|byte order)"):
        function(name)(**given | {key: np.zeros(given[key].shape, dtype)})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ranks(name: str) -> None:
    given = arguments(name)
    key = next(iter(given))
    own = given[key]
    for bad in (
        own[(0,) * (own.ndim - 1)],
        np.zeros((), own.dtype),
        own.reshape((1,) * 5 + own.shape),
    ):
        with pytest.raises(kvcore.ParamInvalidError, match=rf"^{key}: expected") as caught:
            function(name)(**given | {key: bad})
        assert caught.value.argument == key


def test_sizes_that_are_no_whole_columns() -> None:
    for width in (1, 15, 17, 31):
        with pytest.raises(
            kvcore.ParamInvalidError, match=rf"^x: .* multiple of 16 .* got {width}$"
        ):
            layout.nd_to_nz(np.zeros((2, width), np.uint16))
        with pytest.raises(kvcore.ParamInvalidError, match=r"^x: expected a last axis of 16"):
            layout.nz_to_nd(np.zeros((2, 2, width), np.uint16))
        with pytest.raises(kvcore.ParamInvalidError, match=r"^cache: .*multiple of 16"):
            layout.paged_nd_to_nz(np.zeros((2, 2, 1, width), np.uint16))
        with pytest.raises(kvcore.ParamInvalidError, match=r"^cache: expected a last axis of 16"):
            layout.paged_nz_to_nd(np.zeros((2, 2, 2, width), np.uint16), 1)


@pytest.mark.parametrize(
    "heads", [0, -1, True, False, 2.0, "2", [2], BadIndex(), np.arange(2), 3, 5, 2**70]
)
def test_num_heads(heads: Any) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^num_heads: expected") as caught:
        layout.paged_nz_to_nd(filled((2, 4, 4, 16)), heads)
    assert caught.value.argument == "num_heads"


def test_num_heads_of_either_form() -> None:
    with pytest.raises(kvcore.ParamInvalidError, match="num_heads: expected an int"):
        layout.paged_nz_to_nd(filled((2, 4, 4, 16)))
    five = filled((2, 3, 4, 4, 16))
    assert layout.paged_nz_to_nd(five, Index(3)).shape == (2, 4, 3, 64)
    with pytest.raises(
        kvcore.ParamInvalidError, match=r"num_heads: expected 3 \(axis 1 of cache\)"
    ):
        layout.paged_nz_to_nd(five, 4)


@pytest.mark.parametrize("five", [None, 1, 0, "yes", np.arange(2)])
def test_five(five: Any) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match="five: expected True or False"):
        layout.paged_nd_to_nz(filled((2, 4, 2, 32)), five)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_out(name: str) -> None:
    given = arguments(name)
    right = function(name)(**given)

    def refused(out: np.ndarray, match: str) -> None:
        before = out.tobytes()
        with pytest.raises(kvcore.ParamInvalidError, match=rf"^out: expected .*{match}") as caught:
            function(name)(**given, out=out)
        assert caught.value.argument == "out"
        assert out.tobytes() == before

    for shape in ((*right.shape[:-1], 15), right.shape[1:], (1, *right.shape), right.shape[::-1]):
        if shape != right.shape:
            refused(np.zeros(shape, np.uint16), "shape")
    refused(np.zeros(right.shape, np.int16), "dtype uint16, got int16")
    refused(np.zeros(right.shape, np.uint32), "dtype")
    frozen = np.zeros(right.shape, np.uint16)
    frozen.flags.writeable = False
    refused(frozen, "writable")
    refused(
        as_strided(np.zeros(2, np.uint16), right.shape, (0,) * right.ndim), "bytes of their own"
    )
    # one byte of the argument is enough
    key = next(iter(given))
    size = given[key].nbytes
    memory = np.zeros(2 * size, np.uint8)
    given = given | {key: memory[:size].view(np.uint16).reshape(given[key].shape)}
    for at in (0, size - 1):
        out = memory[at : at + right.nbytes].view(np.uint16).reshape(right.shape)
        refused(out, f"shared with {key}" if key != "x" else "shared with x")


def test_out_that_overlaps_in_its_last_part_only() -> None:
    # Axes that take several calls inside: nothing may be written before all of it was looked at.
    memory = np.zeros(4 * 6 * 3 * 32 * 2, np.uint16)
    x = memory[: 4 * 6 * 96].reshape(4, 6, 3, 32)[:, ::2]
    tail = memory[3 * 6 * 96 : 3 * 6 * 96 + 4 * 6 * 96].reshape(4, 6, 2, 3, 16)[:, ::2]
    memory[...] = 7
    with pytest.raises(kvcore.ParamInvalidError, match=r"out: .* shared with x"):
        layout.nd_to_nz(x, tail)
    assert (memory == 7).all()
