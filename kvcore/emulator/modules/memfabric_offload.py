# SPDX-License-Identifier: Apache-2.0
"""``memfabric_hybrid.offload``: host memory that the device reads and writes, row by row.

A sparse copy takes its addresses from tensors of the device, and so when it runs, in stream order;
a graph captures it.  One rank only.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from array import array
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found,unused-ignore]

from kvcore.emulator import machine
from kvcore.emulator.fallback import Kernel
from kvcore.emulator.operators import Special
from kvcore.emulator.reference.refusals import refuse
from kvcore.emulator.touched import Used

__all__ = ["OffloadConfig", "Scene", "empty", "initialize", "sparse_copy"]

_NAME = "sparse_copy"
_TENSORS = ("sources", "targets", "lengths", "count")


class Scene(enum.Enum):
    """How ranks use the host's memory."""

    SHARED = 0


class OffloadConfig:
    """What ``initialize`` takes; sizes in bytes."""

    def __init__(self) -> None:
        self.device_id = 0
        self.reserve_size = 0
        self.alloc_size = 0
        self.world_size = 1
        self.rank_id = 0
        self.scene = Scene.SHARED


def initialize(config: OffloadConfig) -> int:
    """0: host memory is taken when ``empty`` asks for it.  More than one rank is refused."""
    if config.world_size != 1 or config.rank_id:
        raise RuntimeError(
            "memfabric_hybrid.offload.initialize: the emulated machine has one rank, got rank "
            f"{config.rank_id} of {config.world_size}"
        )
    return 0


def empty(size: list[int], dtype: torch.dtype | None = None, pin_memory: bool = True) -> Any:
    """A tensor of the host that the device can reach."""
    return torch.empty(size, dtype=dtype, pin_memory=pin_memory)


class _Copy(Kernel):
    """The rows' bytes are known when the copy runs, and are not those of its arguments."""

    def used_elements(
        self, spans: list[tuple[str, int]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[Any, bool]]:
        own = array("Q")
        for name, address in spans:
            tensor = args[_TENSORS.index(name)]
            own.extend((address, address + tensor.numel() * tensor.itemsize))
        reads, writes = array("Q"), array("Q")
        for source, target, length in _rows(*args):
            reads.extend((source, source + length))
            writes.extend((target, target + length))
        return [(own, False), (reads, False), (writes, True)]


def _rows(sources: Any, targets: Any, lengths: Any, count: Any) -> list[tuple[int, int, int]]:
    number = int(count.reshape(-1)[0])
    if not 0 <= number <= len(sources):
        raise RuntimeError(f"{_NAME}: count: expected 0 to {len(sources)} rows, got {number}")
    rows = (x[:number].tolist() for x in (sources, targets, lengths))
    return [row for row in zip(*rows, strict=True) if row[2]]


def _copy(sources: Any, targets: Any, lengths: Any, count: Any) -> None:
    for number, (source, target, length) in enumerate(_rows(sources, targets, lengths, count)):
        if length < 0:
            raise RuntimeError(f"{_NAME}: lengths: expected bytes >= 0, got {length}")
        there = _bytes(number, "target", target, length)
        ctypes.memmove(there, _bytes(number, "source", source, length), length)


def _bytes(number: int, what: str, address: int, length: int) -> int:
    """Where the bytes of an address lie: the device's own lie elsewhere than their addresses."""
    find = machine.load().core.kvdouble_bytes
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
    found: int | None = find(address, length)
    if found is None:
        raise RuntimeError(
            f"{_NAME}: row {number}: expected a {what} in memory of the device or pinned memory, "
            f"got {length} bytes at {address:#x}"
        )
    return found


def _check(sources: Any, targets: Any, lengths: Any, count: Any) -> None:
    for name, tensor in (("sources", sources), ("targets", targets), ("lengths", lengths)):
        if tensor.dim() != 1 or len(tensor) != len(sources) or not tensor.is_contiguous():
            refuse(_NAME, f"{name}: expected contiguous [{len(sources)}], got {list(tensor.shape)}")
    for name, tensor in (("sources", sources), ("targets", targets)):
        if tensor.dtype not in (torch.int64, torch.uint64):
            refuse(_NAME, f"{name}: expected int64 addresses, got {tensor.dtype}")
    if count.numel() < 1 or count.is_floating_point() or lengths.is_floating_point():
        refuse(_NAME, "expected lengths and one count of an integer type")


@functools.cache
def _operator() -> Any:
    library = torch.library.Library("kvcore_emulator", "FRAGMENT")
    arguments = ", ".join(f"Tensor {name}" for name in _TENSORS)
    library.define(f"{_NAME}({arguments}) -> ()")
    overload = getattr(torch.ops.kvcore_emulator, _NAME).default
    special = Special(
        _copy,
        meta=lambda *args: None,
        check=_check,
        used=Used(frozenset(_TENSORS), lambda *args: {}),
    )
    kernel = _Copy("kvcore_emulator", _NAME, overload, special)
    library.impl(_NAME, kernel, "PrivateUse1")
    _libraries.append(library)
    return overload


_libraries: list[Any] = []


def sparse_copy(sources: Any, targets: Any, lengths: Any, count: Any, device: Any = None) -> int:
    """Copy lengths[i] bytes from address sources[i] to targets[i], for i below count; 0.

    All four are tensors of the device; addresses are the device's or those of ``empty``'s memory.
    """
    with torch_npu.npu.device(device if device is not None else sources.device):
        _operator()(sources, targets, lengths, count)
    return 0
