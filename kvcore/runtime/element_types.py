# SPDX-License-Identifier: Apache-2.0
"""Types of elements: the public name, the numpy type that carries it, one value of it."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore._core import adopt
from kvcore.errors import fail, shown

__all__ = ["REGISTERED", "element_type", "one_value"]

#: The public names, for messages.
NAMES = ", ".join(adopt.DTYPE_NAMES)
REGISTERED = 2  # dtype.isbuiltin of types that packages bring
# Types without a numpy name when no package provides one: carried as their bits.
_RAW = {"hifloat8": "uint8", "float4_e2m1": "uint8", "float4_e1m2": "uint8"}
#: Integers of ml_dtypes, which numpy does not know for integers.
_NARROW = ("int2", "int4", "uint2", "uint4")


def element_type(dtype: object) -> tuple[str, np.dtype[Any]]:
    """The public name of a type and the numpy type that carries it."""
    if isinstance(dtype, str):
        if dtype in _RAW and dtype.startswith("float4"):
            # Packed two a byte; numpy may know the name from a package whose type takes a byte an
            # element.
            return dtype, np.dtype(_RAW[dtype])
        # (numpy takes a NUL for a type, and some words of packages for types of objects)
        if dtype.isprintable():
            with contextlib.suppress(TypeError, ValueError, SyntaxError):
                return dtype, np.dtype(dtype)
        for package in ("ml_dtypes", "en_dtypes"):
            with contextlib.suppress(ImportError, AttributeError, TypeError):
                found = getattr(__import__(package), dtype)
                if isinstance(found, type) and not (numpy_type := np.dtype(found)).hasobject:
                    return dtype, numpy_type
        if dtype in _RAW:
            return dtype, np.dtype(_RAW[dtype])
    elif dtype is not None:
        with contextlib.suppress(TypeError, ValueError):
            numpy_type = np.dtype(dtype)  # type: ignore[call-overload]
            if not numpy_type.hasobject:
                return str(numpy_type), numpy_type
    expected = f"the name of an element type, one of {NAMES} or another of numpy's"
    fail("dtype", expected, shown(dtype))


def one_value(dtype: np.dtype[Any], value: Any) -> npt.NDArray[Any] | None:
    """One number as an array of no dimensions; None when it is none, or the type cannot hold it.

    Rounding is no loss; a fraction, a sign, an imaginary part or a size is.
    """
    try:
        if hasattr(type(value), "__dlpack__") and not isinstance(value, np.ndarray):
            value = adopt.as_numpy(value, "value")[()]  # another package's array of one number
        given = np.asarray(value)
        number = given.dtype.kind in "biuf" or isinstance(value, int)
        if given.shape != () or not (
            number
            or given.dtype == dtype
            or (given.dtype.kind == "c" and dtype.kind == "c")
            or (given.dtype.kind == "V" and given.dtype.names is None and dtype.kind != "c")
        ):
            return None
        with np.errstate(all="ignore"):
            one = given.astype(dtype, casting="unsafe")
            if dtype.kind in "biu":
                return one if bool(one == value) else None
            if dtype.name in _NARROW:
                # (compared as they are: numpy would bring the value to these types first)
                return one if int(one[()]) == value else None
            if number and math.isfinite(value) and dtype.kind != "c":
                seen = float(one)
                # (types without an infinity have NaN, or their largest value, in its place)
                if not math.isfinite(seen) or (abs(value) > 1 and abs(seen) < abs(value) / 2):
                    return None
            elif number and math.isfinite(value) and not np.isfinite(one):
                return None
    except (ValueError, TypeError, OverflowError):
        return None
    return one
