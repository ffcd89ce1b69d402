# SPDX-License-Identifier: Apache-2.0
"""What torch's DLPack table does not say of a tensor, asked in C.

A storage can be made smaller than a view of it: ``untyped_storage().resize_()`` does, and the view
keeps its shape.  A tensor may stand for the negative of its memory, or want a gradient.  To ask all
this in Python takes longer than everything else that a call reads of a tensor, and runs the code of
a torch function mode.  So libtorch is asked: for the storage through its stable C interface, for
the rest through two of its C++ functions, whose names are those that GCC and Clang make.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.strides import extent

__all__ = ["Questions", "is_too_small", "questions"]

LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll")
CORE_LIBRARIES = ("libc10.so", "libc10.dylib", "c10.dll")
#: bool at::native::is_neg(const at::Tensor&), bool c10::TensorImpl::requires_grad() const
IS_NEGATIVE = "_ZN2at6native6is_negERKNS_6TensorE"
REQUIRES_GRAD = "_ZNK3c1010TensorImpl13requires_gradEv"


class Questions(NamedTuple):
    """Where a Python tensor holds its C++ one, and the addresses of four functions.

    The first two take (the C++ tensor, a place for an int64) and return 0 when they have answered:
    with the bytes of the tensor's storage, and with the elements of it before the tensor's first.
    The third takes the C++ tensor, the fourth what its first word points at, its implementation;
    they return a bool.  Both are 0 where this torch has not both.
    """

    tensor_at: int
    storage_bytes: int
    storage_offset: int
    is_negative: int = 0
    requires_grad: int = 0


def questions() -> Questions | None:
    """The ways to ask, proven on tensors; None where this torch offers them not."""
    torch: Any = sys.modules["torch"]
    try:
        probe = torch.empty(7, dtype=torch.int16)[2:5]
        tensor_at = _place(probe)
        library = _library(torch, LIBRARIES)
        functions = [library.aoti_torch_get_storage_size, library.aoti_torch_get_storage_offset]
        for function, wanted in zip(functions, (14, 2), strict=True):
            answer = ctypes.c_int64(-1)
            status = function(ctypes.c_void_p(id(probe) + tensor_at), ctypes.byref(answer))
            if (status, answer.value) != (0, wanted):
                return None
        storage_bytes, storage_offset = map(_address, functions)
    except Exception:  # another torch, a mode in force: asked in Python then
        return None
    return Questions(tensor_at, storage_bytes, storage_offset, *_flags(torch, tensor_at))


def _flags(torch: Any, tensor_at: int) -> tuple[int, int]:
    """The addresses of the questions after the negative and the gradient, proven; (0, 0): none."""
    try:
        is_negative = getattr(_library(torch, LIBRARIES), IS_NEGATIVE)
        requires_grad = getattr(_library(torch, CORE_LIBRARIES), REQUIRES_GRAD)
        is_negative.restype = requires_grad.restype = ctypes.c_bool
        plain = torch.empty(1)
        negative = torch.empty(1, dtype=torch.complex64).conj().imag
        leaf = torch.empty(1, requires_grad=True)
        for probe in (plain, negative, leaf, leaf.detach()):
            place = id(probe) + tensor_at
            if _place(probe) != tensor_at:
                return 0, 0
            implementation = ctypes.c_void_p.from_address(place)
            answers = is_negative(ctypes.c_void_p(place)), requires_grad(implementation)
            if answers != (probe is negative, probe is leaf):
                return 0, 0
    except Exception:
        return 0, 0
    return _address(is_negative), _address(requires_grad)


def _place(tensor: Any) -> int:
    """At how many bytes a Python tensor holds its C++ one."""
    size = type(tensor).__basicsize__ // 8
    words = list((ctypes.c_uint64 * size).from_address(id(tensor)))
    return 8 * words.index(tensor._cdata)  # noqa: SLF001 (no public name has it)


def _library(torch: Any, names: tuple[str, ...]) -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    (found,) = [folder / name for name in names if (folder / name).exists()]
    return ctypes.CDLL(str(found))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def is_too_small(tensor: Any) -> tuple[int, int] | None:
    """(bytes of the storage, bytes that the tensor needs of it) when these are more, else None."""
    if not tensor.numel():
        return None
    _, past = extent(tensor.shape, tensor.stride(), 1)
    needed = (tensor.storage_offset() + past) * tensor.element_size()
    size = tensor.untyped_storage().nbytes()
    return (size, needed) if needed > size else None
