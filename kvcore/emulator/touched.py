# SPDX-License-Identifier: Apache-2.0
"""Which elements of a tensor an operator with indices uses: known when it runs, and only then.

A KV cache is one tensor, of which one stream writes some blocks while another reads others: to take
such an operator for one that uses the whole tensor would accuse correct programs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch

from kvcore.emulator._ranges import runs, spread

__all__ = ["MOST", "Elements", "indexed", "ranges", "whole"]

#: Runs of one tensor; where there are more it is not said what is touched.
MOST = 1 << 16

#: Offsets of the pieces that are used, in elements from the tensor's first, and which axes a piece
#: has.
Elements = tuple[Any, list[int]]


def whole(address: int, tensor: Any) -> array[int] | None:
    """All bytes of a tensor, as pairs; None for more runs than MOST."""
    return runs(address, tensor.shape, tensor.stride(), tensor.itemsize, MOST)


def ranges(address: int, tensor: Any, used: Elements) -> array[int] | None:
    """The bytes of some elements; address: where the tensor's first lies."""
    offsets, axes = used
    sizes, strides = tensor.shape, tensor.stride()
    return spread(
        address,
        offsets.reshape(-1).to(torch.int64).contiguous().numpy(),
        [sizes[axis] for axis in axes],
        [strides[axis] for axis in axes],
        tensor.itemsize,
        MOST,
    )


def _along(tensor: Any, dim: int, index: Any) -> Elements:
    """Slices along one axis."""
    if tensor.dim() == 0:
        return torch.zeros(1, dtype=torch.int64), []
    axis = dim % tensor.dim()
    rows = torch.unique(index.reshape(-1).to(torch.int64)) % tensor.shape[axis]
    return rows * tensor.stride(axis), [a for a in range(tensor.dim()) if a != axis]


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
    return torch.unique(offsets), axes + list(range(axis, tensor.dim()))


_MASKS = (torch.bool, torch.uint8)


def _rows(tensor: Any, dim: int, index: Any, *_: Any, **__: Any) -> Elements:
    return _along(tensor, dim, index)


def _embedding(weight: Any, index: Any, *_: Any, **__: Any) -> Elements:
    return _along(weight, 0, index)


def _elements(tensor: Any, dim: int, index: Any, *_: Any, **__: Any) -> Elements:
    """One element for each of the index: gather and scatter."""
    if tensor.dim() == 0:
        return torch.zeros(1, dtype=torch.int64), []
    dim %= tensor.dim()
    offsets = index.to(torch.int64) % max(1, tensor.shape[dim]) * tensor.stride(dim)
    for axis in range(index.dim()):
        if axis == dim:
            continue
        steps = torch.arange(index.shape[axis]) * tensor.stride(axis)
        offsets = offsets + steps.view([-1 if a == axis else 1 for a in range(index.dim())])
    return torch.unique(offsets), []


_INDEXED: dict[str, Callable[..., Elements]] = {
    "index": _index,
    "_unsafe_index": _index,
    "index_put_": _index,
    "_index_put_impl_": _index,
    "index_select": _rows,
    "index_copy_": _rows,
    "index_add_": _rows,
    "index_fill_": _rows,
    "embedding": _embedding,
    "gather": _elements,
    "scatter_": _elements,
    "scatter_add_": _elements,
    "scatter_reduce_": _elements,
}


def indexed(name: str) -> Callable[..., Elements] | None:
    """For an overload's name, what its first argument's used elements are; None: all of them.

    The function takes the operator's arguments, as tensors of the host.
    """
    return _INDEXED.get(name.removeprefix("aten.").partition(".")[0])
