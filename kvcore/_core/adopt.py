# SPDX-License-Identifier: Apache-2.0
"""The slow door for arrays: everything but a plain numpy array of a known dtype.

``read`` returns (address, shape, strides in bytes, dtype row, item size, read-only, on a device,
what to keep alive) and words every error about an object that is no usable array.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from kvcore import dtypes
from kvcore._core import dlpack
from kvcore.errors import ParamInvalidError, ParamNullError, fail

__all__ = ["Reading", "as_raw", "dtype_name", "is_fixed", "not_an_array", "numpy_dtype", "read"]

Reading = tuple[int, tuple[int, ...], tuple[int, ...], int, int, bool, bool, Any]

MAX_RANK = 8
NOT_IN_TABLE = -1
# Unpacked float4 types of numpy extension packages: one byte an element.
UNPACKED_FLOAT4 = {
    "float4_e2m1fn": "float4_e2m1",
    "float4_e2m1": "float4_e2m1",
    "float4_e1m2": "float4_e1m2",
    "float4_e1m2fn": "float4_e1m2",
}
TORCH_NAMES = {"float4_e2m1fn_x2": "float4_e2m1"}


def numpy_dtype(row: dtypes.DType) -> np.dtype[Any] | None:
    """numpy's dtype of that row, None where no installed package has one (or it is packed)."""
    if row.packed:
        return None
    if row.name in ("bfloat16", "float8_e5m2", "float8_e4m3fn"):
        known: np.dtype[Any] = np.dtype(getattr(ml_dtypes, row.name))
        return known
    if row.name == "hifloat8":
        # en_dtypes is optional and slow to import: its arrays are known by name once they appear.
        package = sys.modules.get("en_dtypes")
        return None if package is None else np.dtype(package.hifloat8)
    return np.dtype(row.name)


def not_an_array(obj: object, name: str) -> ParamInvalidError | ParamNullError:
    """The error for an argument that is missing or no array at all."""
    if obj is None:
        return ParamNullError(
            f"{name}: expected an array, got None",
            argument=name,
            seen=None,
            expected="an array",
        )
    kind = type(obj).__name__
    return ParamInvalidError(
        f"{name}: expected an array (numpy, torch, DLPack, buffer protocol), got {kind}",
        argument=name,
        seen=kind,
        expected="an array",
    )


def read(obj: Any, name: str) -> Reading:
    """Describe any array; raises ParamNullError or ParamInvalidError naming the argument."""
    if isinstance(obj, np.ndarray):
        return _numpy(obj, name, None)
    inner = getattr(obj, "__kvcore_array__", None)
    if inner is not None:
        return _numpy(inner, name, inner)
    if _is_torch(obj):
        return _torch(obj, name)
    if obj is None or isinstance(obj, np.generic | str | int | float | list | tuple | dict):
        raise not_an_array(obj, name)
    if hasattr(obj, "__array_interface__"):
        try:
            array = np.asarray(obj)
            shared = array.ctypes.data == obj.__array_interface__["data"][0] or array.size == 0
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise _unreadable(name, "__array_interface__", error) from error
        if not shared:
            fail(name, "an __array_interface__ that shares memory", "a copy")
        return _numpy(array, name, array)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _dlpack(obj, name)
    try:
        view = memoryview(obj)
    except TypeError:
        raise not_an_array(obj, name) from None
    try:
        array = np.asarray(view)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _unreadable(name, "buffer", error) from error
    return _numpy(array, name, array)


class _Raw:
    """Shared memory as a raw unsigned numpy array; holds its owner."""

    def __init__(self, reading: Reading, owner: object) -> None:
        address, shape, strides, _, itemsize, read_only, _, _ = reading
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, read_only),
            "shape": shape,
            "strides": strides,
            "typestr": f"{'<' if sys.byteorder == 'little' else '>'}u{itemsize}"
            if itemsize > 1
            else "|u1",
        }


def as_raw(obj: Any, name: str) -> np.ndarray[Any, Any]:
    """A numpy view of any array as unsigned items of its size, sharing its memory."""
    reading = read(obj, name)
    if reading[4] not in (1, 2, 4, 8):
        fail(name, "items of 1, 2, 4 or 8 bytes", f"dtype {dtype_name(obj)}")
    return np.asarray(_Raw(reading, (obj, reading[7])))


def is_fixed(obj: Any) -> bool:
    """Whether the object's memory and shape cannot change while something keeps it exported."""
    return not (isinstance(obj, np.ndarray) or _is_torch(obj) or hasattr(obj, "__kvcore_array__"))


def dtype_name(obj: Any) -> str:
    """The dtype's name as its owner spells it, for messages."""
    inner = getattr(obj, "__kvcore_array__", obj)
    found = getattr(inner, "dtype", None)
    return type(obj).__name__ if found is None else str(found).removeprefix("torch.")


def _unreadable(name: str, what: str, error: Exception) -> ParamInvalidError:
    return ParamInvalidError(
        f"{name}: expected a readable {what}, got {type(error).__name__}: {error}",
        argument=name,
        seen=str(error),
        expected=f"a readable {what}",
    )


def _numpy(array: Any, name: str, owner: Any) -> Reading:
    if isinstance(array, np.ma.MaskedArray):
        fail(name, "an array without a mask", "a MaskedArray")
    found = array.dtype
    if array.ndim > MAX_RANK:
        fail(name, f"at most {MAX_RANK} axes", array.ndim)
    if found.byteorder not in "=|" and not found.isnative:
        fail(name, "native byte order", f"dtype {found.str}")
    row = row_of_name(str(found.name), name)
    return (
        array.ctypes.data,
        array.shape,
        array.strides,
        row,
        found.itemsize,
        not array.flags.writeable,
        False,
        owner,
    )


def row_of_name(spelled: str, name: str) -> int:
    if spelled in UNPACKED_FLOAT4:
        known = UNPACKED_FLOAT4[spelled]
        fail(
            name,
            f"packed float4 (uint8 with dtype={known!r}; kvcore.pack_float4 packs)",
            f"an unpacked array of {spelled}, one byte an element",
        )
    row = dtypes.BY_NAME.get(spelled)
    return NOT_IN_TABLE if row is None else row.id


def torch_tensor_type() -> Any:
    """torch.Tensor where torch is loaded, else None."""
    module = sys.modules.get("torch")
    return None if module is None else getattr(module, "Tensor", None)


def _is_torch(obj: Any) -> bool:
    module = sys.modules.get("torch")
    return module is not None and isinstance(obj, getattr(module, "Tensor", ()))


def _torch(tensor: Any, name: str) -> Reading:
    torch: Any = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        fail(name, "a dense (strided) tensor", f"layout {tensor.layout}")
    if tensor.is_quantized:
        fail(name, "a tensor that is not quantized", str(tensor.dtype))
    if tensor.requires_grad:
        fail(
            name,
            "a tensor that does not require grad (use .detach())",
            "requires_grad=True",
        )
    if tensor.is_conj() or tensor.is_neg():
        fail(
            name,
            "a tensor without a conj or neg view (use .resolve_conj())",
            "a lazy view",
        )
    kind = tensor.device.type
    if kind not in ("cpu", "npu"):
        fail(
            name,
            "a tensor on 'cpu' (or 'npu' with the aclnn backend)",
            f"device {kind!r}",
        )
    if tensor.dim() > MAX_RANK:
        fail(name, f"at most {MAX_RANK} axes", tensor.dim())
    spelled = str(tensor.dtype).removeprefix("torch.")
    row = (
        row_of_name(TORCH_NAMES.get(spelled, spelled), name)
        if spelled not in TORCH_NAMES
        else (dtypes.BY_NAME[TORCH_NAMES[spelled]].id)
    )
    itemsize = tensor.element_size()
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:  # functional, fake and other tensors without storage
        raise _unreadable(name, "tensor with memory of its own", error) from error
    return (
        address,
        tuple(tensor.shape),
        tuple(step * itemsize for step in tensor.stride()),
        row,
        itemsize,
        False,
        kind == "npu",
        None,
    )


def _dlpack(obj: Any, name: str) -> Reading:
    try:
        holder = dlpack.import_tensor(obj)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise _unreadable(name, "DLPack tensor", error) from error
    if holder.device_type not in (1, 3, 11):  # kDLCPU, kDLCUDAHost, kDLROCMHost
        fail(name, "host memory", f"DLPack device type {holder.device_type}")
    if len(holder.shape) > MAX_RANK:
        fail(name, f"at most {MAX_RANK} axes", len(holder.shape))
    row = dtypes.BY_NAME.get(holder.dtype_name)
    return (
        holder.address,
        holder.shape,
        holder.strides,
        NOT_IN_TABLE if row is None else row.id,
        holder.itemsize,
        holder.read_only,
        False,
        holder,
    )
