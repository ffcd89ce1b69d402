# SPDX-License-Identifier: Apache-2.0
"""Index arrays that callers keep, as numpy views of what was passed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core import adopt
from kvcore.errors import KVCoreError, ParamNullError
from kvcore.ops import checks

__all__ = ["Indices", "index_array", "written_array"]

Indices = NDArray[Any]


def index_array(obj: Any, name: str, ranks: tuple[int, ...], axes: str) -> Indices:
    """A view of an index array (a copy of a list) of int32 or int64 and one of these ranks."""
    if obj is None:
        raise ParamNullError(
            f"{name}: expected an index array, got None",
            argument=name,
            seen=None,
            expected="an index array",
        )
    if isinstance(obj, list | tuple):
        try:
            array = np.asarray(obj)
        except (TypeError, ValueError, RuntimeError):
            checks.fail(name, "an index array", type(obj).__name__)
        if array.size == 0:
            array = array.astype(np.int64)  # numpy reads an empty list as floats
    elif isinstance(obj, int | np.integer):
        array = np.asarray(obj)
    else:
        try:
            array = adopt.as_numpy(obj, name)
        except KVCoreError as error:
            if error.expected != "an array":
                raise
            checks.fail(name, "an array of dtype int32 or int64", type(obj).__name__)
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        checks.fail(name, "dtype int32 or int64", array.dtype)
    if array.ndim not in ranks:
        checks.fail(name, f"shape {axes}", list(array.shape))
    return array


def written_array(obj: Any, name: str, ranks: tuple[int, ...], axes: str) -> Indices:
    """The same for an array that is written in place."""
    if isinstance(obj, list | tuple):
        checks.fail(name, "an array to write in place", type(obj).__name__)
    array = index_array(obj, name, ranks, axes)
    if not array.flags.writeable:
        checks.fail(name, "a writable array", "a read-only one")
    return array
