# SPDX-License-Identifier: Apache-2.0
"""numpy arrays of tests as torch tensors on the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume

WITHOUT_TORCH = "torch is not installed"
#: Types that torch has under the same name; others cross as raw bytes, named with dtype=.
TORCH_TYPES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "int8": "int8",
    "uint8": "uint8",
    "int16": "int16",
    "uint16": "uint16",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "float8_e5m2": "float8_e5m2",
    "float8_e4m3fn": "float8_e4m3fn",
}


def tensor(array: Any) -> Any:
    """The array's memory as a tensor of its type (raw unsigned for a type torch lacks)."""
    import torch

    # torch has none of the three: read-only memory, negative steps, steps between whole items.
    assume(array.flags.writeable)
    assume(all(step >= 0 and step % array.itemsize == 0 for step in array.strides))
    item = array.itemsize
    name = TORCH_TYPES.get(array.dtype.name, f"uint{8 * item}")
    whole = _memory(array)
    if whole is None or not array.size:
        raw = array.view(f"u{item}") if array.dtype.kind not in "iu" else array
        return torch.from_numpy(raw).view(getattr(torch, name))
    # The storage is all of the memory that the array is a view of, as a view of a tensor has it.
    offset = array.ctypes.data - whole.ctypes.data
    whole = whole[offset % item :]
    whole = whole[: len(whole) // item * item]
    storage = torch.from_numpy(whole).view(getattr(torch, name))
    return storage.as_strided(array.shape, [s // item for s in array.strides], offset // item)


def _memory(array: Any) -> Any:
    """The bytes at the end of the chain of bases; None where these are no plain buffer."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    plain = array.flags.c_contiguous and array.flags.writeable
    return array.reshape(-1).view(np.uint8) if plain else None


def tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with tensors for its arrays."""
    return {n: tensor(a) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}


def raw_types(arguments: dict[str, Any]) -> dict[str, Any]:
    """dtype= and value_dtype= that a call needs once types that torch lacks are raw bytes."""
    named = {}
    for keyword, argument in (("dtype", "key"), ("value_dtype", "value")):
        array = arguments.get(argument)
        if isinstance(array, np.ndarray) and array.dtype.name not in TORCH_TYPES:
            named[keyword] = array.dtype.name
    return named
