# SPDX-License-Identifier: Apache-2.0
"""Which raw arguments are legal: what section 0 says for every operator.

``violations(operator, arguments)`` lists every rule that is broken, so a test can ask whether a
refusal was right and whether it named an argument that is at fault.  An empty list: legal.
The list stops at the first stage that makes the next one meaningless (a shape that is wrong
before values are looked at).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oracle_numbers import ITEMSIZE, Array, logical_name

Arguments = Mapping[str, Any]

NULL = "ParamNullError"
INVALID = "ParamInvalidError"
SLOT = "SlotRangeError"


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    arguments: those an error may rightly name.
    error:     class name in kvcore.errors.
    """

    arguments: tuple[str, ...]
    error: str
    why: str


def first_stage(
    stages: Sequence[Callable[[Arguments], Iterator[Violation]]], arguments: Arguments
) -> list[Violation]:
    """What the first stage that finds anything finds."""
    for stage in stages:
        found = list(stage(arguments))
        if found:
            return found
    return []


def invalid(why: str, *arguments: str) -> Violation:
    """A broken rule of status 161002."""
    return Violation(arguments, INVALID, why)


def null(argument: str) -> Violation:
    """A required argument is None."""
    return Violation((argument,), NULL, "is required")


def check_arrays(
    arguments: Arguments, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[Violation]:
    """Required arrays are there, and whatever is there is an array."""
    for name in (*required, *optional):
        value = arguments.get(name)
        if value is None:
            if name in required:
                yield null(name)
        elif not isinstance(value, np.ndarray):
            yield invalid("is not an array", name)


def check_index_dtypes(arguments: Arguments, names: Sequence[str]) -> Iterator[Violation]:
    """int32 or int64, one for the whole call."""
    given = [n for n in names if isinstance(arguments.get(n), np.ndarray)]
    fine = []
    for name in given:
        if arguments[name].dtype in (np.dtype(np.int32), np.dtype(np.int64)):
            fine.append(name)
        else:
            yield invalid("is neither int32 nor int64", name)
    if len({arguments[n].dtype for n in fine}) > 1:
        yield invalid("index arrays differ in dtype", *fine)


def check_data_dtypes(
    arguments: Arguments, lanes: Mapping[str, Sequence[str]]
) -> Iterator[Violation]:
    """Each lane has one element type that the operators move.

    lanes: keyword that names a type -> the lane's arrays.
    """
    for keyword, names in lanes.items():
        named = arguments.get(keyword)
        if named is not None and named not in ITEMSIZE:
            yield invalid("names no type", keyword)
            continue
        given = [n for n in names if isinstance(arguments.get(n), np.ndarray)]
        types = {n: logical_name(arguments[n], named) for n in given}
        for name, element in types.items():
            if element is None:
                yield invalid("is of no type the operators move", name, keyword, *given)
        if len(set(types.values())) > 1:
            yield invalid("arrays of one lane differ in dtype", *given, keyword)


def check_outputs(
    arguments: Arguments, outputs: Sequence[str], inputs: Sequence[str]
) -> Iterator[Violation]:
    """Outputs can be written, each item once, and share no byte with anything else."""
    arrays = {n: a for n, a in arguments.items() if isinstance(a, np.ndarray) and a.size}
    written = [n for n in outputs if n in arrays]
    for name in outputs:
        if isinstance(arguments.get(name), np.ndarray) and not arguments[name].flags.writeable:
            yield invalid("is read-only", name)
    for name in written:
        if folds(arrays[name]):
            yield invalid("has elements that overlap", name)
    for a, b in itertools.combinations(written, 2):
        if share_bytes(arrays[a], arrays[b]):
            yield invalid("two outputs overlap", a, b)
    for a, b in itertools.product(written, [n for n in inputs if n in arrays]):
        if share_bytes(arrays[a], arrays[b]):
            yield invalid("an input overlaps an output", a, b)


def addresses(array: Array) -> Array:
    """The address of every byte of every item."""
    total = np.full(array.shape, array.__array_interface__["data"][0], np.int64)
    for axis, (count, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        steps = np.arange(count, dtype=np.int64) * stride
        total = total + steps.reshape((-1,) + (1,) * (array.ndim - 1 - axis))
    return np.asarray((total[..., None] + np.arange(array.dtype.itemsize)).reshape(-1))


def folds(array: Array) -> bool:
    """True when two items of the array share a byte."""
    every = addresses(array)
    return len(np.unique(every)) < len(every)


def share_bytes(a: Array, b: Array) -> bool:
    """True when some byte belongs to both arrays; exact, by listing the bytes."""
    return bool(np.intersect1d(addresses(a), addresses(b)).size)


def is_integer(value: Any) -> bool:
    """True for whole numbers that are not booleans."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
