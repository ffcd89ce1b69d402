# SPDX-License-Identifier: Apache-2.0
"""One allocation of a call fails, at each place in turn: what the call may do then.

A failure is a MemoryError with nothing written, or no error and everything written.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hostile_calls import Case

Array = np.ndarray[Any, Any]

#: A call that made it so many times in a row has no allocation left to fail.
ENOUGH = 40
#: No call makes as many.
MOST = 20_000


class Python:
    """Python's allocators, through the test module of CPython."""

    def __init__(self) -> None:
        import _testcapi

        self._begin = _testcapi.set_nomemory
        self._end = _testcapi.remove_mem_hooks

    def attempt(self, call: Callable[[], Any], at: int) -> Exception | None:
        """Make the call with its allocation number ``at`` failing; what it raised."""
        begin, end = self._begin, self._end
        try:
            begin(at, at + 1)
            call()
        except Exception as error:
            end()
            return error
        end()
        return None


class Malloc:
    """The C library's allocations, in a process that native/fail_malloc.c was loaded into."""

    def __init__(self) -> None:
        library = ctypes.PyDLL(None)  # without giving the interpreter lock away in between
        self._begin, self._end = library.kv_fail_begin, library.kv_fail_end
        self._begin.argtypes, self._end.restype = (ctypes.c_long,), ctypes.c_long

    def attempt(self, call: Callable[[], Any], at: int) -> Exception | None:
        """Make the call with its allocation number ``at`` failing; what it raised."""
        begin, end = self._begin, self._end
        number = ctypes.c_long(at)
        try:
            begin(number)
            call()
        except Exception as error:
            end()
            return error
        end()
        return None


def is_foreign(error: Exception) -> bool:
    """Whether it is a SystemError out of a line of numpy's or of Python's own library.

    Both forget in places to say that their memory ran out.  One out of a line of the package or of
    a test is the package's, whatever was called there.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, SystemError) or not frames:
        return False
    place = Path(frames[-1].filename)
    if frames[-1].filename.startswith("<frozen "):  # modules that the interpreter carries within it
        return True
    if place.is_relative_to(Path(np.__file__).parent):
        return True
    library = Path(sysconfig.get_path("stdlib"))
    return place.is_relative_to(library) and "site-packages" not in place.parts


@contextmanager
def no_collector_callbacks() -> Iterator[None]:
    """Leave the collector without callbacks: CPython makes a dict for them, and where that fails it
    reports an exception that nobody can catch."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        yield
    finally:
        gc.callbacks[:] = callbacks


@dataclass
class Count:
    """attempts, of which refused raised MemoryError and others a SystemError that is_foreign();
    faults: what must not be, in words."""

    attempts: int = 0
    refused: int = 0
    others: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, other: Count) -> None:
        self.attempts += other.attempts
        self.refused += other.refused
        self.others += other.others
        self.faults += other.faults


def widened(array: Array, pad: int) -> Array:
    """The same numbers at a stride that no call had before."""
    if array.ndim < 2 or pad == 0:
        return array
    room = np.zeros((*array.shape[:-1], array.shape[-1] + pad), array.dtype)
    room[..., : array.shape[-1]] = array
    return room[..., : array.shape[-1]]


class Starving:
    """A case whose calls are starved.

    how: "call", the operator with what it knows of such arrays; "first call", with arrays of
    strides that it never saw, so that every rule is checked; "plan", making one; "run", running it.
    """

    HOWS = ("call", "first call", "plan", "run")

    def __init__(self, case: Case, how: str) -> None:
        self.case = case
        self.how = how
        self.pads = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.expected = case.expected()

    def round(self, means: Any) -> Count:
        """Fail each allocation in turn."""
        count, made = Count(), 0
        with warnings.catch_warnings(), no_collector_callbacks():
            warnings.simplefilter("ignore")
            for at in range(MOST):
                arrays, call, writes = self._prepare()
                before = {name: array.copy() for name, array in arrays.items()}
                error = means.attempt(call, at)
                count.attempts += 1
                made = 0 if error is not None else made + 1
                count.refused += isinstance(error, MemoryError)
                if error is not None and is_foreign(error):
                    count.others += 1
                elif error is not None and not isinstance(error, MemoryError):
                    count.faults.append(f"allocation {at}: {type(error).__name__}: {error}")
                wanted = before | (self.expected if error is None and writes else {})
                for name, array in arrays.items():
                    if array.tobytes() != wanted[name].tobytes():
                        count.faults.append(f"allocation {at}: {name} is neither whole nor kept")
                del error
                if made == ENOUGH:
                    return count
        count.faults.append("no end was found")
        return count

    def _prepare(self) -> tuple[dict[str, Array], Callable[[], Any], bool]:
        case, options = self.case, dict(self.case.options)
        if "stats" in options:
            options["stats"] = {}
        arrays = case.make()
        if self.how == "first call":
            self.pads += 1
            name = max(arrays, key=lambda name: (arrays[name].ndim, name not in case.outputs))
            arrays[name] = widened(arrays[name], self.pads)
        if self.how in ("call", "first call"):

            def call() -> None:
                case.call(**arrays, **options)

            return arrays, call, True
        assert case.plan is not None
        plan = case.plan
        if self.how == "plan":

            def call() -> None:
                plan(**arrays, **options)

            return arrays, call, False
        return arrays, plan(**arrays, **options).run, True

    def leak(self, means: Any) -> int:
        """Python's memory blocks that a round leaves behind."""
        gc.collect()
        before = sys.getallocatedblocks()
        self.round(means)
        gc.collect()
        return sys.getallocatedblocks() - before


def hows(case: Case) -> list[str]:
    return [how for how in Starving.HOWS if case.plan is not None or "call" in how]
