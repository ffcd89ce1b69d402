# SPDX-License-Identifier: Apache-2.0
"""Between row-major (ND) and FRACTAL_NZ arrays, bit for bit.

In FRACTAL_NZ the last axis is cut into columns of 32 bytes, ``c0 = 32 // itemsize`` elements
(packed float4: 64), and a column's rows lie one after the other.  Rows are not padded to 16, as a
FRACTAL_NZ tensor on the device is.  Arrays are numpy arrays, torch CPU tensors or anything the
operators take; a result is a torch tensor for a torch argument and a numpy array otherwise.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import numpy as np

from kvcore._core import adopt
from kvcore._core.arrays import ArrayInfo, read
from kvcore._core.lanes import NZ_BYTES, make_lane
from kvcore._core.overlap import check_apart, check_self
from kvcore._core.paged import RangeSpec
from kvcore._core.plan import Operator, Spec
from kvcore.errors import fail, shown

__all__ = ["nd_to_nz", "nz_to_nd", "paged_nd_to_nz", "paged_nz_to_nd"]

Array = Any
ND, NZ = 0, 1


def nd_to_nz(x: Array, out: Array = None) -> Array:
    """[..., rows, C] to [..., C // c0, rows, c0].

    out: written in place and returned when given; same dtype, no byte shared with x.
    Raises ParamInvalidError when C is no multiple of c0.
    """
    info = _open(x, "x", 2, "[..., rows, C]")
    *lead, rows, width = info.shape
    c0 = _c0(info)
    if width % c0:
        fail("x", f"a last axis that is a multiple of {c0} (32 bytes)", width)
    result = _result(x, info, out, (*lead, width // c0, rows, c0))
    nd = adopt.as_raw(x, "x").reshape(*lead, rows, 1, width)
    nz = adopt.as_raw(result, "out").reshape(*lead, 1, width // c0, rows, c0, copy=False)
    _convert(nd, nz, len(lead), to_nz=True)
    return result


def nz_to_nd(x: Array, out: Array = None) -> Array:
    """[..., C // c0, rows, c0] to [..., rows, C]; the inverse of nd_to_nz."""
    info = _open(x, "x", 3, "[..., C // c0, rows, c0]")
    *lead, columns, rows, cell = info.shape
    if cell != _c0(info):
        fail("x", f"a last axis of {_c0(info)} (32 bytes)", cell)
    result = _result(x, info, out, (*lead, rows, columns * cell))
    nz = adopt.as_raw(x, "x").reshape(*lead, 1, columns, rows, cell, copy=False)
    nd = adopt.as_raw(result, "out").reshape(*lead, rows, 1, columns * cell, copy=False)
    _convert(nd, nz, len(lead), to_nz=False)
    return result


def paged_nd_to_nz(cache: Array, five: bool = False, out: Array = None) -> Array:
    """A cache [nb, bs, H, D] to [nb, H*D // c0, bs, c0], or with ``five`` to
    [nb, H, D // c0, bs, c0].

    Raises ParamInvalidError when H*D (with ``five``: D) is no multiple of c0.
    """
    if not isinstance(five, bool):
        fail("five", "True or False", shown(five))
    info = _open(cache, "cache", 4, "[nb, bs, H, D]", 4)
    blocks, block_size, heads, size = info.shape
    c0 = _c0(info)
    if (size if five else heads * size) % c0:
        what = "D" if five else "H*D"
        fail("cache", f"{what} that is a multiple of {c0} (32 bytes)", list(info.shape))
    if five:
        shape: tuple[int, ...] = (blocks, heads, size // c0, block_size, c0)
    else:
        shape = (blocks, heads * size // c0, block_size, c0)
    result = _result(cache, info, out, shape)
    raw, target = adopt.as_raw(cache, "cache"), adopt.as_raw(result, "out")
    if size % c0 == 0:
        nz = target.reshape(blocks, heads, size // c0, block_size, c0, copy=False)
        _convert(raw, nz, 1, to_nz=True)
    else:  # columns that span heads: read through rows of H*D
        nd = raw.reshape(blocks, block_size, 1, heads * size)
        nz = target.reshape(blocks, 1, heads * size // c0, block_size, c0, copy=False)
        _convert(nd, nz, 1, to_nz=True)
    return result


def paged_nz_to_nd(cache: Array, num_heads: int | None = None, out: Array = None) -> Array:
    """A PA_NZ cache back to [nb, bs, H, D]; num_heads is required for the 4-D form."""
    info = _open(cache, "cache", 4, "[nb, H*D // c0, bs, c0] or [nb, H, D // c0, bs, c0]", 5)
    c0 = _c0(info)
    blocks, block_size, cell = info.shape[0], info.shape[-2], info.shape[-1]
    if cell != c0:
        fail("cache", f"a last axis of {c0} (32 bytes)", cell)
    wanted = None if num_heads is None else _heads(num_heads)
    if len(info.shape) == 5:
        heads, size = info.shape[1], info.shape[2] * c0
        if wanted not in (None, heads):
            fail("num_heads", f"{heads} (axis 1 of cache) or None", wanted)
    else:
        if wanted is None:
            fail("num_heads", "an int (a 4-D PA_NZ cache does not state it)", None)
        heads, width = wanted, info.shape[1] * c0
        if width % heads:
            fail("num_heads", f"a divisor of H*D = {width}", heads)
        size = width // heads
    result = _result(cache, info, out, (blocks, block_size, heads, size))
    raw, target = adopt.as_raw(cache, "cache"), adopt.as_raw(result, "out")
    if size % c0 == 0:
        nz = raw.reshape(blocks, heads, size // c0, block_size, c0, copy=False)
        _convert(target, nz, 1, to_nz=False)
    else:
        rows = np.empty((blocks, block_size, 1, heads * size), raw.dtype)
        nz = raw.reshape(blocks, 1, info.shape[1], block_size, c0, copy=False)
        _convert(rows, nz, 1, to_nz=False)
        np.copyto(target, rows.reshape(target.shape))
    return result


def _heads(num_heads: Any) -> int:
    try:
        heads = 0 if isinstance(num_heads, bool) else operator.index(num_heads)
    except Exception:  # an __index__ may raise what it likes
        heads = 0
    if heads < 1:
        fail("num_heads", "an int >= 1", shown(num_heads))
    return heads


def _c0(info: ArrayInfo) -> int:
    return NZ_BYTES // info.itemsize


def _open(x: Array, name: str, least: int, axes: str, most: int = 6) -> ArrayInfo:
    info = read(x, name)
    if info.dtype is None:
        fail(name, "a dtype of the operators (docs/operators.md)", info.dtype_name)
    if not least <= len(info.shape) <= most:
        fail(name, f"shape {axes} of at most {most} axes", list(info.shape))
    if info.on_device:
        fail(name, "an array on the host", "a device tensor")
    return info


def _result(x: Array, info: ArrayInfo, out: Array, shape: tuple[int, ...]) -> Array:
    if out is None:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(x, torch.Tensor):
            return torch.empty(shape, dtype=x.dtype)
        kind = getattr(x, "dtype", None)
        if isinstance(kind, np.dtype):
            return np.empty(shape, kind)
        assert info.dtype is not None
        return np.empty(shape, adopt.numpy_dtype(info.dtype) or info.dtype.raw)
    found = read(out, "out")
    if found.shape != shape:
        fail("out", f"shape {list(shape)}", list(found.shape))
    if found.dtype is not info.dtype:
        fail("out", f"dtype {info.dtype_name}", found.dtype_name)
    if found.read_only:
        fail("out", "a writable array", "a read-only one")
    if found.on_device:
        fail("out", "an array on the host", "a device tensor")
    check_self(found)
    # Here, before anything is written: a conversion may be made of several calls.
    check_apart((found, info), 0, 1)
    return out


def _convert(nd: Any, nz: Any, lead: int, *, to_nz: bool) -> None:
    """nd [lead..., rows, H, D] and nz [lead..., H, D // c0, rows, c0], one into the other."""
    if lead == 0:
        nd, nz = nd[None], nz[None]
    elif lead > 1:
        count = math.prod(nd.shape[:lead])
        try:
            flat = nd.reshape(count, *nd.shape[lead:], copy=False)
            nz = nz.reshape(count, *nz.shape[lead:], copy=False)
        except ValueError:  # strides that one axis cannot express
            for one, other in zip(nd, nz, strict=True):
                _convert(one, other, lead - 1, to_nz=to_nz)
            return
        nd = flat
    # These arrays are on the host, whatever backend calls are sent to.
    _LAYOUT.call((nd, nz), (to_nz,), None, "cpu")


def _resolve(infos: tuple[ArrayInfo, ...], params: tuple[bool], soc: object) -> Spec:
    nd, nz = infos
    blocks, rows, heads, size = nd.shape
    c0 = _c0(nd)
    lane = make_lane(
        ND,
        NZ,
        tok_inner=max(rows, 1),
        tok_outer_stride=nd.strides[0],
        tok_stride=nd.strides[1],
        block_stride=nz.strides[0],
        row_stride=nz.strides[3],
        levels=[
            (heads, nd.strides[2], nz.strides[1]),
            (size // c0, c0 * nd.strides[3], nz.strides[2]),
            (c0, nd.strides[3], nz.strides[4]),
        ],
        item_bytes=nd.itemsize,
        nz=True,
    )
    (to_nz,) = params
    return RangeSpec(
        (NZ if to_nz else ND,), [lane], blocks * rows, max(rows, 1), blocks * rows, None, not to_nz
    )


_LAYOUT = Operator("layout", ("x", "out"), _resolve)
