# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a full cache lie: one lane of one layer as addresses and strides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcore._core import arrays
from kvcore.errors import ParamInvalidError, fail
from kvcore.offload.checks import check_integer
from kvcore.strides import meant_strides

__all__ = ["FullLane", "read_full"]

Lane = TypeVar("Lane", bound="FullLane")


class FullLane:
    """A lane ``[blocks, block_size, size]``, or ``[tokens, size]`` (flat: one block).

    owner: what the caller passed; given: what it was then.  Row r of the lane is row
    r % block_size of block r // block_size.
    """

    __slots__ = (
        "address", "block_size", "block_stride", "flat", "given", "num_blocks", "owner",
        "read_only", "row_bytes", "row_stride",
    )  # fmt: skip

    def __init__(self, name: str, full: Any) -> None:
        self.given: arrays.HeldArray = arrays.HeldArray(full, name)
        info = self.given.info
        if len(info.shape) not in (2, 3) or 0 in info.shape:
            fail(name, "rows [tokens, size] or blocks [blocks, block_size, size]", info.shape)
        strides = meant_strides(info.shape, info.strides, info.itemsize)
        if strides[-1] != info.itemsize or min(strides) < 0:
            fail(name, "a contiguous last axis and no negative stride", info.strides)
        self.owner: Any = full
        self.address: int = info.address
        self.read_only: bool = info.read_only
        self.row_bytes: int = info.shape[-1] * info.itemsize
        self.block_size: int = info.shape[-2]
        self.row_stride: int = strides[-2]
        self.flat: bool = len(info.shape) == 2
        self.num_blocks: int = 1 if self.flat else info.shape[0]
        self.block_stride: int = 0 if self.flat else strides[0]

    @property
    def end(self) -> int:
        """The address behind the last row."""
        return self.address + (
            (self.num_blocks - 1) * self.block_stride
            + (self.block_size - 1) * self.row_stride
            + self.row_bytes
        )

    @property
    def shape(self) -> tuple[int, int, bool]:
        """What the lanes of a cache have in common: blocks, tokens of a block, flat."""
        return self.num_blocks, self.block_size, self.flat

    def starts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Addresses of rows."""
        addresses: NDArray[np.int64] = (
            self.address
            + rows // self.block_size * self.block_stride
            + rows % self.block_size * self.row_stride
        )
        return addresses


def read_full(full: Mapping[int, Sequence[Any]], kind: type[Lane]) -> dict[int, list[Lane]]:
    """The lanes of each layer, all of one block table.  Raises ParamInvalidError."""
    if not isinstance(full, Mapping) or not full:
        fail("full", "the lanes of each layer, by layer id", type(full).__name__)
    layers: dict[int, list[Lane]] = {}
    for number, lanes in full.items():
        check_integer("full", number, 0)
        if isinstance(lanes, np.ndarray) or not isinstance(lanes, Sequence) or not lanes:
            fail(f"full[{number}]", "a sequence of arrays, one a lane", type(lanes).__name__)
        layers[number] = [kind(f"full[{number}]", lane) for lane in lanes]
    first = next(iter(layers.values()))
    for number, read in layers.items():
        seen = [lane.shape for lane in read]
        if set(seen) != {first[0].shape} or len(seen) != len(first):
            raise ParamInvalidError(
                f"full[{number}]: expected {len(first)} lanes of one block table, got {seen}",
                argument="full",
                seen=seen,
            )
    return layers
