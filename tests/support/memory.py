# SPDX-License-Identifier: Apache-2.0
"""Arrays inside larger buffers whose other bytes are watched.

An arena holds buffers filled with guard bytes and the arrays placed in them.  After a call the
whole of every buffer is compared: bytes of an output must be what is expected, and every other
byte, guard or input, must be what it was.

    arena = Arena()
    cache = arena.place("key_cache", Layout.plain((4, 8, 16), 2), "u2")
    before = arena.snapshot()
    ...
    arena.assert_written(before, {"key_cache": expected_bits})
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

GUARD = 0xA5
#: Guard bytes on both sides of what a buffer holds.
MARGIN = 48


@dataclass(frozen=True)
class Layout:
    """Where the items of an array lie, in bytes from the start of its extent.

    origin is the place of item [0, 0, ...]: not 0 when a stride is negative.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    origin: int
    extent: int

    @classmethod
    def plain(cls, shape: Sequence[int], itemsize: int) -> Layout:
        """C order, without gaps."""
        return cls.make(shape, itemsize)

    @classmethod
    def make(
        cls,
        shape: Sequence[int],
        itemsize: int,
        *,
        order: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        backwards: Sequence[bool] | None = None,
        repeated: Sequence[bool] | None = None,
    ) -> Layout:
        """Axis by axis, innermost first.

        order:     axes from outermost to innermost in memory.
        steps:     every how many rows of an axis one is used.
        pads:      bytes left free behind each axis.
        backwards: negative stride.
        repeated:  stride zero (inputs only).
        """
        rank = len(shape)
        order = range(rank) if order is None else order
        strides = [0] * rank
        origin, size = 0, itemsize
        for axis in reversed(order):
            if repeated is not None and repeated[axis]:
                continue
            stride = size * (1 if steps is None else steps[axis])
            count = max(shape[axis], 1)
            size = stride * count + (0 if pads is None else pads[axis])
            if backwards is not None and backwards[axis]:
                origin += stride * (count - 1)
                stride = -stride
            strides[axis] = stride
        return cls(tuple(shape), tuple(strides), origin, size)

    def shifted(self, offset: int, extent: int) -> Layout:
        """The same items further into a larger extent."""
        return Layout(self.shape, self.strides, self.origin + offset, extent)


def interleaved(
    shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int], axis: int, pad: int = 0
) -> list[Layout]:
    """Layouts of arrays that share one extent: behind ``axis`` their rows lie side by side.

    The shapes agree up to and including ``axis``; axis -1 means whole arrays side by side.
    pad: bytes left free behind each joint row.
    """
    outer = shapes[0][: axis + 1]
    inner_bytes = [
        int(np.prod(shape[axis + 1 :], dtype=np.int64)) * size
        for shape, size in zip(shapes, itemsizes, strict=True)
    ]
    row = sum(inner_bytes) + pad
    joint = Layout.plain(outer, row)
    offsets = [0, *itertools.accumulate(inner_bytes)]
    return [
        Layout(
            shape,
            joint.strides + Layout.plain(shape[axis + 1 :], size).strides,
            offset,
            joint.extent,
        )
        for shape, size, offset in zip(shapes, itemsizes, offsets, strict=False)
    ]


@dataclass(frozen=True)
class Place:
    """One array in one buffer; offset is that of item [0, 0, ...] in the buffer."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def over(self, buffer: Bytes) -> Array:
        """The array over that buffer's memory, or over a copy of it."""
        return np.ndarray(
            self.shape, self.dtype, buffer=buffer.data, offset=self.offset, strides=self.strides
        )

    def addresses(self) -> NDArray[np.int64]:
        """Byte numbers in the buffer of every item's every byte, shape ``[*shape, itemsize]``."""
        total = np.full((*self.shape, self.dtype.itemsize), self.offset, np.int64)
        for axis, (count, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            steps = np.arange(count, dtype=np.int64) * stride
            total += steps.reshape((-1,) + (1,) * (len(self.shape) - axis))
        return total + np.arange(self.dtype.itemsize)


@dataclass
class Arena:
    """Guarded buffers and the arrays in them, by argument name."""

    buffers: list[Bytes] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)

    def buffer(self, extent: int) -> int:
        """A new buffer that can hold ``extent`` bytes between guards; its number."""
        self.buffers.append(np.full(MARGIN + extent + MARGIN, GUARD, np.uint8))
        return len(self.buffers) - 1

    def place(
        self,
        name: str,
        layout: Layout,
        dtype: DTypeLike,
        *,
        buffer: int | None = None,
        shift: int = 0,
    ) -> Array:
        """Put an array into a buffer (a new one by default) and return it.

        shift: bytes the array lies further behind the guard, as an unaligned view does.
        """
        if buffer is None:
            buffer = self.buffer(layout.extent + shift)
        offset = MARGIN + shift + layout.origin
        place = Place(buffer, offset, layout.shape, layout.strides, np.dtype(dtype))
        self.places[name] = place
        return place.over(self.buffers[buffer])

    def alias(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """A C-ordered array that begins at the first byte of array ``name``."""
        place = self.places[name]
        layout = Layout.plain(shape, np.dtype(dtype).itemsize)
        over = Place(place.buffer, place.offset, shape, layout.strides, np.dtype(dtype))
        return over.over(self.buffers[place.buffer])

    def snapshot(self) -> list[Bytes]:
        """Copies of every buffer."""
        return [buffer.copy() for buffer in self.buffers]

    def assert_written(self, before: Sequence[Bytes], expected: Mapping[str, Array]) -> None:
        """Exactly the expected bits are there, and every other byte is as it was.

        expected: raw bits (unsigned items) by argument name; arrays in no buffer are compared
        by the caller.
        """
        want = [buffer.copy() for buffer in before]
        for name, items in expected.items():
            place = self.places[name]
            array = place.over(want[place.buffer])
            array.view(f"u{place.dtype.itemsize}")[...] = items
        for number, (now, then) in enumerate(zip(self.buffers, want, strict=True)):
            wrong = np.flatnonzero(now != then)
            if wrong.size:
                byte = int(wrong[0])
                raise AssertionError(
                    f"{wrong.size} bytes differ; the first is {self.describe(number, byte)}: "
                    f"expected {then[byte]:#04x}, got {now[byte]:#04x} "
                    f"(before the call {before[number][byte]:#04x})"
                )

    def assert_untouched(self, before: Sequence[Bytes]) -> None:
        """Not one byte changed."""
        self.assert_written(before, {})

    def describe(self, buffer: int, byte: int) -> str:
        """Whose byte that is."""
        for name, place in self.places.items():
            if place.buffer == buffer:
                found = np.argwhere(place.addresses() == byte)
                if len(found):
                    *index, part = found[0].tolist()
                    return f"{name}{index} byte {part}"
        return f"no array's byte {byte - MARGIN} of buffer {buffer}"
