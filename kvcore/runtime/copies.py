# SPDX-License-Identifier: Apache-2.0
"""The operations that the runtime brings itself: copies and fills, as plans.

They follow the protocol of every plan (``run``, ``reads``, ``writes``, ``touched``,
``bytes_moved``, ``num_descriptors``).  Their cost is known when they are made: ``demands`` are
rows (resource, bytes, pieces), ``host_bytes`` are moved within host memory, ``h2d_bytes`` and
``d2h_bytes`` over the links.  A device without the model clock and a trace does not ask for these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcore._core import adopt, arrays, overlap
from kvcore.errors import KVCoreError, ParamInvalidError, fail
from kvcore.runtime._storage import BufferCore, move
from kvcore.runtime.memory import PAGEABLE, array_of, space_of
from kvcore.runtime.profile import D2H, H2D, HBM, DeviceProfile
from kvcore.strides import coalesce, merge_ranges

__all__ = ["Access", "Copy", "Fill", "Ranges", "ranges_of"]

_BITS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}
#: Integers of ml_dtypes, which numpy does not know for integers.
_NARROW = ("int2", "int4", "uint2", "uint4")
Ranges = npt.NDArray[np.int64]
Demand = tuple[int, float, int]
Whole = tuple[tuple["Access", ...], tuple["Access", ...]]
Ends = list[tuple[object, object]]


class Payer(Protocol):
    """What is asked of the device that a copy or a fill is made for.

    key: what its storages carry.  costs: whether anybody wants to know what a copy costs.
    """

    key: object
    profile: DeviceProfile | None
    costs: bool


class Access:
    """What a plan touches of one argument: absolute byte ranges, worked out when asked for.

    argument: what reports call it.  owner: the buffer or array; it keeps the memory alive.
    arrays: numpy arrays that cover what is touched; None: the whole of the owner.
    """

    __slots__ = ("_arrays", "_ranges", "argument", "owner")

    def __init__(
        self, argument: str, owner: Any, arrays: Sequence[npt.NDArray[Any]] | None = None
    ) -> None:
        self.argument = argument
        self.owner = owner
        if arrays is None:
            own = owner.storage.owner if isinstance(owner, BufferCore) else None
            arrays = (array_of(owner, argument, own),)
        self._arrays = arrays
        self._ranges: Ranges | None = None

    @property
    def read_only(self) -> bool:
        """Whether some of it may not be written."""
        return not all(array.flags.writeable for array in self._arrays)

    @property
    def ranges(self) -> Ranges:
        """Rows (start, end), ascending and merged."""
        if self._ranges is None:
            rows = [ranges_of(array) for array in self._arrays]
            self._ranges = rows[0] if len(rows) == 1 else merge_ranges(*np.concatenate(rows).T)
        return self._ranges


def ranges_of(array: npt.NDArray[Any]) -> Ranges:
    """The exact bytes of an array: rows (start, end), ascending and merged."""
    start = array.ctypes.data
    if array.size == 0:
        return np.empty((0, 2), np.int64)
    if array.flags.c_contiguous:
        return np.array([[start, start + array.nbytes]], np.int64)
    dims = [(n, s) for n, s in zip(array.shape, array.strides, strict=True) if n > 1]
    # a negative stride touches the same bytes from the other end; a zero one, the same byte
    start += sum((n - 1) * s for n, s in dims if s < 0)
    dims = sorted(((n, abs(s)) for n, s in dims if s), key=lambda d: d[1])
    run = array.itemsize
    while dims and dims[0][1] == run:
        run *= dims.pop(0)[0]
    starts = np.array([start], np.int64)
    for n, stride in dims:
        starts = (np.arange(n, dtype=np.int64)[:, None] * stride + starts[None, :]).ravel()
    return merge_ranges(starts, starts + run)


def bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same elements as a type of numpy's own, which it moves fast and without the GIL."""
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


def held(x: object, argument: str) -> list[arrays.Held]:
    """What a run looks at again before it uses an array's address: nothing for a buffer.

    A buffer's bytes live as long as work holds them.  Other arrays can be resized or reshaped in
    place between the launch and the run, torch tensors among them.
    """
    if isinstance(x, BufferCore):
        return []
    try:
        return [arrays.Held(x, argument)]
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
    workspace_size = 0

    def __init__(self, payer: Payer, dst: object, src: object) -> None:
        d, s = _pair(payer, dst, src, "dst", "src")
        self.name = "copy"
        self.ends: Ends = [(dst, src)]
        self._table: Ranges | None = None
        self._loops = [(bits(d), bits(s))]
        self._held = [*held(dst, "dst"), *held(src, "src")]
        self.bytes_moved = d.nbytes
        self.num_descriptors = pieces_of(d, s)
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
        self.writes = _accesses("dst", dsts, [d for d, _ in pairs])
        self.reads = _accesses("src", srcs, [s for _, s in pairs])
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
        self.target = bits(array)
        self.value = bits(one.reshape(1))[0]
        self.bytes_moved = int(array.nbytes)
        self.num_descriptors = pieces_of(array, array)
        self.writes = _accesses("dst", [dst], [array])
        on_device = space_of(dst) == "device"
        self.demands: list[Demand] = (
            [(HBM, self.bytes_moved, self.num_descriptors)] if on_device else []
        )
        self.host_bytes = 0 if on_device else self.bytes_moved

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
        self.name = name
        self.reads = _whole("reads", reads, payer)
        self.writes = _whole("writes", writes, payer)
        for access in self.writes:
            if access.read_only:
                raise _read_only(access.argument)

    def __str__(self) -> str:
        return self.name

    def touched(self) -> Whole:
        """All of what was named."""
        return self.reads, self.writes


def _whole(argument: str, given: object, payer: Payer) -> tuple[Access, ...]:
    """An access to the whole of each of these; one buffer or array stands for itself."""
    if isinstance(given, BufferCore | np.ndarray) or hasattr(given, "__dlpack__"):
        return (Access(argument, given, (array_of(given, argument, payer.key),)),)
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        fail(argument, "buffers or arrays", type(given).__name__)
    owners = list(given)
    names = [f"{argument}[{i}]" for i in range(len(owners))]
    return tuple(
        Access(name, owner, (array_of(owner, name, payer.key),))
        for name, owner in zip(names, owners, strict=True)
    )


def one_value(dtype: np.dtype[Any], value: Any) -> npt.NDArray[Any] | None:
    """One number as an array of no dimensions; None when it is none, or the type cannot hold it.

    Rounding is no loss; a fraction, a sign, an imaginary part or a size is.
    """
    try:
        if hasattr(type(value), "__dlpack__") and not isinstance(value, np.ndarray):
            value = adopt.as_numpy(value, "value")[()]  # another package's array of one number
        given = np.asarray(value)
        number = given.dtype.kind in "biuf" or isinstance(value, int)
        if given.shape != () or not (
            number
            or given.dtype == dtype
            or (given.dtype.kind == "c" and dtype.kind == "c")
            or (given.dtype.kind == "V" and given.dtype.names is None and dtype.kind != "c")
        ):
            return None
        with np.errstate(all="ignore"):
            one = given.astype(dtype, casting="unsafe")
            if dtype.kind in "biu":
                return one if bool(one == value) else None
            if dtype.name in _NARROW:
                # (compared as they are: numpy would bring the value to these types first)
                return one if int(one[()]) == value else None
            if number and math.isfinite(value) and dtype.kind != "c":
                seen = float(one)
                # (types without an infinity have NaN, or their largest value, in its place)
                if not math.isfinite(seen) or (abs(value) > 1 and abs(seen) < abs(value) / 2):
                    return None
            elif number and math.isfinite(value) and not np.isfinite(one):
                return None
    except (ValueError, TypeError, OverflowError):
        return None
    return one


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


def _accesses(
    argument: str, owners: Sequence[object], arrays: Sequence[npt.NDArray[Any]]
) -> tuple[Access, ...]:
    """One access an owner; owners of one storage are taken together."""
    groups: dict[int, tuple[object, list[npt.NDArray[Any]]]] = {}
    for owner, array in zip(owners, arrays, strict=True):
        key = id(owner.storage if isinstance(owner, BufferCore) else owner)
        groups.setdefault(key, (owner, []))[1].append(array)
    return tuple(Access(argument, owner, group) for owner, group in groups.values())
