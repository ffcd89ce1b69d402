# SPDX-License-Identifier: Apache-2.0
"""Recording calls into a file that ``verify`` runs again.

A file is a line that says what it is, then one record a call: eight bytes with the length of a
JSON text (little-endian), the text, and the bytes it speaks of.  Nothing in it is ever executed.
A process that ends without closing leaves whole records behind it.

Of a data tensor the rows that the call touched are kept, before it and, where it wrote, after;
index tensors, small ones of unknown use and returned tensors are kept whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcore._core.overlap import Access
from kvcore._core.plan import Plan
from kvcore.errors import fail
from kvcore.strides import extent, merge_ranges
from kvcore.torch.formats import is_nz
from kvcore.torch.vendor import Vendor

__all__ = ["MAGIC", "Recorder", "Recording", "bytes_of", "extent_bytes", "make_recorder", "take"]

MAGIC = b"kvcore recorded calls, version 1\n"
HEAD = struct.Struct("<Q")
INDEX_DTYPES = (torch.int32, torch.int64)

Bytes = NDArray[np.uint8]
Ranges = NDArray[np.int64]
Given = dict[str, Any]


@dataclass(frozen=True)
class Recording:
    """Where calls are kept, and how many at the most.

    path: each process has a file of its own: its number stands for ``{pid}``, or else before the
    suffix.  max_calls, max_bytes: of one file; what comes after is counted only.
    """

    path: str | os.PathLike[str]
    max_calls: int = 1000
    max_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not isinstance(
            os.fspath(self.path), str
        ):
            fail("path", "a path as text", type(self.path).__name__)
        if "\0" in os.fspath(self.path) or not Path(self.path).name:
            fail("path", "a path that ends in a file's name", repr(os.fspath(self.path)))
        for name in ("max_calls", "max_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                fail(name, "a whole number >= 0", repr(value))


def make_recorder(record: Any) -> Recorder | None:
    """The recorder of install's ``record=``: a path, a Recording or None."""
    if record is None:
        return None
    if isinstance(record, str | os.PathLike):
        record = Recording(record)
    if not isinstance(record, Recording):
        fail("record", "a path, a kvcore.torch.Recording or None", type(record).__name__)
    folder = Path(record.path).parent
    if not os.access(folder, os.W_OK | os.X_OK) or not folder.is_dir():
        fail("record", "a path in a folder that can be written", repr(os.fspath(record.path)))
    return Recorder(record)


@dataclass
class Kept:
    """One tensor of a call, as it was before it.

    ranges: bytes from the tensor's first, or None when it is kept whole.  written: those of them
    that the call writes (None: all that is kept).
    """

    tensor: Tensor
    ranges: Ranges | None
    before: Bytes
    written: Ranges | None = None
    is_output: bool = False


@dataclass
class Entry:
    """A call between its two halves."""

    head: dict[str, Any]
    kept: dict[str, Kept] = field(default_factory=dict)


class Recorder:
    """Writes the calls of one process, of any of its threads, into one file.

    calls, dropped: written, and not written since the file was full.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._file: BinaryIO | None = None
        self._pid = os.getpid()
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self.path: Path | None = None
        self.calls: int = 0
        self.dropped: int = 0
        self._written = 0
        self._broken = False

    def before(self, operator: Vendor, soc: Any, given: Given, plan: Plan) -> Entry | None:
        """Keep what the call is about to touch; None when the file is full."""
        if os.getpid() != self._pid:  # a forked child writes a file of its own
            self._file = None
            self._pid = os.getpid()
            self._reset()
        with self._lock:
            if self._is_full(0):
                self.dropped += 1
                return None
        reads, writes = plan.touches()
        arrays = plan.request.arrays
        known = {array.data_ptr() for array in arrays if isinstance(array, Tensor)}
        entry = Entry(
            {
                "namespace": operator.namespace,
                "schema": operator.schema.partition("(")[0],
                "soc": None if soc is None else soc.name,
                "arguments": {n: v for n, v in given.items() if not isinstance(v, Tensor)},
            }
        )
        for name, tensor in given.items():
            if isinstance(tensor, Tensor):
                entry.kept[name] = _keep(tensor, known, reads, writes)
        return entry

    def after(self, entry: Entry, returned: Any) -> None:
        """Write the call with what it left."""
        payload = _Payload()
        tensors = {name: _describe(kept, payload) for name, kept in entry.kept.items()}
        entry.head["tensors"] = tensors
        own = [kept.tensor for kept in entry.kept.values()]
        results = returned if isinstance(returned, tuple) else [returned]
        entry.head["returned"] = [
            {**_layout(t), "bytes": payload.add(bytes_of(t))}
            for t in results
            if isinstance(t, Tensor) and not any(t is other for other in own)
        ]
        text = json.dumps(entry.head).encode()
        size = HEAD.size + len(text) + payload.size
        with self._lock:
            if self._is_full(size):
                self.dropped += 1
                return
            try:
                self._write([HEAD.pack(len(text)) + text, *(part.data for part in payload.parts)])
            except OSError as error:
                # The call is done and stays done: what is lost is its record, and those to come.
                self.dropped += 1
                self._broken = True
                warnings.warn(f"recording of calls ended: {error}", RuntimeWarning, stacklevel=2)
                return
            self._written += size
            self.calls += 1

    def _is_full(self, size: int) -> bool:
        limits = self.recording
        used = self._written + max(size, 1)
        return self._broken or self.calls >= limits.max_calls or used > limits.max_bytes

    def _write(self, parts: list[Any]) -> None:
        file = self._open()
        for part in parts:
            file.write(part)
        file.flush()

    def _open(self) -> BinaryIO:
        if self._file is None:
            path = str(self.recording.path)
            if "{pid}" in path:
                wanted = Path(path.replace("{pid}", str(self._pid)))
            else:
                base = Path(path)
                wanted = base.with_name(f"{base.stem}-{self._pid}{base.suffix}")
            self._file, self.path = _create(wanted)
            self._file.write(MAGIC)
        return self._file

    def close(self) -> None:
        """Close the file; the recorder writes no more."""
        if os.getpid() != self._pid:  # a forked child's: neither the file nor the lock is its own
            self._file = None
            return
        with self._lock:
            file, self._file, self._broken = self._file, None, True
            if file is not None:
                with contextlib.suppress(OSError):  # reported already, by the write that failed
                    file.close()


def _create(path: Path) -> tuple[BinaryIO, Path]:
    """A file that was not there, with a number behind its name if need be."""
    number = 1
    while True:
        wanted = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            return open(wanted, "xb"), wanted
        except FileExistsError:
            number += 1


class _Payload:
    """The bytes behind a record's text, and where each piece of them is."""

    def __init__(self) -> None:
        self.parts: list[Bytes] = []
        self.size = 0

    def add(self, part: Any) -> list[int]:
        raw = np.ascontiguousarray(part).view(np.uint8).reshape(-1)
        at = self.size
        self.parts.append(raw)
        self.size += raw.size
        return [at, raw.size]


# ---------------------------------------------------------------- bytes of tensors
def extent_bytes(tensor: Tensor) -> int:
    """Bytes from the tensor's first to its last."""
    _, past = extent(tensor.shape, tensor.stride(), 1)
    return int(past * tensor.element_size())


def bytes_of(tensor: Tensor) -> Bytes:
    """A copy of the elements in row-major order."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    found: Bytes = flat.view(torch.uint8).numpy()
    return found


def _memory(tensor: Tensor) -> Bytes:
    size = extent_bytes(tensor)
    if size == 0:
        return np.empty(0, np.uint8)
    shared = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(shared)


def take(memory: Bytes, ranges: Ranges) -> Bytes:
    """The bytes of the ranges, one after the other."""
    pieces = [memory[start:end] for start, end in ranges.tolist()]
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


def _keep(
    tensor: Tensor, known: set[int], reads: tuple[Access, ...], writes: tuple[Access, ...]
) -> Kept:
    written = _ranges_of(tensor, writes)
    if tensor.dtype in INDEX_DTYPES or tensor.data_ptr() not in known:
        return Kept(tensor, None, bytes_of(tensor), is_output=len(written) > 0)
    touched = np.concatenate([_ranges_of(tensor, reads), written])
    touched = merge_ranges(touched[:, 0], touched[:, 1])
    return Kept(tensor, touched, take(_memory(tensor), touched), written, len(written) > 0)


def _ranges_of(tensor: Tensor, accesses: tuple[Access, ...]) -> Ranges:
    base = tensor.data_ptr()
    found = [
        access.ranges - base
        for access in accesses
        if isinstance(access.owner, Tensor) and access.owner.data_ptr() == base
    ]
    return np.concatenate(found) if found else np.empty((0, 2), np.int64)


def _layout(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "nz": is_nz(tensor),
    }


def _describe(kept: Kept, payload: _Payload) -> dict[str, Any]:
    entry = {**_layout(kept.tensor), "before": payload.add(kept.before)}
    if kept.ranges is not None:
        entry["ranges"] = payload.add(kept.ranges)
    if kept.is_output:
        if kept.written is None:
            entry["after"] = payload.add(bytes_of(kept.tensor))
        else:
            entry["written"] = payload.add(kept.written)
            entry["after"] = payload.add(take(_memory(kept.tensor), kept.written))
    return entry
