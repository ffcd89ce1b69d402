# SPDX-License-Identifier: Apache-2.0
"""Between row-major (ND) and FRACTAL_NZ arrays, bit for bit.

In FRACTAL_NZ the last axis is cut into columns of 32 bytes, ``c0 = 32 // itemsize`` elements
(packed float4: 64), and a column's rows lie one after the other.  Rows are not padded to 16, as a
FRACTAL_NZ tensor on the device is.  Arrays are numpy arrays, torch CPU tensors or anything the
operators take; a result is a torch tensor for a torch argument and a numpy array otherwise.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcore._core import adopt
from kvcore._core.arrays import ArrayInfo, read
from kvcore._core.lanes import NZ_BYTES, Level, make_lane
from kvcore._core.overlap import check_self
from kvcore._core.paged import RangeSpec
from kvcore._core.plan import Operator, Spec
from kvcore.errors import fail, shown
from kvcore.strides import join, moving_strides

__all__ = ["nd_to_nz", "nz_to_nd", "paged_nd_to_nz", "paged_nz_to_nd"]

Array = Any
Shape = tuple[int, ...]


class Side(NamedTuple):
    """One side of a conversion: byte steps of its loops.  Of an axis of one a step is 0.

    lead: of the axes in front; head, item: of ND's last two axes, or head, column of NZ's; cell:
    within a column, 0 for ND.
    """

    lead: Shape
    row: int
    head: int
    item: int
    cell: int = 0


def nd_to_nz(x: Array, out: Array = None) -> Array:
    """[..., rows, C] to [..., C // c0, rows, c0].

    out: written in place and returned when given; same dtype, no byte shared with x.
    Raises ParamInvalidError when C is no multiple of c0.

    >>> import numpy as np
    >>> from kvcore import layout
    >>> x = np.arange(96, dtype=np.float16).reshape(3, 32)  # c0 = 32 bytes / 2 = 16
    >>> nz = layout.nd_to_nz(x)
    >>> nz.shape, bool((nz[1, 2] == x[2, 16:]).all())  # column 1 of row 2
    ((2, 3, 16), True)
    """
    info = _open(x, "x", 2, "[..., rows, C]")
    *lead, rows, width = info.shape
    c0 = _c0(info)
    if width % c0:
        fail("x", f"a last axis that is a multiple of {c0} (32 bytes)", width)
    result = _result(x, info, out, (*lead, width // c0, rows, c0))
    _LAYOUT.call((x, result), (info.shape, True), None, "cpu")
    return result


def nz_to_nd(x: Array, out: Array = None) -> Array:
    """[..., C // c0, rows, c0] to [..., rows, C]; the inverse of nd_to_nz.

    >>> import numpy as np
    >>> from kvcore import layout
    >>> x = np.arange(96, dtype=np.int8).reshape(1, 3, 32)  # c0 = 32 bytes / 1 = 32
    >>> layout.nz_to_nd(x).shape, bool((layout.nd_to_nz(layout.nz_to_nd(x)) == x).all())
    ((3, 32), True)
    """
    info = _open(x, "x", 3, "[..., C // c0, rows, c0]")
    *lead, columns, rows, cell = info.shape
    if cell != _c0(info):
        fail("x", f"a last axis of {_c0(info)} (32 bytes)", cell)
    result = _result(x, info, out, (*lead, rows, columns * cell))
    _LAYOUT.call((x, result), (info.shape, False), None, "cpu")
    return result


def paged_nd_to_nz(cache: Array, five: bool = False, out: Array = None) -> Array:
    """A cache [nb, bs, H, D] to [nb, H*D // c0, bs, c0], or with ``five`` to
    [nb, H, D // c0, bs, c0].

    Raises ParamInvalidError when H*D (with ``five``: D) is no multiple of c0.

    >>> import numpy as np
    >>> from kvcore import layout
    >>> cache = np.zeros((4, 128, 8, 64), np.float16)  # c0 = 16: 8 * 64 / 16 = 32, 64 / 16 = 4
    >>> layout.paged_nd_to_nz(cache).shape, layout.paged_nd_to_nz(cache, five=True).shape
    ((4, 32, 128, 16), (4, 8, 4, 128, 16))
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
        shape: Shape = (blocks, heads, size // c0, block_size, c0)
    else:
        shape = (blocks, heads * size // c0, block_size, c0)
    result = _result(cache, info, out, shape)
    if size % c0 == 0 or _heads_follow(info.shape, info.strides):
        _PAGED.call((cache, result), (info.shape, heads, True, False), None, "cpu")
    else:  # columns that span heads which lie apart
        packed = np.empty(info.shape, f"u{info.itemsize}")
        _COPY.call((cache, packed), (info.shape,), None, "cpu")
        _PAGED.call((packed, result), (info.shape, heads, True, True), None, "cpu")
    return result


def paged_nz_to_nd(cache: Array, num_heads: int | None = None, out: Array = None) -> Array:
    """A PA_NZ cache back to [nb, bs, H, D]; num_heads is required for the 4-D form.

    >>> import numpy as np
    >>> from kvcore import layout
    >>> cache = np.zeros((4, 32, 128, 16), np.float16)  # 32 * 16 = 8 heads of 64
    >>> layout.paged_nz_to_nd(cache, num_heads=8).shape
    (4, 128, 8, 64)
    """
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
    shape = (blocks, block_size, heads, size)
    result = _result(cache, info, out, shape)
    into = read(result, "out")
    if size % c0 == 0 or _heads_follow(shape, into.strides):
        _PAGED.call((cache, result), (info.shape, heads, False, False), None, "cpu")
    else:
        packed = np.empty(shape, f"u{info.itemsize}")
        _PAGED.call((cache, packed), (info.shape, heads, False, True), None, "cpu")
        _COPY.call((packed, result), (shape,), None, "cpu")
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


def _result(x: Array, info: ArrayInfo, out: Array, shape: Shape) -> Array:
    """``out``, which the operator checks, or a new array."""
    if out is not None:
        _check_out(read(out, "out"), info, shape)
        return out
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return torch.empty(shape, dtype=x.dtype)
    kind = getattr(x, "dtype", None)
    if isinstance(kind, np.dtype):
        return np.empty(shape, kind)
    assert info.dtype is not None
    return np.empty(shape, adopt.numpy_dtype(info.dtype) or info.dtype.raw)


def _check_out(out: ArrayInfo, info: ArrayInfo, shape: Shape, *, as_bits: bool = False) -> None:
    if out.shape != shape:
        fail("out", f"shape {list(shape)}", list(out.shape))
    if out.itemsize != info.itemsize or (out.dtype is not info.dtype and not as_bits):
        fail("out", f"dtype {info.dtype_name}", out.dtype_name)
    if out.read_only:
        fail("out", "a writable array", "a read-only one")
    if out.on_device:
        fail("out", "an array on the host", "a device tensor")
    check_self(out)


def _heads_follow(shape: Shape, strides: Shape) -> bool:
    """Whether the last two axes are one: a head's items end where the next head's begin."""
    *_, heads, size = shape
    return heads <= 1 or size <= 1 or strides[-2] == size * strides[-1]


# A conversion's resolver sees the arrays anew. Between the public function's look at them and this
# one any code may have run, so shapes are compared with those that its checks were about.


def _seen(info: ArrayInfo, shape: Shape) -> ArrayInfo:
    if info.shape != shape:
        fail(info.name, f"shape {list(shape)} to its end", list(info.shape))
    return info


def _resolve(infos: tuple[ArrayInfo, ...], params: tuple[Any, ...], soc: object) -> Spec:
    """x [..., rows, C] and [..., C // c0, rows, c0], one into the other."""
    shape, to_nz = params
    info, out = _seen(infos[0], shape), infos[1]
    c0 = _c0(info)
    if to_nz:
        *lead, rows, width = shape
        _check_out(out, info, (*lead, width // c0, rows, c0))
        nd, nz = moving_strides(info.shape, info.strides), moving_strides(out.shape, out.strides)
    else:
        *lead, columns, rows, _ = shape
        width = columns * c0
        _check_out(out, info, (*lead, rows, width))
        nd, nz = moving_strides(out.shape, out.strides), moving_strides(info.shape, info.strides)
    return _between(
        tuple(lead),
        rows,
        1,
        width,
        Side(nd[:-2], nd[-2], 0, nd[-1]),
        Side(nz[:-3], nz[-2], 0, nz[-3], nz[-1]),
        info.itemsize,
        to_nz=to_nz,
    )


def _resolve_paged(infos: tuple[ArrayInfo, ...], params: tuple[Any, ...], soc: object) -> Spec:
    """[nb, bs, H, D] and PA_NZ, one into the other."""
    shape, heads, to_nz, as_bits = params
    info, out = _seen(infos[0], shape), infos[1]
    c0 = _c0(info)
    nd, nz = (info, out) if to_nz else (out, info)
    five = len(nz.shape) == 5
    if to_nz:
        blocks, rows, _, size = shape
        columns = (heads, size // c0) if five else (heads * size // c0,)
        wanted: Shape = (blocks, *columns, rows, c0)
    else:
        blocks, rows = shape[0], shape[-2]
        size = shape[2] * c0 if five else shape[1] * c0 // heads
        wanted = (blocks, rows, heads, size)
    _check_out(out, info, wanted, as_bits=as_bits)
    nd_step, nz_step = moving_strides(nd.shape, nd.strides), moving_strides(nz.shape, nz.strides)
    head, item = nd_step[2], nd_step[3]
    if size % c0:  # columns span heads, which follow each other
        if not _heads_follow(nd.shape, nd.strides):
            fail(nd.name, "heads that follow each other to its end", list(nd.strides))
        item = item if size > 1 else head
        heads, head, size = 1, 0, heads * size
    column = nz_step[-3]
    between = nz_step[1] if five else size // c0 * column
    return _between(
        (blocks,),
        rows,
        heads,
        size,
        Side(nd_step[:1], nd_step[1], head, item),
        Side(nz_step[:1], nz_step[-2], between, column, nz_step[-1]),
        info.itemsize,
        to_nz=to_nz,
    )


def _between(
    lead: Shape, rows: int, heads: int, size: int, nd: Side, nz: Side, item_bytes: int, *,
    to_nz: bool,
) -> Spec:  # fmt: skip
    """lead axes of [rows, H, D] and of [H, D // c0, rows, c0], one into the other."""
    c0 = NZ_BYTES // item_bytes
    levels = [
        (heads, nd.head, nz.head),
        (size // c0, c0 * nd.item, nz.item),
        (c0, nd.item, nz.cell),
    ]
    return _moved(lead, rows, nd, nz, levels, item_bytes, forth=to_nz, nz=True)


def _moved(
    lead: Shape, rows: int, linear: Side, paged: Side, levels: Sequence[Level], item_bytes: int, *,
    forth: bool, nz: bool,
) -> Spec:  # fmt: skip
    """Rows from the linear side to the paged one, or back; argument 0 is read, 1 written."""
    outer = join(zip(lead, linear.lead, paged.lead, strict=True))
    blocks, tok_outer, block_stride = outer[-1] if outer else (1, 0, 0)
    tok, page = (0, 1) if forth else (1, 0)
    lane = make_lane(
        tok,
        page,
        tok_inner=max(rows, 1),
        tok_outer_stride=tok_outer,
        tok_stride=linear.row,
        block_stride=block_stride,
        row_stride=paged.row,
        levels=levels,
        item_bytes=item_bytes,
        nz=nz,
    )
    return RangeSpec((1,), [lane], blocks * rows, max(rows, 1), not forth, outer[:-1])


def _resolve_copy(infos: tuple[ArrayInfo, ...], params: tuple[Any, ...], soc: object) -> Spec:
    """[nb, bs, H, D] of any strides to another of any strides, as bits."""
    (shape,) = params
    source, out = _seen(infos[0], shape), infos[1]
    _check_out(out, source, shape, as_bits=True)
    here = moving_strides(shape, source.strides)
    there = moving_strides(shape, out.strides)
    levels = [(n, a, b) for n, a, b in zip(shape[2:], here[2:], there[2:], strict=True)]
    return _moved(
        shape[:1],
        shape[1],
        Side(here[:1], here[1], 0, 0),
        Side(there[:1], there[1], 0, 0),
        levels,
        source.itemsize,
        forth=True,
        nz=False,
    )


_LAYOUT = Operator("layout", ("x", "out"), _resolve)
_PAGED = Operator("layout", ("cache", "out"), _resolve_paged)
_COPY = Operator("layout", ("cache", "out"), _resolve_copy)
