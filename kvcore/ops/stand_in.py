# SPDX-License-Identifier: Apache-2.0
"""Arrays that are not there: a name, a shape and a dtype, for the rules that need no memory.

The rules of every operator read ArrayInfo; a StandIn has the same attributes, is contiguous,
writable and of any size, so that a cache of gigabytes can be checked without one.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore import dtypes
from kvcore._core import adopt, arrays
from kvcore.dtypes import DType
from kvcore.errors import fail, in_words, shown
from kvcore.strides import dense_strides

__all__ = ["StandIn", "info_of"]

PAIR = "an array or a pair (shape, dtype)"


@dataclass(frozen=True, slots=True)
class StandIn:
    """What ArrayInfo says of an array, without one."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType | None
    dtype_name: str
    itemsize: int
    read_only: bool = False
    on_device: bool = False
    address: int = 0


def info_of(value: Any, name: str) -> Any:
    """ArrayInfo of an array, a StandIn of a pair (shape, dtype), None of None.

    shape: counts elements, of float4 too, as documents and logs have it; torch's type of two
    elements, float4_e2m1fn_x2, counts pairs.  dtype: a name, or a dtype object of numpy, ml_dtypes,
    en_dtypes or torch.
    """
    if value is None:
        return None
    if not isinstance(value, (tuple, list)):
        return arrays.read(value, name)
    if len(value) != 2:
        fail(name, PAIR, f"a {type(value).__name__} of {len(value)}")
    shape = _shape(value[0], name)
    row, spelled, itemsize, per_item = _dtype(value[1], name)
    shape = _stored(shape, per_item, spelled, name)
    if math.prod(max(size, 1) for size in shape) * itemsize > 2**63 - 1:
        fail(name, "an array below 2**63 bytes", f"shape {list(shape)} of {spelled}")
    return StandIn(name, shape, dense_strides(shape, itemsize), row, spelled, itemsize)


def _stored(shape: tuple[int, ...], per_item: int, spelled: str, name: str) -> tuple[int, ...]:
    """The shape of the stored items: two elements of a packed type share one."""
    if per_item == 1 or not shape:
        return shape
    if shape[-1] % per_item:
        fail(name, f"a last axis of an even size ({spelled} is two a byte)", list(shape))
    return (*shape[:-1], shape[-1] // per_item)


def _shape(value: Any, name: str) -> tuple[int, ...]:
    try:
        shape = tuple(operator.index(size) for size in value)
    except TypeError:
        fail(name, PAIR, f"the shape {shown(value)}")
    if any(size < 0 for size in shape):
        fail(name, "a shape of sizes >= 0", list(shape))
    if len(shape) > adopt.MAX_RANK:
        fail(name, f"at most {adopt.MAX_RANK} axes", len(shape))
    return shape


def _dtype(value: Any, name: str) -> tuple[DType | None, str, int, int]:
    """(row, name, bytes of an item, elements of the shape that an item holds)."""
    if isinstance(value, DType):
        return value, value.name, value.itemsize, 2 if value.packed else 1
    spelled = in_words(value)
    row = dtypes.named(spelled)
    spelled = spelled.removeprefix("torch.")
    if row is None:
        try:
            found = np.dtype(value)
        except TypeError:
            found = None
        if found is None or value is None:  # numpy takes None for float64
            fail(name, "a dtype or the name of one", shown(value))
        if not found.isnative:
            fail(name, "native byte order", f"dtype {found.str}")
        # Unpacked float4 types are refused here as in an array.
        i = adopt.row_of_name(found.name, name)
        if i < 0:
            return None, found.name, found.itemsize, 1
        row = dtypes.TABLE[i]
    return row, row.name, row.itemsize, 2 if row.packed and spelled == row.name else 1
