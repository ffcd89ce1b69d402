# SPDX-License-Identifier: Apache-2.0
"""As much of torch and torch_npu as the backend asks of them, over the double's memory."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from kvcore.npu.call.device_arrays import DeviceArray

__all__ = ["FakeTorch", "Tensor"]


class DType:
    def __init__(self, name: str, itemsize: int) -> None:
        self.name = name
        self.itemsize = itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Tensor:
    """A tensor on an NPU."""

    requires_grad = is_quantized = is_cpu = False
    layout = "strided"

    def __init__(self, array: DeviceArray, dtype: DType) -> None:
        self.array = array
        self.dtype = dtype
        self.shape = array.shape
        self.device = types.SimpleNamespace(type="npu", index=array.device_id)

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def data_ptr(self) -> int:
        return self.array.address

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.dtype.itemsize for step in self.array.strides)

    def untyped_storage(self) -> Any:
        array = self.array
        return types.SimpleNamespace(
            data_ptr=lambda: array.base, nbytes=lambda: array.storage_bytes
        )


class FakeTorch:
    """Both modules; ``made`` holds what ``torch.empty`` gave out."""

    def __init__(self, stream: int) -> None:
        self.made: list[Tensor] = []
        self.torch = types.ModuleType("torch")
        self.torch_npu = types.ModuleType("torch_npu")
        for name in ("float16", "int8", "uint8", "int32", "int64"):
            setattr(self.torch, name, DType(name, np.dtype(name).itemsize))
        torch: Any = self.torch
        torch.Tensor = Tensor
        torch.strided = "strided"
        torch.empty = self._empty
        npu: Any = self.torch_npu
        npu.npu = types.SimpleNamespace(
            current_stream=lambda device: types.SimpleNamespace(npu_stream=stream)
        )

    def _empty(self, shape: tuple[int, ...], dtype: DType, device: Any) -> Tensor:
        array = DeviceArray.of(np.full(shape, 77, dtype.name), dtype.name, device.index)
        self.made.append(Tensor(array, dtype))
        return self.made[-1]

    def tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A copy of a host array on the device."""
        placed = DeviceArray.of(array, array.dtype.name)
        made = Tensor(placed, getattr(self.torch, array.dtype.name))
        self.made.append(made)
        return made

    def free(self) -> None:
        """Give back all that was made."""
        for tensor in self.made:
            tensor.array.free()
