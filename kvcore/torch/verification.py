# SPDX-License-Identifier: Apache-2.0
"""Running recorded calls again, here and on an NPU, and comparing what they leave."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
from torch import Tensor

from kvcore._core.adopt import MAX_EXTENT
from kvcore.errors import fail
from kvcore.torch import formats, vendor
from kvcore.torch.record import (
    HEAD,
    MAGIC,
    Bytes,
    Ranges,
    bytes_of,
    take,
)
from kvcore.torch.registration import Arguments

__all__ = ["Difference", "Verification", "verify"]

MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of one call that came out other than recorded, or a call that did not end.

    call: number, from 0.  where: "kvcore", or the namespace that ran it.  tensor: its name, ""
    for a call that raised.  offset: the first byte that differs, from the tensor's first; count:
    how many do; seen, recorded: there, in hex (seen of a call that raised: what it raised).
    """

    call: int
    operator: str
    where: str
    tensor: str
    offset: int
    count: int
    seen: str
    recorded: str

    def __str__(self) -> str:
        what = f"call {self.call}, {self.operator} by {self.where}: "
        if not self.tensor:
            return f"{what}raised {self.seen}"
        plural = "" if self.count == 1 else "s"
        return (
            f"{what}{self.tensor} differs in {self.count} byte{plural}, first in the element at "
            f"byte {self.offset}: recorded {self.recorded}, now {self.seen}"
        )


@dataclass
class Verification:
    """What came of it.

    calls: run again; where: who ran them.  cut_off: the file ends inside a record.  ok: there was
    a call, and all came out as recorded.
    """

    path: str
    calls: int = 0
    where: tuple[str, ...] = ("kvcore",)
    differences: list[Difference] = field(default_factory=list)
    cut_off: bool = False

    @property
    def ok(self) -> bool:
        """Whether there was a call at least, and everything came out as recorded."""
        return self.calls > 0 and not self.differences

    def __str__(self) -> str:
        found = len(self.differences)
        head = f"{self.path}: {self.calls} calls by {', '.join(self.where)}, "
        if not self.calls:
            head += "so nothing was compared"
        else:
            head += f"{found} tensors not as recorded" if found else "as recorded"
        if self.cut_off:
            head += " (the file ends inside a record)"
        more = [f"... and {found - MAX_SHOWN} more"] if found > MAX_SHOWN else []
        return "\n  ".join([head, *map(str, self.differences[:MAX_SHOWN]), *more])


def verify(path: str | os.PathLike[str], ns: Any = None, device: Any = None) -> Verification:
    """Run every recorded call again and compare, to the bit, what it writes and returns.

    path:   a file that ``install(record=...)`` made.
    ns:     torch_npu, or a namespace with its names, to run the calls too; None takes torch_npu
            when it is loaded.
    device: where ns' tensors live; None is "npu".

    A NaN counts as any other NaN.  ParamInvalidError when the file is not what it should be.
    """
    if ns is None and getattr(sys.modules.get("torch_npu"), "__file__", None):
        ns = sys.modules["torch_npu"]
    result = Verification(os.fspath(path))
    if ns is not None:
        result.where += (str(getattr(ns, "__name__", type(ns).__name__)),)
    for record in _records(path, result):
        number = result.calls
        result.calls += 1
        result.differences += record.check(number, "kvcore", record.run_here)
        if ns is not None:
            run = partial(record.run_on, ns, "npu" if device is None else device)
            result.differences += record.check(number, result.where[1], run)
    return result


# ---------------------------------------------------------------- reading
def _records(path: Any, result: Verification) -> Iterator[_Record]:
    operators = {(o.namespace, o.schema.partition("(")[0]): o for o in vendor.OPERATORS}
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(MAGIC)) != MAGIC:
            fail("path", f"a file of kvcore's recorded calls ({MAGIC.decode().strip()})", path)
        number = 0
        while file.tell() < size:
            here = _Reader(file, size, f"call {number}")
            found = here.record(operators)
            if found is None:
                result.cut_off = True
                return
            yield found
            number += 1


class _Reader:
    """One record, read with suspicion: sizes are checked before anything is made of them."""

    def __init__(self, file: BinaryIO, size: int, what: str) -> None:
        self.file = file
        self.size = size
        self.what = what

    def bad(self, seen: Any) -> NoReturn:
        """Raise for a record that is not what it should be."""
        fail("path", f"a whole record ({self.what})", seen)

    def record(self, operators: dict[tuple[str, str], vendor.Vendor]) -> _Record | None:
        head = self.file.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        (length,) = HEAD.unpack(head)
        if length > self.size - self.file.tell():
            return None
        try:
            text = json.loads(self.file.read(length))
        except (ValueError, RecursionError) as error:
            self.bad(f"text that is no JSON: {error}")
        try:
            return self._made(operators, text)
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            AttributeError,
            RuntimeError,
            MemoryError,
        ) as error:
            if hasattr(error, "argument"):
                raise
            self.bad(f"{type(error).__name__}: {error}")

    def _made(self, operators: dict[tuple[str, str], vendor.Vendor], text: Any) -> _Record | None:
        operator = operators.get((text["namespace"], text["schema"]))
        if operator is None:
            self.bad(f"an operator {text['schema']!r} of {text['namespace']!r}")
        arguments = Arguments(operator.schema)
        unknown = {*text["arguments"], *text["tensors"]} - set(arguments.names)
        if unknown:
            self.bad(f"arguments {sorted(unknown)}, which {operator.name} does not have")
        own = sum(returned.alias_info is None for returned in arguments.schema.returns)
        if len(text["returned"]) != own:
            self.bad(f"{len(text['returned'])} returned tensors, where {operator.name} has {own}")
        spans = [span for t in (*text["tensors"].values(), *text["returned"]) for span in _spans(t)]
        total = max((at + n for at, n in spans), default=0)
        if any(at < 0 or n < 0 for at, n in spans):
            self.bad("a negative size")
        if total > self.size - self.file.tell():
            return None
        payload = np.frombuffer(self.file.read(total), np.uint8)
        tensors = {name: _Stored(name, entry, payload) for name, entry in text["tensors"].items()}
        returned = [
            _Stored(f"returned[{i}]", entry, payload) for i, entry in enumerate(text["returned"])
        ]
        return _Record(operator, text["soc"], text["arguments"], tensors, returned)


def _spans(entry: dict[str, Any]) -> Iterator[tuple[int, int]]:
    for key in ("before", "after", "ranges", "written", "bytes"):
        if key in entry:
            at, n = entry[key]
            yield int(at), int(n)


class _Stored:
    """A tensor as the file has it."""

    def __init__(self, name: str, entry: dict[str, Any], payload: Bytes) -> None:
        def piece(key: str) -> Bytes | None:
            if key not in entry:
                return None
            at, n = entry[key]
            return payload[at : at + n]

        self.name = name
        self.dtype = getattr(torch, str(entry["dtype"]))
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"no dtype: {entry['dtype']!r}")
        self.shape = [int(n) for n in entry["shape"]]
        self.strides = [int(n) for n in entry["strides"]]
        self.nz = bool(entry["nz"])
        if min([0, *self.shape, *self.strides]) < 0 or len(self.shape) != len(self.strides):
            raise ValueError(f"shape {self.shape}, strides {self.strides}")
        self.before = piece("before")
        self.after = piece("after")
        self.bytes = piece("bytes")
        self.ranges = self._read_ranges(piece("ranges"))
        self.written = self._read_ranges(piece("written"))
        if self.size > MAX_EXTENT:
            raise ValueError(f"{self.name}: {self.size} bytes from its first to its last")
        self._check(self.before, self.ranges, "before the call")
        self._check(self.after, self.written, "after it")
        self._check(self.bytes, None, "returned")

    def _check(self, kept: Bytes | None, ranges: Ranges | None, what: str) -> None:
        """Raise unless as many bytes were kept as the shape or the ranges say."""
        if kept is None:
            return
        wanted = math.prod(self.shape) * self.dtype.itemsize
        if ranges is not None:
            wanted = sum((ranges[:, 1] - ranges[:, 0]).tolist())
        if kept.size != wanted:
            raise ValueError(f"{self.name}: {kept.size} bytes {what}, where {wanted} belong")

    @property
    def size(self) -> int:
        """Bytes from its first to its last."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return int((last + 1) * self.dtype.itemsize)

    def _read_ranges(self, raw: Bytes | None) -> Ranges | None:
        if raw is None:
            return None
        found = raw.view(np.int64).reshape(-1, 2)
        if len(found) and (found.min() < 0 or found.max() > self.size):
            raise ValueError(f"{self.name}: ranges outside of the tensor")
        if (found[:, 1] < found[:, 0]).any():
            raise ValueError(f"{self.name}: a range that ends before it begins")
        return found

    def build(self, device: Any = None) -> tuple[Tensor, Tensor]:
        """(its memory from first to last byte, the tensor on it), as before the call."""
        memory = np.zeros(self.size, np.uint8)
        if self.before is None:
            raise ValueError(f"{self.name}: nothing kept")
        if self.ranges is not None:
            _put(memory, self.ranges, self.before)
        # Of no bytes, numpy's stride is 0, which torch does not view as another dtype.
        base = torch.from_numpy(memory) if self.size else torch.empty(0, dtype=torch.uint8)
        if device is not None:
            base = base.to(device)
        tensor = base.view(self.dtype).as_strided(self.shape, self.strides)
        if self.ranges is None and tensor.numel():
            whole = torch.from_numpy(np.array(self.before)).view(self.dtype).reshape(self.shape)
            tensor.copy_(whole)
        return base, tensor

    def left(self, base: Tensor, tensor: Tensor) -> tuple[Bytes, Bytes]:
        """(bytes now, bytes recorded) of an output: what was written, or that nothing was."""
        recorded, ranges = self.after, self.written
        if recorded is None:
            assert self.before is not None
            recorded, ranges = self.before, self.ranges
        if ranges is None:
            return bytes_of(tensor.cpu()), recorded
        return take(base.cpu().numpy(), ranges), recorded


def _put(memory: Bytes, ranges: Ranges, content: Bytes) -> None:
    at = 0
    for start, end in ranges.tolist():
        memory[start:end] = content[at : at + end - start]
        at += end - start


Done = tuple[dict[str, tuple[Tensor, Tensor]], list[Tensor]]


@dataclass
class _Record:
    operator: vendor.Vendor
    soc: str | None
    arguments: dict[str, Any]
    tensors: dict[str, _Stored]
    returned: list[_Stored]

    def _call(self, built: dict[str, tuple[Tensor, Tensor]]) -> tuple[list[Any], dict[str, Any]]:
        given = {**self.arguments, **{name: tensor for name, (_, tensor) in built.items()}}
        positional, named = [], {}
        for argument in Arguments(self.operator.schema).schema.arguments:
            if argument.name not in given:
                continue
            if argument.kwarg_only:
                named[argument.name] = given[argument.name]
            else:
                positional.append(given[argument.name])
        return positional, named

    def run_here(self) -> Done:
        """Run it with this library."""
        built = {name: stored.build() for name, stored in self.tensors.items()}
        for name, (_, tensor) in built.items():
            if self.tensors[name].nz:
                formats.npu_format_cast_(tensor, formats.Format.FRACTAL_NZ)
        args, keywords = self._call(built)
        call = self.operator.prepare(self.soc, *args, **keywords)
        return built, _new(call.run(), built)

    def run_on(self, ns: Any, device: Any) -> Done:
        """Run it with the operator of that name on ns."""
        built = {name: stored.build(device) for name, stored in self.tensors.items()}
        nz = int(formats.Format.FRACTAL_NZ)
        cast = {
            name: ns.npu_format_cast(tensor, nz)
            for name, (_, tensor) in built.items()
            if self.tensors[name].nz
        }
        given = {name: (base, cast.get(name, tensor)) for name, (base, tensor) in built.items()}
        args, keywords = self._call(given)
        returned = getattr(ns, self.operator.name)(*args, **keywords)
        for name, tensor in cast.items():
            built[name][1].copy_(ns.npu_format_cast(tensor, int(formats.Format.ND)))
        return built, _new(returned, given)

    def check(self, number: int, where: str, run: Callable[[], Done]) -> list[Difference]:
        """Run it and say what came out other than recorded."""
        try:
            built, returned = run()
        except Exception as error:  # whatever another implementation raises
            words = f"{type(error).__name__}: {error}"
            return [Difference(number, self.operator.name, where, "", 0, 0, words, "")]
        found = []
        outputs = Arguments(self.operator.schema).written
        for name, (base, tensor) in built.items():
            if name in outputs:
                stored = self.tensors[name]
                found.append(self._difference(number, where, stored, *stored.left(base, tensor)))
        for stored, tensor in zip(self.returned, returned, strict=False):
            assert stored.bytes is not None
            now = bytes_of(tensor.cpu())
            found.append(self._difference(number, where, stored, now, stored.bytes))
        return [difference for difference in found if difference is not None]

    def _difference(
        self, number: int, where: str, stored: _Stored, now: Bytes, recorded: Bytes
    ) -> Difference | None:
        if now.size == recorded.size and np.array_equal(now, recorded):
            return None
        n = min(now.size, recorded.size)
        differs = now[:n] != recorded[:n]
        if stored.dtype.is_floating_point and now.size == recorded.size:
            differs &= ~_both_nan(now, recorded, stored.dtype)
            if not differs.any():
                return None
        at = int(np.argmax(differs)) if differs.any() else n
        size = stored.dtype.itemsize
        first = at - at % size
        count = int(differs.sum()) + abs(now.size - recorded.size)
        return Difference(
            number,
            self.operator.name,
            where,
            stored.name,
            _place(stored.written if stored.after is not None else stored.ranges, first),
            count,
            now[first : first + size].tobytes().hex(),
            recorded[first : first + size].tobytes().hex(),
        )


def _both_nan(now: Bytes, recorded: Bytes, dtype: torch.dtype) -> Bytes:
    """Per byte, whether it is part of a NaN on both sides."""
    if dtype.itemsize == 1 and "float4" in str(dtype):
        return np.zeros(now.size, bool)
    sides = [torch.from_numpy(np.array(raw)).view(dtype).float().isnan() for raw in (now, recorded)]
    return np.repeat((sides[0] & sides[1]).numpy(), dtype.itemsize)


def _place(written: Ranges | None, at: int) -> int:
    """Where byte ``at`` of the ranges' bytes lies."""
    if written is None:
        return at
    for start, end in written.tolist():
        if at < end - start:
            return int(start + at)
        at -= end - start
    return at


def _new(returned: Any, built: dict[str, tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Returned tensors that are no arguments."""
    results = returned if isinstance(returned, tuple | list) else [returned]
    own = [tensor for _, tensor in built.values()]
    return [t for t in results if isinstance(t, Tensor) and not any(t is other for other in own)]
