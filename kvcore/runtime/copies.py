# SPDX-License-Identifier: Apache-2.0
"""The operations that the runtime brings itself: copies and fills, as plans.

They follow the protocol of every plan (``run``, ``reads``, ``writes``, ``touched``,
``bytes_moved``, ``num_descriptors``).  Their cost is known when they are made: ``demands`` are
rows (resource, bytes, pieces), ``host_bytes`` are moved within host memory, ``h2d_bytes`` and
``d2h_bytes`` over the links.  A device without the model clock and a trace does not ask for these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcore._core import arrays, overlap
from kvcore.errors import KVCoreError, ParamInvalidError
from kvcore.runtime._storage import BufferCore, move
from kvcore.runtime.accesses import Access, Ranges, Whole, accesses_of, whole_accesses
from kvcore.runtime.arguments import PAGEABLE, array_of, space_of
from kvcore.runtime.element_types import one_value
from kvcore.runtime.profile import D2H, H2D, HBM, DeviceProfile
from kvcore.strides import coalesce

__all__ = ["Copy", "Fill", "Timed", "bits"]

_BITS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}
Demand = tuple[int, float, int]
Ends = list[tuple[object, object]]


class Payer(Protocol):
    """What is asked of the device that a copy or a fill is made for.

    key: what its storages carry.  costs: whether anybody wants to know what a copy costs.
    """

    key: object
    profile: DeviceProfile | None
    costs: bool


def bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The elements seen as a type of numpy's own, which numpy moves fast and without the GIL."""
    if array.dtype.isbuiltin == 1:
        return array
    size = array.itemsize
    carrier: np.dtype[Any] = _BITS[size] if size in _BITS else np.dtype(f"V{size}")
    return array.view(carrier)


def pieces_of(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Contiguous pieces of a copy between two arrays of one shape."""
    if a.flags.c_contiguous and b.flags.c_contiguous:
        return 1 if a.size else 0
    axes, _ = coalesce(zip(a.shape, a.strides, b.strides, strict=True), a.itemsize)
    return math.prod(count for count, *_ in axes) if a.size else 0


def held(x: object, argument: str) -> list[arrays.HeldArray]:
    """What a run looks at again before it uses an array's address: nothing for a buffer.

    A buffer's bytes live as long as work holds them.  Other arrays can be resized or reshaped in
    place between the launch and the run, torch tensors among them.
    """
    if isinstance(x, BufferCore):
        return []
    try:
        return [arrays.HeldArray(x, argument)]
    except KVCoreError:
        # Of more than eight axes, or of another byte order: taken as the numpy array it is.
        return []


class Copy:
    """One copy, or a batch of copies that goes as one operation.

    ends: (destination, source) of each, as they were given.
    """

    __slots__ = (
        "_held",
        "_loops",
        "_table",
        "bytes_moved",
        "d2h_bytes",
        "demands",
        "ends",
        "h2d_bytes",
        "host_bytes",
        "name",
        "num_descriptors",
        "reads",
        "writes",
    )
    d2h_bytes: int
    h2d_bytes: int
    host_bytes: int

    workspace_size = 0

    def __init__(self, payer: Payer, dst: object, src: object) -> None:
        d, s = _pair(payer, dst, src, "dst", "src")
        self.name: str = "copy"
        self.ends: Ends = [(dst, src)]
        self._table: Ranges | None = None
        self._loops = [(bits(d), bits(s))]
        self._held = [*held(dst, "dst"), *held(src, "src")]
        self.bytes_moved: int = d.nbytes
        self.num_descriptors: int = pieces_of(d, s)
        self.writes: tuple[Access, ...] = (Access("dst", dst, (d,)),)
        self.reads: tuple[Access, ...] = (Access("src", src, (s,)),)
        self.demands: list[Demand] = []
        self.host_bytes = self.h2d_bytes = self.d2h_bytes = 0
        if payer.costs:
            self._demand(payer, space_of(dst), space_of(src), d.nbytes, self.num_descriptors)

    @classmethod
    def batch(cls, payer: Payer, dsts: Sequence[object], srcs: Sequence[object]) -> Copy:
        """srcs[i] over dsts[i] for all i, in order."""
        self = cls.__new__(cls)
        pairs = [
            _pair(payer, dst, src, f"dst[{i}]", f"src[{i}]")
            for i, (dst, src) in enumerate(zip(dsts, srcs, strict=True))
        ]
        self.name = "copy_batch"
        self.ends = list(zip(dsts, srcs, strict=True))
        self.bytes_moved = sum(d.nbytes for d, _ in pairs)
        counts = [pieces_of(d, s) for d, s in pairs]
        self.num_descriptors = sum(counts)
        self._table = None
        self._loops = []
        self._held = [
            one
            for i, pair in enumerate(zip(dsts, srcs, strict=True))
            for x, side in zip(pair, ("dst", "src"), strict=True)
            for one in held(x, f"{side}[{i}]")
        ]
        if max(counts, default=0) <= 1:
            rows = [(d.ctypes.data, s.ctypes.data, d.nbytes) for d, s in pairs]
            self._table = np.array(rows, np.int64).reshape(-1, 3)
        else:
            self._loops = [(bits(d), bits(s)) for d, s in pairs]
        self.writes = accesses_of("dst", dsts, [d for d, _ in pairs])
        self.reads = accesses_of("src", srcs, [s for _, s in pairs])
        self.demands = []
        self.host_bytes = self.h2d_bytes = self.d2h_bytes = 0
        if payer.costs:
            sums: dict[tuple[str, str], list[int]] = {}
            for dst, src, (d, _), count in zip(dsts, srcs, pairs, counts, strict=True):
                entry = sums.setdefault((space_of(dst), space_of(src)), [0, 0])
                entry[0] += d.nbytes
                entry[1] += count
            for (to, source), (nbytes, count) in sums.items():
                self._demand(payer, to, source, nbytes, count)
        return self

    def _demand(self, payer: Payer, to: str, source: str, nbytes: int, count: int) -> None:
        if to == source == "device":
            self._ask(HBM, 2 * nbytes, count)
        elif to != "device" and source != "device":
            self.host_bytes += nbytes
        else:
            link = H2D if to == "device" else D2H
            if link == H2D:
                self.h2d_bytes += nbytes
            else:
                self.d2h_bytes += nbytes
            over: float = nbytes
            if PAGEABLE in (to, source) and payer.profile is not None:
                over = nbytes / payer.profile.value("pageable_share")
            self._ask(link, over, count)
            self._ask(HBM, nbytes, count)

    def _ask(self, resource: int, nbytes: float, pieces: int) -> None:
        """One row a resource: a batch asks each of them once, whatever it is made of."""
        for i, (asked, before, count) in enumerate(self.demands):
            if asked == resource:
                self.demands[i] = (resource, before + nbytes, count + pieces)
                return
        self.demands.append((resource, nbytes, pieces))

    def run(self) -> None:
        """Move the bytes; dst may overlap src.

        Raises ParamInvalidError, with nothing written, for an array that changed since.
        """
        for one in self._held:
            one.check()
        if self._table is not None:
            move(self._table)
        for dst, src in self._loops:
            np.copyto(dst, src)

    def touched(self) -> Whole:
        """A copy touches all of its arguments."""
        return self.reads, self.writes


class Fill:
    """Every element of an array set to one value.

    target, value: both as a type of numpy's own.  ends: as of a copy within what is filled.
    """

    __slots__ = (
        "_held",
        "bytes_moved",
        "demands",
        "ends",
        "host_bytes",
        "num_descriptors",
        "target",
        "value",
        "writes",
    )
    name = "fill"
    reads: tuple[Access, ...] = ()
    workspace_size = 0

    def __init__(self, payer: Payer, dst: object, value: Any) -> None:
        array = array_of(dst, "dst", payer.key)
        self.ends: Ends = [(dst, dst)]
        _writable(array, "dst")
        one = one_value(array.dtype, value)
        if one is None:
            raise ParamInvalidError(
                f"value: expected one value of type {array.dtype}, got {value!r}",
                argument="value",
                seen=value,
                expected=str(array.dtype),
            )
        self._held = held(dst, "dst")
        self.target: npt.NDArray[Any] = bits(array)
        self.value: Any = bits(one.reshape(1))[0]
        self.bytes_moved: int = int(array.nbytes)
        self.num_descriptors: int = pieces_of(array, array)
        self.writes: tuple[Access, ...] = accesses_of("dst", [dst], [array])
        on_device = space_of(dst) == "device"
        self.demands: list[Demand] = (
            [(HBM, self.bytes_moved, self.num_descriptors)] if on_device else []
        )
        self.host_bytes: int = 0 if on_device else self.bytes_moved

    def run(self) -> None:
        """Set the elements.  Raises ParamInvalidError for an array that changed since."""
        for one in self._held:
            one.check()
        self.target[...] = self.value

    def touched(self) -> Whole:
        """A fill touches all of its array."""
        return self.reads, self.writes


class Timed:
    """Work that only takes time, and what it would touch; see ``Stream.compute``."""

    __slots__ = ("name", "reads", "writes")

    def __init__(self, payer: Payer, name: str, reads: object, writes: object) -> None:
        self.name: str = name
        self.reads: tuple[Access, ...] = whole_accesses("reads", reads, payer.key)
        self.writes: tuple[Access, ...] = whole_accesses("writes", writes, payer.key)
        for access in self.writes:
            if access.read_only:
                raise _read_only(access.argument)

    def __str__(self) -> str:
        return self.name

    def touched(self) -> Whole:
        """All of what was named."""
        return self.reads, self.writes


def _pair(
    payer: Payer, dst: object, src: object, dst_name: str, src_name: str
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    d = array_of(dst, dst_name, payer.key)
    s = array_of(src, src_name, payer.key)
    if d.dtype != s.dtype:
        d_type = getattr(dst, "dtype", d.dtype)
        s_type = getattr(src, "dtype", s.dtype)
        raise ParamInvalidError(
            f"{src_name}: expected dtype {d_type} as {dst_name}, got {s_type}",
            argument=src_name,
            seen=str(s_type),
            expected=str(d_type),
        )
    if d.shape != s.shape:
        raise ParamInvalidError(
            f"{src_name}: expected shape {d.shape} as {dst_name}, got {s.shape}",
            argument=src_name,
            seen=s.shape,
            expected=d.shape,
        )
    _writable(d, dst_name)
    if not d.flags.c_contiguous:
        # What two elements would write is a matter of their order, which a copy does not promise.
        shown = SimpleNamespace(name=dst_name, address=d.ctypes.data, itemsize=d.itemsize)
        shown.shape, shown.strides = d.shape, d.strides
        overlap.check_self(shown)
    return d, s


def _writable(array: npt.NDArray[Any], argument: str) -> None:
    if not array.flags.writeable:
        raise _read_only(argument)


def _read_only(argument: str) -> ParamInvalidError:
    return ParamInvalidError(
        f"{argument}: expected memory that may be written, got a read-only array",
        argument=argument,
        seen="read-only",
    )
