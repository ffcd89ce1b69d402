# SPDX-License-Identifier: Apache-2.0
"""Checks every operator makes of its arguments, and the one shape of their messages.

A message names the argument, what was expected and what was seen:
``slot_mapping: expected shape [9], got [8]``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from kvcore import dtypes
from kvcore._core.arrays import ArrayInfo
from kvcore._core.overlap import check_self
from kvcore.dtypes import DType
from kvcore.errors import ParamNullError, SlotRangeError, fail, in_words, shown
from kvcore.strides import is_dense

__all__ = [
    "INT64_MAX",
    "data_dtype",
    "dtype_named",
    "fail",
    "flag",
    "index_dtype",
    "integers",
    "is_contiguous",
    "listed",
    "mode",
    "need",
    "one_index_dtype",
    "output",
    "rank",
    "same_dtype",
    "shape",
    "slot_fault",
]

INT64_MAX = 2**63 - 1
MOST_LISTED = 64


def need(info: ArrayInfo | None, argument: str, why: str = "an array") -> ArrayInfo:
    """The array, or ParamNullError."""
    if info is None:
        raise ParamNullError(
            f"{argument}: expected {why}, got None",
            argument=argument,
            seen=None,
            expected=why,
        )
    return info


def rank(info: ArrayInfo, ranks: Sequence[int], axes: str) -> None:
    """Require one of these ranks; axes says what they mean, as in "[T, H, D]"."""
    if len(info.shape) not in ranks:
        fail(info.name, f"shape {axes}", list(info.shape))


def shape(info: ArrayInfo, wanted: Sequence[int], axes: str) -> None:
    """Require this very shape."""
    if tuple(info.shape) != tuple(wanted):
        fail(info.name, f"shape {list(wanted)} ({axes})", list(info.shape))


def is_contiguous(info: ArrayInfo) -> bool:
    """Whether the elements lie one after the other in C order."""
    return is_dense(info.shape, info.strides, info.itemsize)


def output(info: ArrayInfo) -> None:
    """Require an array that can be written and whose elements do not overlap."""
    if info.read_only:
        fail(info.name, "a writable array", "a read-only one")
    check_self(info)


def dtype_named(name: Any, argument: str) -> DType | None:
    """The row of a dtype= argument: a name, a DType, or a dtype object of numpy or torch."""
    if name is None:
        return None
    spelled = name
    if isinstance(name, DType):
        spelled = name.name
    elif not isinstance(name, str):
        spelled = in_words(name).removeprefix("torch.")
        if spelled not in dtypes.BY_NAME:
            spelled = np.dtype(name).name if isinstance(name, np.dtype | type) else shown(name)
    row = dtypes.BY_NAME.get(spelled)
    if row is None or row not in dtypes.DATA_DTYPES:
        names = ", ".join(row.name for row in dtypes.DATA_DTYPES)
        fail(argument, f"one of {names}", repr(name) if isinstance(name, str) else spelled)
    return row


def data_dtype(
    info: ArrayInfo,
    override: DType | None,
    argument: str = "dtype",
    *,
    strict: bool = True,
) -> DType:
    """The dtype of a data array; ``override`` names the type of raw unsigned ones.

    strict=False leaves an array that the override does not fit as it is.
    """
    own = info.dtype
    if own is None or own not in dtypes.DATA_DTYPES:
        names = ", ".join(row.name for row in dtypes.DATA_DTYPES)
        fail(info.name, f"a dtype among {names}", info.dtype_name)
    if override is None or own is override:
        return own
    if own.kind == "uint" and own.itemsize == override.itemsize:
        return override
    if own.packed and override.packed:
        return override
    if not strict:
        return own
    fail(
        argument,
        f"the type of {info.name} ({own}); {argument}= names the type of raw unsigned arrays",
        override,
    )


def same_dtype(info: ArrayInfo, seen: DType, wanted: DType, other: str) -> None:
    """Require two data arrays of one dtype."""
    if seen is not wanted:
        hint = ""
        if seen.itemsize == wanted.itemsize and "uint" in (seen.kind, wanted.kind):
            hint = "; dtype= names the type of raw unsigned arrays"
        fail(info.name, f"dtype {wanted} as {other}{hint}", seen)


def index_dtype(info: ArrayInfo) -> DType:
    """Require int32 or int64."""
    if info.dtype is None or info.dtype not in dtypes.INDEX_DTYPES:
        fail(info.name, "dtype int32 or int64", info.dtype_name)
    return info.dtype


def one_index_dtype(first: ArrayInfo, *others: ArrayInfo | None) -> DType:
    """Require int32 or int64, the same for all index arrays of the call."""
    wanted = index_dtype(first)
    for info in others:
        if info is not None and index_dtype(info) is not wanted:
            fail(info.name, f"dtype {wanted} as {first.name}", info.dtype_name)
    return wanted


def mode(value: object, argument: str, known: Sequence[str], default: str) -> str:
    """A mode string; None and "" are the default."""
    if value is None:
        return default
    if isinstance(value, str):
        if value == "":
            return default
        for one in known:
            if value == one:  # an enum of strings prints as its own name
                return one
    fail(argument, "one of " + ", ".join(map(repr, known)) + " or None", shown(value))


def flag(value: object, argument: str) -> bool:
    """True or False, not what merely counts as one."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    fail(argument, "True or False", shown(value))


def listed(value: Any) -> Any:
    """A hashable stand-in of a sequence of integers, for a plan's signature.

    A tuple of ints, or Unlisted for anything else: what it may be is said by ``integers``, in the
    modes that need it.
    """
    if type(value) is tuple and all(type(item) is int for item in value):
        return value
    try:
        if isinstance(value, str | bytes | bytearray | Mapping | Set):
            return Unlisted(shown(value))
        if len(value) > MOST_LISTED:
            return Unlisted(f"{len(value)} values")
        items = tuple(value)
        if not any(isinstance(item, bool | np.bool) for item in items):
            return tuple([operator.index(item) for item in items])
    except Exception:  # anything may come out of an object that is no sequence
        return Unlisted(shown(value))
    return Unlisted(shown(value))


class Unlisted(str):
    """What was given where integers belong, as it prints."""

    __slots__ = ()


def integers(value: Any, argument: str, count: int) -> tuple[int, ...]:
    """``count`` integers out of what ``listed`` gave."""
    expected = f"{count} integers"
    if isinstance(value, Unlisted):
        fail(argument, expected, str(value))
    if len(value) != count:
        fail(argument, expected, f"{len(value)}: {shown(list(value))}")
    found: tuple[int, ...] = value
    return found


def slot_fault(
    argument: str, index: int, slot: int, blocks: int, block_size: int
) -> SlotRangeError:
    """The error of a slot outside the cache."""
    bound = blocks * block_size
    return SlotRangeError(
        f"{argument}[{index}]: expected slot < {bound} "
        f"(num_blocks {blocks} * block_size {block_size}), got {slot}",
        argument=argument,
        seen=slot,
        expected=f"slot < {bound}",
    )
