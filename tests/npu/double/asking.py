# SPDX-License-Identifier: Apache-2.0
"""What the double's own tests share: one violation at a time, and a small call to be spoilt."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_void_p
from typing import Any

import numpy as np
from double.direct import Double, pointer

OUT = c_void_p()
FLOAT16, INT32 = 1, 3
SYNC, TIME_LINE = 1, 8
H2H, H2D, D2H, D2D = range(4)


def noticed(double: Double, *parts: str) -> None:
    """One violation, with each of these parts in its text."""
    found = double.violations()
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0]


def in_thread(function: Callable[[], Any]) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def get(double: Double, symbol: str, kind: Any, *arguments: Any) -> Any:
    """The value that a call writes through its last argument."""
    out = kind()
    double.ok(double.rt(symbol, *arguments, byref(out)))
    return out.value


class Scatter:
    """A small legal aclnnScatterPaKvCache, to be spoilt."""

    def __init__(self, double: Double) -> None:
        self.double = double
        rng = np.random.default_rng(5)
        self.key = rng.integers(0, 1 << 16, (3, 2, 16), dtype=np.uint16)
        self.cache = rng.integers(0, 1 << 16, (2, 4, 2, 16), dtype=np.uint16)
        self.slots = np.array([5, 0, 7], np.int32)
        self.memory = [double.upload(x) for x in (self.key, self.cache, self.slots)]
        self.memory += [double.upload(x) for x in (self.key, self.cache)]
        self.mode = ctypes.create_string_buffer(b"Norm")
        self.scatter_mode = ctypes.create_string_buffer(b"None")
        self.strides: int | None = None
        self.offsets: int | None = None
        self.tensors: list[int | None] = []
        self.replace: dict[int, int | None] = {}

    def one(self) -> tuple[int, int]:
        self.destroy()
        shapes = [self.key.shape, self.cache.shape, self.slots.shape, self.key.shape]
        for i, shape in enumerate([*shapes, self.cache.shape]):
            if i in self.replace:
                self.tensors.append(self.replace[i])
            else:
                dtype = INT32 if i == 2 else FLOAT16
                self.tensors.append(self.double.tensor(self.memory[i], shape, dtype))
        return self.double.phase_one(
            "aclnnScatterPaKvCache", *map(pointer, self.tensors), None, None, None, self.mode,
            self.scatter_mode, pointer(self.strides), pointer(self.offsets),
        )  # fmt: skip

    def two(
        self, workspace: int | None, size: int, executor: int, stream: int | None = None
    ) -> int:
        return self.double.phase_two("aclnnScatterPaKvCache", workspace, size, executor, stream)

    def launch(self, stream: int | None = None) -> int:
        """Both phases well; the workspace."""
        size, executor = self.one()
        workspace = self.double.malloc(size)
        self.double.ok(self.two(workspace, size, executor, stream))
        return workspace

    def expected(self) -> Any:
        cache = self.cache.copy()
        for i, slot in enumerate(self.slots):
            cache[slot // 4, slot % 4] = self.key[i]
        return cache

    def destroy(self) -> None:
        for handle in self.tensors:
            if handle is not None:
                assert self.double.destroy_tensor(handle) == 0
        self.tensors = []

    def free(self, *more: int) -> None:
        for address in (*self.memory, *more):
            assert self.double.free(address) == 0
