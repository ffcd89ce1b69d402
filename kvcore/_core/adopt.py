# SPDX-License-Identifier: Apache-2.0
"""The slow door for arrays: everything but a plain numpy array of a known dtype.

``read`` returns (address, shape, strides in bytes, dtype row, item size, read-only, on a device,
what to keep alive, the numpy array in which a later change would show) and words every error about
an object that is no usable array.  Whether sizes and strides stay inside memory is tested by its
caller, arrays.pyx, in compiled code; ``settle`` words the error where they do not.

Running out of memory is no fault of an object: MemoryError passes as it is.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import ml_dtypes
import numpy as np

from kvcore import dtypes
from kvcore._core import dlpack
from kvcore._core.torch_questions import is_too_small
from kvcore.errors import KVCoreError, ParamInvalidError, ParamNullError, fail

__all__ = [
    "DTYPE_NAMES",
    "Reading",
    "as_numpy",
    "as_raw",
    "changed",
    "dtype_name",
    "is_fixed",
    "is_torch",
    "not_an_array",
    "numpy_dtype",
    "read",
    "row_of_name",
    "settle",
    "torch_tensor_type",
    "zeros_like",
]

Reading = tuple[int, tuple[int, ...], tuple[int, ...], int, int, bool, bool, Any, Any]

MAX_RANK = 8
MAX_BYTES = 2**63 - 1
#: More than any 64-bit machine can address; what claims more is no memory.
MAX_EXTENT = 2**57
NOT_IN_TABLE = -1
HOST_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
# Unpacked float4 types of numpy extension packages: one byte an element.
UNPACKED_FLOAT4 = {
    "float4_e2m1fn": "float4_e2m1",
    "float4_e2m1": "float4_e2m1",
    "float4_e1m2": "float4_e1m2",
    "float4_e1m2fn": "float4_e1m2",
}
# Rows of torch dtypes as they are met, by the dtype itself.
_torch_rows: dict[Any, int] = {}


#: The public names of the types of elements.
DTYPE_NAMES: tuple[str, ...] = tuple(dtypes.BY_NAME)


def numpy_dtype(row: dtypes.DType) -> np.dtype[Any] | None:
    """numpy's dtype of that row, None where no installed package has one (or it is packed)."""
    kind: np.dtype[Any] | None = None
    if row.packed:
        return None
    if hasattr(ml_dtypes, row.name):
        kind = np.dtype(getattr(ml_dtypes, row.name))
    elif row.name == "hifloat8":
        # en_dtypes is optional and slow to import: its arrays are known by name once they appear.
        package = sys.modules.get("en_dtypes")
        kind = None if package is None else np.dtype(package.hifloat8)
    else:
        kind = np.dtype(row.name)
    return kind


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
        return _numpy(obj, name, None, obj)
    if is_torch(obj):
        return _torch(obj, name)
    if obj is None or isinstance(obj, np.generic | str | int | float | list | tuple | dict):
        raise not_an_array(obj, name)
    device = _attribute(obj, "__kvcore_device_array__", name)
    if device is not None:
        return _device(device, name)
    inner = _attribute(obj, "__kvcore_array__", name)
    if isinstance(inner, np.ndarray):
        return _numpy(inner, name, inner, inner)
    interface = _attribute(obj, "__array_interface__", name)
    if interface is not None:
        return _from_interface(obj, interface, name)
    if hasattr(type(obj), "__dlpack__"):
        return _dlpack(obj, name)
    try:
        view = memoryview(obj)
    except TypeError:
        raise not_an_array(obj, name) from None
    except (ValueError, BufferError) as error:  # released, closed
        raise _unreadable(name, "buffer", error) from error
    try:
        # Without copy=False numpy makes a list of what it cannot describe: a copy.
        array = np.asarray(view, copy=False)
    except MemoryError:
        raise
    except Exception as error:
        raise _unreadable(name, "buffer", error) from error
    return _numpy(array, name, array, None)


class _Interface:
    """One reading of an __array_interface__; holds its owner."""

    def __init__(self, interface: object, owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def _attribute(obj: Any, attribute: str, name: str) -> Any:
    try:
        return getattr(obj, attribute, None)
    except (KVCoreError, MemoryError):  # a buffer that was freed says so itself
        raise
    except Exception as error:
        raise _unreadable(name, attribute, error) from error


def _from_interface(obj: Any, interface: Any, name: str) -> Reading:
    try:
        array = np.asarray(_Interface(interface, obj), copy=False)
        stated = interface.get("data")
        shared = not isinstance(stated, tuple) or array.ctypes.data == stated[0] or array.size == 0
    except MemoryError:
        raise
    except Exception as error:
        raise _unreadable(name, "__array_interface__", error) from error
    if not shared:
        fail(name, "an __array_interface__ with an address", f"data {stated}")
    return _numpy(array, name, array, None)


def as_raw(obj: Any, name: str) -> np.ndarray[Any, Any]:
    """A numpy view of any array as unsigned items of its size, sharing its memory."""
    reading = settle(read(obj, name), name)
    address, shape, strides, _, itemsize, read_only, *_ = reading
    if itemsize not in (1, 2, 4, 8):
        fail(name, "items of 1, 2, 4 or 8 bytes", f"dtype {dtype_name(obj)}")
    interface = {
        "version": 3,
        "data": (address, read_only),
        "shape": shape,
        "strides": strides,
        "typestr": np.dtype(f"u{itemsize}").str,
    }
    return np.asarray(_Interface(interface, (obj, reading)))


def as_numpy(obj: Any, name: str) -> np.ndarray[Any, Any]:
    """A numpy array that shares the memory of any array on the host.

    Its elements have numpy's or ml_dtypes' type of the same name (a torch bfloat16 tensor gives
    ml_dtypes' bfloat16); packed float4, and hifloat8 without en_dtypes, are carried as uint8.  A
    numpy array is given back as it is.  Raises ParamNullError or ParamInvalidError naming the
    argument: for no array, for memory of a device, for a type that neither package has.
    """
    inner = obj if isinstance(obj, np.ndarray) else _attribute(obj, "__kvcore_array__", name)
    if not isinstance(inner, np.ndarray):
        reading = read(obj, name)
        if reading[6]:
            fail(name, "memory of the host", "memory of a device")
        if not isinstance(reading[7], np.ndarray):
            return _shared(obj, settle(reading, name), name)
        inner = reading[7]
    if isinstance(inner, np.ma.MaskedArray):
        fail(name, "an array without a mask", "a MaskedArray")
    return inner if type(inner) is np.ndarray else np.ndarray.view(inner, np.ndarray)


def _shared(obj: Any, reading: Reading, name: str) -> np.ndarray[Any, Any]:
    address, shape, strides, row, itemsize, read_only, _, owner, _ = reading
    if row == NOT_IN_TABLE:
        spelled = owner.dtype_name if isinstance(owner, dlpack.Tensor) else dtype_name(obj)
        kind = _other_dtype(spelled, itemsize)
        if kind is None:
            fail(name, "elements of a type that numpy or ml_dtypes has", f"dtype {spelled}")
    else:
        found = dtypes.TABLE[row]
        kind = numpy_dtype(found) or np.dtype(found.raw)
    interface = {
        "version": 3,
        "data": (address, read_only),
        "shape": shape,
        "strides": strides,
        "typestr": f"|V{itemsize}",
    }
    return np.asarray(_Interface(interface, (obj, reading))).view(kind)


def _other_dtype(spelled: str, itemsize: int) -> np.dtype[Any] | None:
    """The type of that name and size that is in no row of the table: float64, bool, float8_e8m0."""
    found = getattr(ml_dtypes, spelled, None)
    try:
        kind = np.dtype(spelled if found is None else found)
    except TypeError:
        return None
    return kind if kind.itemsize == itemsize and not kind.hasobject else None


def zeros_like(obj: Any, shape: tuple[int, ...], name: str) -> Any:
    """A new array of zeros of the same element type: a torch tensor for one, else numpy's."""
    if not is_torch(obj):
        return np.zeros(shape, as_numpy(obj, name).dtype)
    read(obj, name)
    torch: Any = sys.modules["torch"]
    # As bytes: torch fills no tensor of its packed types.
    *outer, last = shape
    made = torch.zeros((*outer, last * obj.dtype.itemsize), dtype=torch.uint8, device=obj.device)
    return made.view(obj.dtype)


def changed(name: str) -> ParamInvalidError:
    """The error for an array that is no longer what it was when its user took it."""
    expected = "the memory, shape and dtype it had when it was given"
    return ParamInvalidError(
        f"{name}: expected {expected}, got an array that changed since; give it again",
        argument=name.partition("[")[0],
        seen="an array that changed since",
        expected=expected,
    )


def is_fixed(obj: Any) -> bool:
    """Whether the object's memory and shape cannot change while something keeps it exported."""
    return not (
        isinstance(obj, np.ndarray)
        or is_torch(obj)
        or hasattr(obj, "__kvcore_device_array__")
        or hasattr(obj, "__kvcore_array__")
        or hasattr(obj, "__array_interface__")
    )


def dtype_name(obj: Any) -> str:
    """The dtype's name as its owner spells it, for messages."""
    inner = getattr(obj, "__kvcore_array__", obj)
    found = getattr(inner, "dtype", None)
    if found is not None:
        spelled: str = str(found)
        return spelled.removeprefix("torch.")
    if hasattr(inner, "__array_interface__"):
        return str(np.dtype(inner.__array_interface__["typestr"]))
    if hasattr(type(inner), "__dlpack__"):
        return dlpack.import_tensor(inner).dtype_name
    return str(np.asarray(memoryview(inner)).dtype)


def _unreadable(name: str, what: str, error: Exception) -> ParamInvalidError:
    return ParamInvalidError(
        f"{name}: expected a readable {what}, got {type(error).__name__}: {error}",
        argument=name,
        seen=str(error),
        expected=f"a readable {what}",
    )


def settle(reading: Reading, name: str) -> Reading:
    """The same with strides of 64 bits; raises when no memory can hold the array."""
    address, shape, strides, row, itemsize, read_only, on_device, owner, source = reading
    if len(shape) > MAX_RANK:
        fail(name, f"at most {MAX_RANK} axes", len(shape))
    low, high, nbytes = address, address + itemsize, itemsize
    for size, step in zip(shape, strides, strict=True):
        if size < 0:
            fail(name, "sizes that are not negative", list(shape))
        nbytes *= max(size, 1)
        if size > 1:
            low, high = low + min(0, (size - 1) * step), high + max(0, (size - 1) * step)
    if nbytes > MAX_BYTES:
        fail(name, "less than 2**63 bytes", f"shape {list(shape)}")
    if 0 not in shape:
        if address == 0:
            fail(name, "an array with memory", "a null pointer")
        if low <= 0 or high > MAX_BYTES or high - low > MAX_EXTENT:
            seen = f"shape {tuple(shape)}, strides {tuple(strides)} bytes"
            fail(name, "strides inside the address space", seen)
    # Those of an axis of one or of an empty array mean nothing and may be anything.
    strides = tuple([step if -MAX_BYTES <= step <= MAX_BYTES else 0 for step in strides])
    return address, shape, strides, row, itemsize, read_only, on_device, owner, source


def _numpy(array: Any, name: str, owner: Any, source: Any) -> Reading:
    if isinstance(array, np.ma.MaskedArray):
        fail(name, "an array without a mask", "a MaskedArray")
    if type(array) is not np.ndarray:
        # A subclass may answer for shape or dtype what it likes.
        array = np.ndarray.view(array, np.ndarray)
    found = array.dtype
    if found.itemsize >= 2**31:
        fail(name, "items of a few bytes", f"dtype {found.name}")
    if not found.isnative:
        fail(name, "native byte order", f"dtype {found.str}")
    return (
        array.ctypes.data,
        array.shape,
        array.strides,
        row_of_name(str(found.name), name),
        found.itemsize,
        not array.flags.writeable,
        False,
        owner,
        source,
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


def is_torch(obj: Any) -> bool:
    """Whether it is a torch tensor; torch is not imported to find out."""
    module = sys.modules.get("torch")
    return module is not None and isinstance(obj, getattr(module, "Tensor", ()))


def _torch(tensor: Any, name: str) -> Reading:
    torch: Any = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        fail(name, "a dense (strided) tensor", f"layout {tensor.layout}")
    if tensor.requires_grad:
        fail(name, "a tensor that does not require grad (use .detach())", "requires_grad=True")
    if tensor.is_conj() or tensor.is_neg():
        fail(name, "a tensor without a conj or neg view (use .resolve_conj())", "a lazy view")
    on_device = not tensor.is_cpu
    if on_device and tensor.device.type != "npu":
        seen = f"device {tensor.device.type!r}"
        fail(name, "a tensor on 'cpu' (or 'npu' with the aclnn backend)", seen)
    found = tensor.dtype
    row = _torch_rows.get(found)
    if row is None:
        if tensor.is_quantized:
            fail(name, "a tensor that is not quantized", str(found))
        known = dtypes.named(str(found))
        row = _torch_rows[found] = NOT_IN_TABLE if known is None else known.id
    itemsize = found.itemsize
    try:
        address = tensor.data_ptr()
        shape = tensor.shape
        strides = tuple([step * itemsize for step in tensor.stride()])
        short = None if on_device or not address else is_too_small(tensor)
    except MemoryError:
        raise
    except Exception as error:  # nested, functional, fake tensors; a warning that is an error
        raise _unreadable(name, "tensor with memory of its own", error) from error
    if short is not None:
        size, needed = short
        fail(name, f"a storage of at least {needed} bytes, which the tensor spans", size)
    return (address, shape, strides, row, itemsize, False, on_device, None, None)


def _device(array: Any, name: str) -> Reading:
    """Memory of a device, described by its owner: what ``__kvcore_device_array__`` gave."""
    try:
        row = dtypes.BY_NAME.get(array.dtype)
        shape = tuple([operator.index(size) for size in array.shape])
        strides = tuple([operator.index(step) for step in array.strides])
        itemsize = operator.index(array.itemsize)
        if len(shape) != len(strides) or not 0 <= itemsize < 2**31:
            fail(name, "a stride an axis and items of a few bytes", f"{strides}, {itemsize} bytes")
        return (
            operator.index(array.address),
            shape,
            strides,
            NOT_IN_TABLE if row is None else row.id,
            itemsize,
            bool(array.read_only),
            True,
            array,
            None,
        )
    except (KVCoreError, MemoryError):
        raise
    except Exception as error:
        raise _unreadable(name, "__kvcore_device_array__", error) from error


def _dlpack(obj: Any, name: str) -> Reading:
    try:
        holder = dlpack.import_tensor(obj)
    except MemoryError:
        raise
    except Exception as error:
        raise _unreadable(name, "DLPack tensor", error) from error
    if holder.device_type not in HOST_DEVICES:
        fail(name, "host memory", f"DLPack device type {holder.device_type}")
    if holder.is_copy:
        fail(name, "memory shared with its owner", "a copy that __dlpack__() made")
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
        None,
    )
