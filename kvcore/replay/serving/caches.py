# SPDX-License-Identifier: Apache-2.0
"""Paged key and value caches, one pair per layer, in the layouts that scatter writes.

The arrays carry raw unsigned items; what type they stand for is named in each call.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore import dtypes
from kvcore.errors import DeviceOutOfMemoryError, fail
from kvcore.offload.checks import check_choice, check_integer
from kvcore.replay.models.profile import ModelShape

__all__ = ["LAYOUTS", "PagedCaches"]

Cache = NDArray[np.unsignedinteger[Any]]

#: Layout name -> the operators' (cache_mode, scatter_mode).
LAYOUTS: dict[str, tuple[str, str]] = {
    "Norm": ("Norm", "None"),
    "NHSD": ("Norm", "NHSD"),
    "PA_NZ": ("PA_NZ", "None"),
}
LANE_BYTES = 32  # of FRACTAL_NZ, whatever the type


class PagedCaches:
    """Zeroed caches of every layer.

    keys[layer], values[layer]: Norm [num_blocks, block_size, num_heads, head_size];
        NHSD [num_blocks, num_heads, block_size, head_size];
        PA_NZ [num_blocks, num_heads * head_size // c0, block_size, c0], c0 items in 32 bytes.
        values[layer] is None when the model has no value lane.
    Raises ParamInvalidError for a layout that cannot hold the shape, DeviceOutOfMemoryError
    for more bytes than the machine has.
    """

    shape: ModelShape
    num_blocks: int
    block_size: int

    def __init__(
        self, shape: ModelShape, num_blocks: int, block_size: int, layout: str = "Norm"
    ) -> None:
        check_integer("num_blocks", num_blocks, 1)
        check_integer("block_size", block_size, 1)
        if not isinstance(shape, ModelShape):
            fail("shape", "a ModelShape", type(shape).__name__)
        check_choice("layout", layout, LAYOUTS)
        self.shape, self.num_blocks, self.block_size = shape, num_blocks, block_size
        self.layout = layout
        item = dtypes.get(shape.dtype).itemsize
        shapes = []
        for argument, size in zip(
            ("head_size", "value_head_size"), shape.stored_head_sizes, strict=True
        ):
            if layout == "PA_NZ" and size * item % LANE_BYTES:
                fail(
                    argument, f"a multiple of {LANE_BYTES} bytes for PA_NZ", f"{size * item} bytes"
                )
            shapes.append(self._lane_shape(size, item))
        self.num_bytes: int = num_blocks * block_size * shape.token_bytes
        self._refuse_more_than_there_is()
        try:
            # Pages of zeros are not touched before they are written.
            self.keys: list[Cache] = [self._zeros(shapes[0]) for _ in range(shape.num_layers)]
            self.values: list[Cache | None] = [
                self._zeros(shapes[1]) if shape.value_head_size else None
                for _ in range(shape.num_layers)
            ]
        except MemoryError as error:
            raise self._too_large() from error

    def _lane_shape(self, size: int, item: int) -> tuple[int, ...]:
        heads, rows = self.shape.num_heads, self.block_size
        if self.layout == "Norm":
            return self.num_blocks, rows, heads, size
        if self.layout == "NHSD":
            return self.num_blocks, heads, rows, size
        lane = LANE_BYTES // item
        return self.num_blocks, heads * size // lane, rows, lane

    def _zeros(self, shape: tuple[int, ...]) -> Cache:
        return np.zeros(shape, self.shape.raw)

    def _refuse_more_than_there_is(self) -> None:
        if self.num_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise self._too_large()

    def _too_large(self) -> DeviceOutOfMemoryError:
        return DeviceOutOfMemoryError(
            f"num_blocks: expected caches that fit the machine's memory, got {self.num_blocks}"
            f" blocks of {self.num_bytes // self.num_blocks} bytes: {self.num_bytes} bytes",
            argument="num_blocks",
            seen=self.num_blocks,
        )

    def copy_block(self, source: int, target: int) -> int:
        """Copy a whole block in every layer; returns the bytes copied."""
        for cache in (*self.keys, *self.values):
            if cache is not None:
                cache[target] = cache[source]
        return self.block_size * self.shape.token_bytes

    def read_row(self, layer: int, lane: int, block: int, row: int) -> bytes:
        """One token's bytes in a lane (0 key, 1 value), by the layout's definition alone."""
        cache = self.keys[layer] if lane == 0 else self.values[layer]
        assert cache is not None
        # Axis 1 is the block's rows in Norm; heads, or columns of 32 bytes, in the others.
        found = cache[block, row] if self.layout == "Norm" else cache[block, :, row]
        return found.tobytes()
