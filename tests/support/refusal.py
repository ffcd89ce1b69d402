# SPDX-License-Identifier: Apache-2.0
"""Calls that must be refused: the right error, naming an argument, and not one byte written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from memory import Arena, Layout


class Call:
    """A legal call in guarded memory, from which tests make bad ones.

    arrays: argument -> numpy array; each lies in the arena, so that bytes around it are watched.
    """

    def __init__(
        self, function: Callable[..., Any], arrays: dict[str, Any], **options: Any
    ) -> None:
        self.function = function
        self.arena = Arena()
        self.options = options
        self.arrays: dict[str, Any] = {}
        for name, array in arrays.items():
            place = self.arena.place(name, Layout.plain(array.shape, array.itemsize), array.dtype)
            place[...] = array
            self.arrays[name] = place

    def arguments(self, **changed: Any) -> dict[str, Any]:
        return {**self.arrays, **self.options, **changed}

    def run(self, **changed: Any) -> Any:
        return self.function(**self.arguments(**changed))

    def refused(
        self,
        blames: str,
        match: str = "",
        error: type[kvcore.KVCoreError] = kvcore.ParamInvalidError,
        *,
        unreadable: bool = False,
        **changed: Any,
    ) -> kvcore.KVCoreError:
        """Run with these arguments changed; return the error.

        match: what its words must hold besides argument, "expected" and "got".
        unreadable: the changed arrays reach past their memory and must not be looked at.
        """
        given = self.arguments(**changed)
        before = self.arena.snapshot()
        watched = self.arrays if unreadable else given
        others = {n: a.tobytes() for n, a in watched.items() if isinstance(a, np.ndarray)}
        with pytest.raises(error, match=match or None) as caught:
            self.function(**given)
        found = caught.value
        assert type(found) is error, found
        assert found.argument == blames, found
        assert found.code == error.code
        words = str(found)
        assert words.startswith(blames), words
        assert ": expected " in words, words
        assert ", got " in words, words
        self.arena.assert_untouched(before)
        for name, then in others.items():
            assert watched[name].tobytes() == then, f"{name} was written"
        return found


class Index:
    """An integer that is no int."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class BadIndex:
    """Claims to be an integer and is none."""

    def __index__(self) -> int:
        raise RuntimeError("no integer after all")


#: Things that are no arrays.
NO_ARRAYS = [
    3,
    2.5,
    True,
    "text",
    [1, 2],
    (1, 2),
    {"a": 1},
    {1, 2},
    object(),
    np.float32(1),
    np.int64(1),
    np.ndarray,
    len,
    iter([1]),
    range(4),
]
