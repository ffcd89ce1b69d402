# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: numbers, names, identities, keys, devices and streams."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core import adopt
from kvcore.errors import fail, shown

if TYPE_CHECKING:
    from kvcore.runtime import Device, Stream

__all__ = [
    "check_choice", "check_device", "check_identity", "check_integer", "check_path", "check_stream",
    "each_key", "each_of", "read_indices",
]  # fmt: skip


def check_integer(argument: str, value: object, low: int, high: int | None = None) -> int:
    """The value, when it is an int (no bool, no float) from ``low`` to ``high``.

    Raises ParamInvalidError.
    """
    if type(value) is not int or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        fail(argument, f"an integer {allowed}", shown(value))
    return value


def check_choice(argument: str, value: object, names: Iterable[str], expected: str = "") -> str:
    """The value, when it is one of the names.  Raises ParamInvalidError with the list."""
    # The type first: an array is not compared with a name, and a list is no key of a dict.
    if not isinstance(value, str) or value not in names:
        fail(argument, expected or f"one of {', '.join(names)}", shown(value))
    return value


def check_identity(argument: str, value: Any) -> Hashable:
    """The value, when it can be a key.  Raises ParamInvalidError."""
    try:
        hash(value)
    except TypeError:
        fail(argument, "an identity that can be hashed", type(value).__name__)
    identity: Hashable = value
    return identity


def each_of(argument: str, values: Any) -> Iterator[Any]:
    """An iterator of what is to be several.  Raises ParamInvalidError at once when it is not."""
    try:
        return iter(values)
    except TypeError:
        fail(argument, "several, to be iterated", type(values).__name__)


def each_key(argument: str, values: Any) -> Iterator[Hashable]:
    """The keys one by one, as far as they are asked for.  Raises ParamInvalidError."""
    for place, key in enumerate(each_of(argument, values)):
        yield check_identity(f"{argument}[{place}]", key)


def read_indices(argument: str, values: Any, axes: int | None = 1) -> NDArray[Any]:
    """An int32 or int64 array of any package as a numpy array that shares its memory.

    axes: how many it must have; None: any.  Raises ParamNullError and ParamInvalidError.
    """
    if values is not None and isinstance(values, str | int | float | list | tuple | dict):
        fail(argument, "an int32 or int64 array", type(values).__name__)
    array = adopt.as_numpy(values, argument)
    if array.dtype not in (np.int32, np.int64):
        fail(argument, "an int32 or int64 array", array.dtype)
    if axes is not None and array.ndim != axes:
        fail(argument, "one axis" if axes == 1 else f"{axes} axes", f"shape {array.shape}")
    return array


def check_device(argument: str, value: Any) -> Device:
    """The value, when it is a device.  Raises ParamInvalidError."""
    from kvcore.runtime import Device

    if not isinstance(value, Device):
        fail(argument, "a kvcore.Device", type(value).__name__)
    return value


def check_stream(argument: str, value: Any) -> Stream:
    """The value, when it is a stream.  Raises ParamInvalidError."""
    from kvcore.runtime import Stream

    if not isinstance(value, Stream):
        fail(argument, "a stream of a device", type(value).__name__)
    return value


def check_path(argument: str, value: Any) -> str:
    """The value as a path that can be asked for.  Raises ParamInvalidError."""
    # (an int would be a file that is open already)
    if not isinstance(value, str | os.PathLike):
        fail(argument, "the path of a file", type(value).__name__)
    path = os.fspath(value)
    try:
        good = isinstance(path, str) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        good = False
    if not good:
        fail(argument, "the path of a file", ascii(path))
    return str(path)
