# SPDX-License-Identifier: Apache-2.0
"""CPU tensors over the bytes of NPU tensors, without a copy.

A device address and its byte lie at a constant distance, so one CPU tensor over the whole range of
addresses, for each dtype, has every NPU tensor as a strided view.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvcore.emulator import machine

__all__ = ["Views", "span"]


class Views:
    """Makes CPU tensors over the bytes of the device.

    start, end: device addresses.  swapped: from here on they are the device's view of registered
    host memory, whose bytes are the host's.
    """

    start: int
    swapped: int

    def __init__(self) -> None:
        loaded = machine.load()
        self._core = loaded.core
        self._core.kvdouble_host_address.restype = ctypes.c_void_p
        self._core.kvdouble_host_address.argtypes = [ctypes.c_void_p]
        self.start, size, alias, self.swapped = loaded.ranges()
        self.end: int = self.start + size
        whole = (ctypes.c_char * size).from_address(self.start + alias)
        self._bytes = torch.frombuffer(whole, dtype=torch.uint8)
        self._whole: dict[Any, Any] = {}

    def of(self, tensor: Any) -> Any:
        """A CPU tensor with the size, strides, dtype and memory of an NPU tensor."""
        made, _ = self.at(
            tensor.shape, tensor.stride(), tensor.dtype, span(tensor), tensor.data_ptr()
        )
        return made

    def at(
        self, size: Any, stride: tuple[int, ...], dtype: Any, extent: int, address: int
    ) -> tuple[Any, bool]:
        """A CPU tensor over the bytes at a device address, and whether it may be used again.

        extent: bytes from its first to past its last.  Registered memory may be another's next
        time, and a tensor without elements is its caller's to resize.
        """
        # Tensors of inference mode could not be written outside of it.
        with torch.inference_mode(False):
            if not extent:
                return torch.empty_strided(size, stride, dtype=dtype), False
            if address >= self.swapped:
                flat = self._of_host(address, extent, dtype)
                return flat.as_strided(size, stride), False
            whole = self._whole.get(dtype)
            if whole is None:
                whole = self._whole[dtype] = self._bytes.view(dtype)
            place = (address - self.start) // whole.itemsize
            return whole.as_strided(size, stride, place), True

    def _of_host(self, address: int, extent: int, dtype: Any) -> Any:
        host = self._core.kvdouble_host_address(address)
        if not host:
            raise RuntimeError(f"{address:#x} is no device address of registered host memory")
        memory = (ctypes.c_char * extent).from_address(host)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def span(tensor: Any) -> int:
    """Bytes from a tensor's first element to past its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.itemsize)
