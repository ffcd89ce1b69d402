# SPDX-License-Identifier: Apache-2.0
"""Device memory as arrays, without a runtime around it: for the self test, and for tests.

Programs use ``kvcore.Device(backend="aclnn")`` or torch_npu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core import adopt
from kvcore.dtypes import BY_NAME
from kvcore.npu.call import copies
from kvcore.npu.call.memory import DeviceMemory, allocate
from kvcore.npu.cann import library
from kvcore.strides import dense_strides

__all__ = ["DeviceArray"]


class DeviceArray:
    """An array on the device, or a view of one; strides in bytes, dtype by kvcore's name."""

    read_only = False
    #: The stream that calls with this array run on: the default stream.
    stream = 0

    def __init__(
        self,
        memory: DeviceMemory,
        shape: Sequence[int],
        dtype: str,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> None:
        self.memory = memory
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype = dtype
        self.itemsize: int = BY_NAME[dtype].itemsize
        self.strides: tuple[int, ...] = tuple(strides or dense_strides(shape, self.itemsize))
        self.address: int = memory.address + offset
        self.base: int = memory.address
        self.storage_bytes: int = memory.nbytes
        self.device_id: int = memory.device_id

    @classmethod
    def of(cls, array: NDArray[Any], dtype: str | None = None, device_id: int = 0) -> DeviceArray:
        """A contiguous copy of a host array; dtype names what its items are."""
        cann = library.current()
        dense = np.ascontiguousarray(array)
        memory = allocate(cann, device_id, dense.nbytes)
        if dense.nbytes:
            try:
                with cann.on_device(device_id):
                    copies.to_device(cann, memory.address, dense.ctypes.data, dense.nbytes)
            except BaseException:
                memory.free()
                raise
        return cls(memory, array.shape, dtype or array.dtype.name)

    @property
    def __kvcore_device_array__(self) -> DeviceArray:
        return self

    def empty(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """A new array on the same device."""
        nbytes = int(np.prod(shape)) * BY_NAME[dtype].itemsize
        return DeviceArray(allocate(library.current(), self.device_id, nbytes), shape, dtype)

    def seen_as(
        self, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
    ) -> DeviceArray:
        """Another view of the same memory; offset in bytes from its beginning."""
        return DeviceArray(self.memory, shape, self.dtype, strides, offset)

    def to_host(self) -> NDArray[Any]:
        """Wait for the device and copy; types that numpy lacks come as unsigned integers."""
        cann = library.current()
        with cann.on_device(self.device_id):
            cann.aclrtSynchronizeDevice()
            row = BY_NAME[self.dtype]
            kind = adopt.numpy_dtype(row) or np.dtype(row.raw)
            whole = np.empty(self.storage_bytes, np.uint8)
            if whole.nbytes:
                copies.to_host(cann, whole.ctypes.data, self.base, whole.nbytes)
            return np.ndarray(
                self.shape, kind, whole.data, self.address - self.base, self.strides
            ).copy()

    def free(self) -> None:
        """Free the memory; no work on the device may still use it."""
        self.memory.free()
