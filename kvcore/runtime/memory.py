# SPDX-License-Identifier: Apache-2.0
"""Memory spaces and buffers.

``device``   memory of the device, counted against the profile's capacity
``host``     pinned host memory: the source or destination of copies
``swapped``  host memory that a kernel on the device can use in place, over the link
*pageable*   any other array: copies only, on a modelled device

A buffer's memory is an ordinary numpy array, so a CPU kernel reads it at full speed; the space
says who may touch it and what touching costs.  Bytes are given back once: by ``free()``, with
the last reference to the buffer, or when its device is left.  Work that was launched holds its
buffers, so it may outlive every other reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from kvcore.errors import ParamInvalidError
from kvcore.runtime._capsule import retype
from kvcore.runtime._storage import BufferCore, Storage
from kvcore.runtime.element_types import REGISTERED, element_type

__all__ = [
    "SPACES",
    "Buffer",
    "Keeper",
    "MemoryInfo",
    "Origin",
    "live_array",
    "stand_in",
]

SPACES = ("device", "host", "swapped")


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of one space: used now, the most ever used, and the limit (None: without limit).

    ``allocations`` and ``frees`` count; they are equal when nothing is held.
    """

    used: int
    peak: int
    capacity: int | None
    allocations: int
    frees: int

    @property
    def free(self) -> int | None:
        """Bytes left, or None without a limit."""
        return None if self.capacity is None else self.capacity - self.used


@dataclass(frozen=True, slots=True)
class Origin:
    """What an allocation was made as: the buffer whose rows a report names.

    name: "" without one.  shape, dtype: as asked for, shape in stored elements.  address: of the
    first byte; row_bytes: of one element of the first dimension.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    space: str
    address: int
    row_bytes: int

    def __str__(self) -> str:
        what = repr(self.name) if self.name else f"a {self.space} buffer"
        return f"{what} {self.shape} {self.dtype}"


class Keeper(Protocol):
    """What a buffer asks of its device."""

    @property
    def check(self) -> Callable[[], None]:
        """Raises StreamError unless the device is open and this is none of its workers."""

    @property
    def check_process(self) -> Callable[[], None]:
        """Raises StreamError in a process that was forked from the device's."""

    def refuse_in_capture(self, what: str) -> None:
        """Raise CaptureError while a graph is captured; ``what``: what was asked for."""

    def host_access(self, buffer: Buffer, array: npt.NDArray[Any], mode: str, name: str) -> None:
        """The host uses these bytes now: "r", "w" or "rw"; name: by which method."""

    def memory_changed(self) -> None:
        """Bytes were taken or given back."""


class Buffer(BufferCore):
    """A piece of a device's memory, or a view of one.

    name:   what reports of races call it and its views; None without one.
    shape:  elements a dimension.
    dtype:  the element type's public name ("bfloat16"); the numpy type may be a raw one.
    space:  "device", "host" or "swapped".

    Slicing and ``view`` share the memory; operators and plans take a buffer where they take an
    array.  Made by ``Device.empty``, ``empty_host`` and ``empty_swapped``.
    """

    def __init__(
        self,
        keeper: Keeper,
        device: Any,
        storage: Storage,
        array: npt.NDArray[Any],
        dtype: str,
        whole: bool,
    ) -> None:
        self._bind(storage)
        self._keeper = keeper
        self.device = device
        self.dtype = dtype
        self._array = array
        self._whole = whole
        self._lent = False

    @property
    def name(self) -> str | None:
        """The name that the memory was given; views have that of the whole."""
        return self.storage.origin.name or None

    @property
    def space(self) -> str:
        """The memory space: "device", "host" or "swapped"."""
        return self.storage.space

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements in each dimension."""
        return self._array.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next, a dimension."""
        return self._array.strides

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._array.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps of a strided view not counted."""
        return int(self._array.nbytes)

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return int(self._array.itemsize)

    @property
    def address(self) -> int:
        """The address of the first element, as the host has it."""
        return int(self._array.ctypes.data)

    @property
    def freed(self) -> bool:
        """True once the memory was given back."""
        return self.storage.freed

    def __len__(self) -> int:
        return len(self._array)

    def __repr__(self) -> str:
        name = f", name={self.name!r}" if self.name else ""
        state = ", freed" if self.freed else ""
        return f"Buffer({self.shape}, {self.dtype!r}, {self.space}{name}{state})"

    def _like(self, array: npt.NDArray[Any], dtype: str) -> Self:
        """A view of the same memory."""
        return type(self)(self._keeper, self.device, self.storage, array, dtype, False)

    def _live(self) -> npt.NDArray[Any]:
        self._keeper.check_process()
        if self.storage.freed:
            raise ParamInvalidError(
                "buffer: expected live memory, got a buffer that was freed",
                argument="buffer",
                seen="freed",
                expected="a live buffer",
            )
        return self._array

    @property
    def __kvcore_array__(self) -> npt.NDArray[Any]:
        """The memory as a numpy array, for planning; not counted as an access."""
        return self._live()

    def __getitem__(self, index: Any) -> Self:
        """A view; numbers, slices, ``...`` and None, nothing that would copy."""
        array = self._live()
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            plain = part is None or part is Ellipsis or isinstance(part, slice)
            number = isinstance(part, int | np.integer) and not isinstance(part, bool)
            if not plain and not number:
                raise ParamInvalidError(
                    "index: expected numbers and slices (a view), "
                    f"got {type(part).__name__} (which would copy)",
                    argument="index",
                    seen=type(part).__name__,
                )
        try:
            # a number in every dimension must still be a view, not a scalar
            found = array[(*parts, Ellipsis)] if Ellipsis not in parts else array[parts]
        except (IndexError, TypeError, ValueError, OverflowError) as error:
            raise ParamInvalidError(
                f"index: expected an index into shape {self.shape}, got {index!r} ({error})",
                argument="index",
                seen=index,
            ) from error
        return self._like(found, self.dtype)

    def __iter__(self) -> Iterator[Self]:
        """Views of the first dimension's elements."""
        if not self._live().ndim:
            raise ParamInvalidError(
                "buffer: expected a buffer with a dimension to go along, got one without",
                argument="buffer",
                seen=self.shape,
            )
        return (self[i] for i in range(len(self)))

    def view(self, shape: int | Sequence[int] | None = None, dtype: str | None = None) -> Self:
        """A view of the memory with another shape and type; the buffer must be contiguous.

        The type is changed first, in the last dimension; then the shape (one -1 is allowed).
        """
        array = self._live()
        name = self.dtype
        if dtype is not None:
            name, numpy_type = element_type(dtype)
            try:
                array = array.view(numpy_type)
            except (ValueError, TypeError) as error:
                raise ParamInvalidError(
                    f"dtype: expected a type that the last dimension of {self!r} can be read as, "
                    f"got {dtype!r} ({error})",
                    argument="dtype",
                    seen=dtype,
                ) from error
        if shape is not None:
            try:
                array = array.reshape(shape, copy=False)
            except (ValueError, TypeError, OverflowError) as error:
                raise ParamInvalidError(
                    f"shape: expected a shape of {array.size} elements of contiguous memory, "
                    f"got {shape!r} for {self!r}",
                    argument="shape",
                    seen=shape,
                ) from error
        return self._like(array, name)

    def free(self) -> None:
        """Give the memory back; for the race check, a write by the host.

        Work already launched keeps the bytes alive until it is done; new work is refused.
        Raises ParamInvalidError for a view and for a buffer freed before.
        """
        self._keeper.check()
        if not self._whole:
            raise ParamInvalidError(
                "buffer: expected the whole buffer, got a view of it; free the buffer it views",
                argument="buffer",
                seen="a view",
            )
        array = self._live()
        self._keeper.refuse_in_capture("free memory")
        self._keeper.host_access(self, array, "w", "free")
        self.storage.release()
        # Plans hold arrays of their own, so a freed buffer must not keep the bytes.  Arrays made
        # through the array interface hold nothing but this buffer: then it must.
        if not self._lent:
            self._array = stand_in(array)
        self._keeper.memory_changed()

    def host(
        self, mode: Literal["r", "w", "rw"] = "r"
    ) -> contextlib.AbstractContextManager[npt.NDArray[Any]]:
        """The memory as a numpy array while the host uses it.

        The race check sees an access at the start and at the end of the block, so both work
        that was not waited for and work launched inside the block are found.  Waits for
        nothing.  "r" gives a read-only array.
        """
        if not isinstance(mode, str) or mode not in ("r", "w", "rw"):
            raise ParamInvalidError(
                f"mode: expected 'r', 'w' or 'rw', got {mode!r}", argument="mode", seen=mode
            )
        return _HostUse(self, self._keeper, mode)

    def numpy(self) -> npt.NDArray[Any]:
        """The memory as a numpy array that may be kept.

        Counts as a write by the host at this moment; what happens to the array later is not
        seen by the race check.  Prefer ``host``.
        """
        array = self._live()
        self._keeper.refuse_in_capture("let the host use memory")
        self._keeper.host_access(self, array, "w", "numpy")
        return array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # The interface has no name for bfloat16 or float8: numpy then asks for __array__.
        if self._array.dtype.isbuiltin == REGISTERED:
            raise AttributeError("__array_interface__")
        array = self.numpy()
        self._lent = True
        return array.__array_interface__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """For ``np.asarray``: ``numpy()``, so an access of the host."""
        return np.asarray(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        """A DLPack capsule of the element type.

        Types that DLPack has no name for (hifloat8, float4_e1m2, types of 4 and 6 bits that take
        a byte) cross as unsigned integers.  numpy reads neither bfloat16 nor float8 this way, but
        by ``np.asarray``; torch does.
        """
        array = self.numpy()
        if array.dtype.kind not in "biufc" or array.dtype.isbuiltin == REGISTERED:
            array = array.view(f"u{array.itemsize}")
        capsule = array.__dlpack__(**options)
        return retype(capsule, self.dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU


class _HostUse:
    """The block of ``Buffer.host``: an access at its start and one at its end.

    A class and no generator, so that the place of the access is the caller's own.
    """

    __slots__ = ("_array", "_buffer", "_keeper", "_mode")

    def __init__(self, buffer: Buffer, keeper: Keeper, mode: str) -> None:
        self._buffer = buffer
        self._keeper = keeper
        self._mode = mode
        self._array: npt.NDArray[Any] | None = None

    def __enter__(self) -> npt.NDArray[Any]:
        buffer = self._buffer
        self._array = live_array(buffer)
        self._keeper.refuse_in_capture("let the host use memory")
        seen = self._array.view()
        if self._mode == "r":
            seen.flags.writeable = False
        self._keeper.host_access(buffer, self._array, self._mode, "host")
        return seen

    def __exit__(self, *error: object) -> None:
        array, self._array = self._array, None
        if array is not None and not self._buffer.storage.freed:
            self._keeper.host_access(self._buffer, array, self._mode, "host")


def live_array(buffer: Buffer) -> npt.NDArray[Any]:
    """A buffer's array, for work of its device; ParamInvalidError when it was freed."""
    return buffer._live()  # noqa: SLF001  (no method: a program has ``host`` and ``numpy``)


def stand_in(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array of the same shape and type that keeps no memory, for a buffer that was freed."""
    return np.lib.stride_tricks.as_strided(
        np.empty(1, array.dtype), array.shape, (0,) * array.ndim, writeable=False
    )
