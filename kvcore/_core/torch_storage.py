# SPDX-License-Identifier: Apache-2.0
"""How large the storage of a torch tensor is, asked in C.

A storage can be made smaller than a view of it: ``untyped_storage().resize_()`` does, and the view
keeps its shape.  torch's DLPack table says nothing of storages, and to ask in Python takes as long
as all else that a call reads of a tensor.  So libtorch is asked through its stable C interface,
which takes the address of the C++ tensor that a Python one holds.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.strides import extent

__all__ = ["Questions", "is_too_small", "questions"]

LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll")


class Questions(NamedTuple):
    """Where a Python tensor holds its C++ one, and the addresses of two functions.

    Each takes (the C++ tensor, a place for an int64) and returns 0 when it has answered: with the
    bytes of the tensor's storage, and with the elements of it before the tensor's first.
    """

    tensor_at: int
    storage_bytes: int
    storage_offset: int


def questions() -> Questions | None:
    """The ways to ask, proven on a tensor; None where this torch offers them not."""
    torch: Any = sys.modules["torch"]
    try:
        probe = torch.empty(7, dtype=torch.int16)[2:5]
        size = type(probe).__basicsize__ // 8
        words = list((ctypes.c_uint64 * size).from_address(id(probe)))
        tensor_at = 8 * words.index(probe._cdata)  # noqa: SLF001 (no public name has it)
        folder = Path(torch.__file__).parent / "lib"
        (found,) = [folder / name for name in LIBRARIES if (folder / name).exists()]
        library = ctypes.CDLL(str(found))
        functions = [library.aoti_torch_get_storage_size, library.aoti_torch_get_storage_offset]
        for function, wanted in zip(functions, (14, 2), strict=True):
            answer = ctypes.c_int64(-1)
            status = function(ctypes.c_void_p(id(probe) + tensor_at), ctypes.byref(answer))
            if (status, answer.value) != (0, wanted):
                return None
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    except Exception:  # another torch, a mode in force: asked in Python then
        return None
    return Questions(tensor_at, *addresses) if all(addresses) else None


def is_too_small(tensor: Any) -> tuple[int, int] | None:
    """(bytes of the storage, bytes that the tensor needs of it) when these are more, else None."""
    if not tensor.numel():
        return None
    _, past = extent(tensor.shape, tensor.stride(), 1)
    needed = (tensor.storage_offset() + past) * tensor.element_size()
    size = tensor.untyped_storage().nbytes()
    return (size, needed) if needed > size else None
