# SPDX-License-Identifier: Apache-2.0
"""Which elements of a tensor an operator with indices uses; that is known only when it runs.

A KV cache is one tensor, of which one stream writes some blocks while another reads others: to take
such an operator for one that uses the whole tensor would accuse correct programs.  Torch's own
operators are here; a reference of a torch_npu operator has its own rule (``Special.used``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kvcore.emulator._ranges import runs, spread

__all__ = ["MOST", "Elements", "Used", "indexed", "pages", "pieces", "ranges", "whole"]

#: Runs of one tensor; where there are more it is not said what is touched.
MOST = 1 << 16


class Elements(NamedTuple):
    """Pieces of one tensor that look alike.

    offsets:        where each begins, int64, in elements from the tensor's first.
    sizes, strides: of a piece, in elements.
    """

    offsets: Any
    sizes: Sequence[int]
    strides: Sequence[int]


class Used(NamedTuple):
    """Arguments of an operator of which it uses some elements.

    names:    the arguments.
    elements: called with the operator's arguments as tensors of the host, when the operator runs:
              the pieces of each of these arguments.
    when:     called with the arguments at the call: False for a call that uses all of them.
    """

    names: frozenset[str]
    elements: Callable[..., dict[str, list[Elements]]]
    when: Callable[..., bool] | None = None


def whole(address: int, tensor: Any) -> array[int] | None:
    """All bytes of a tensor, as pairs; None for more runs than MOST."""
    return runs(address, tensor.shape, tensor.stride(), tensor.itemsize, MOST)


def ranges(address: int, tensor: Any, used: Elements) -> array[int] | None:
    """The bytes of some elements; address: where the tensor's first lies."""
    return spread(
        address,
        used.offsets.reshape(-1).to(torch.int64).contiguous().numpy(),
        used.sizes,
        used.strides,
        tensor.itemsize,
        MOST,
    )


def pieces(tensor: Any, offsets: Any, axes: Sequence[int]) -> Elements:
    """Pieces that have these axes of the tensor."""
    sizes, strides = tensor.shape, tensor.stride()
    return Elements(offsets, [sizes[axis] for axis in axes], [strides[axis] for axis in axes])


def pages(cache: Any, axis: int, table: Any, lengths: Sequence[int]) -> list[Elements]:
    """The first tokens of each request in a paged cache [blocks, ...].

    axis: that of a block's tokens.  table: [requests, columns], blocks; what lies outside of the
    cache is left out.  lengths: tokens of each request, from its first block's first on.
    """
    size, count = cache.shape[axis], cache.shape[0]
    stride, step = cache.stride(0), cache.stride(axis)
    full, last = [], []
    for row, length in zip(table, lengths, strict=False):
        blocks = row[: -(-length // size)].to(torch.int64)
        blocks = blocks[(blocks >= 0) & (blocks < count)]
        rest = length % size
        if rest and len(blocks):
            last.append(blocks[-1] * stride + torch.arange(rest) * step)
            blocks = blocks[:-1]
        full.append(blocks)
    axes = range(1, cache.dim())
    found = []
    if full:
        found.append(pieces(cache, torch.unique(torch.cat(full)) * stride, axes))
    if last:
        offsets = torch.unique(torch.cat(last))
        found.append(pieces(cache, offsets, [a for a in axes if a != axis]))
    return found


def _along(tensor: Any, dim: int, index: Any) -> Elements:
    """Slices along one axis."""
    if tensor.dim() == 0:
        return Elements(torch.zeros(1, dtype=torch.int64), [], [])
    axis = dim % tensor.dim()
    rows = torch.unique(index.reshape(-1).to(torch.int64)) % tensor.shape[axis]
    return pieces(tensor, rows * tensor.stride(axis), [a for a in range(tensor.dim()) if a != axis])


def _index(tensor: Any, indices: Any, *_: Any, **__: Any) -> Elements:
    """Advanced indexing: an index for each axis, None for all of it; a mask stands for several."""
    offsets = torch.zeros((), dtype=torch.int64)
    axes: list[int] = []
    axis = 0
    for index in indices:
        if index is None:
            axes.append(axis)
            axis += 1
            continue
        parts = index.nonzero().unbind(1) if index.dtype in _MASKS else (index.to(torch.int64),)
        for part in parts:
            offsets = offsets + part % max(1, tensor.shape[axis]) * tensor.stride(axis)
            axis += 1
    return pieces(tensor, torch.unique(offsets), [*axes, *range(axis, tensor.dim())])


_MASKS = (torch.bool, torch.uint8)


def _rows(tensor: Any, dim: int, index: Any, *_: Any, **__: Any) -> Elements:
    return _along(tensor, dim, index)


def _embedding(weight: Any, index: Any, *_: Any, **__: Any) -> Elements:
    return _along(weight, 0, index)


def _elements(tensor: Any, dim: int, index: Any, *_: Any, **__: Any) -> Elements:
    """One element for each of the index: gather and scatter."""
    if tensor.dim() == 0:
        return Elements(torch.zeros(1, dtype=torch.int64), [], [])
    dim %= tensor.dim()
    offsets = index.to(torch.int64) % max(1, tensor.shape[dim]) * tensor.stride(dim)
    for axis in range(index.dim()):
        if axis == dim:
            continue
        steps = torch.arange(index.shape[axis]) * tensor.stride(axis)
        offsets = offsets + steps.view([-1 if a == axis else 1 for a in range(index.dim())])
    return Elements(torch.unique(offsets), [], [])


def _flat(tensor: Any, index: Any, *_: Any, **__: Any) -> Elements:
    """One element for each of the index, which counts through the whole tensor: take and put."""
    rest = index.reshape(-1).to(torch.int64) % max(1, tensor.numel())
    offsets = torch.zeros_like(rest)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        offsets += rest % size * stride
        rest = rest // size
    return Elements(torch.unique(offsets), [], [])


_INDEXED: dict[str, Callable[..., Elements]] = {
    "index": _index,
    "_unsafe_index": _index,
    "index_put_": _index,
    "_index_put_impl_": _index,
    "index_select": _rows,
    "index_copy_": _rows,
    "index_add_": _rows,
    "index_fill_": _rows,
    "index_reduce_": _rows,
    "embedding": _embedding,
    "_embedding_bag": _embedding,
    "_embedding_bag_forward_only": _embedding,
    "gather": _elements,
    "scatter_": _elements,
    "scatter_add_": _elements,
    "scatter_reduce_": _elements,
    "take": _flat,
    "put_": _flat,
}


def indexed(name: str, arguments: Sequence[str]) -> Used | None:
    """What an overload of torch's uses of its first argument; None: all of it."""
    function = _INDEXED.get(name.removeprefix("aten.").partition(".")[0])
    if function is None:
        return None
    first = arguments[0]

    def elements(*args: Any, **kwargs: Any) -> dict[str, list[Elements]]:
        return {first: [function(*args, **kwargs)]}

    return Used(frozenset((first,)), elements)
