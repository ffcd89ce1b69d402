# SPDX-License-Identifier: Apache-2.0
"""Portability warnings, given at the line of the caller outside of this package."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from sys import _getframe
from typing import Literal

from kvcore.errors import KVPortabilityWarning, ParamInvalidError

__all__ = ["Harm", "warn", "within"]

PACKAGE = __name__.partition(".")[0]


#: None: warn.  Else it says what is done where the machine is at hand, asked when a text comes up.
Mode = Callable[[], Literal["silence", "refuse"]]
_mode: ContextVar[Mode | None] = ContextVar("kvcore_portability", default=None)


class Harm(str):
    """A warning of what the machine would do silently: other bytes, or none."""

    __slots__ = ()


def within(mode: Mode, call: Callable[[], object]) -> None:
    """Make a call where the machine is at hand: it warns of nothing, or raises for what would do
    harm."""
    token = _mode.set(mode)
    try:
        call()
    finally:
        _mode.reset(token)


def warn(text: str) -> None:
    """Give a KVPortabilityWarning that points at the line that called into the package."""
    mode = _mode.get()
    if mode is not None:
        if isinstance(text, Harm) and mode() == "refuse":
            raise ParamInvalidError(str(text))
        return
    # Compiled functions have no frame, so the distance is not the same on every path.  (f_back is
    # no way to walk: CPython forgets there that memory ran out, and a SystemError follows.)
    level = 1
    try:
        while _is_ours(_getframe(level).f_globals.get("__name__")):
            level += 1
    except ValueError:  # nobody called into the package
        level -= 1
    warnings.warn(text, KVPortabilityWarning, stacklevel=level + 1)


def _is_ours(module: object) -> bool:
    """Whether a frame's module, which code that is executed need not have, is of the package."""
    return isinstance(module, str) and module.partition(".")[0] == PACKAGE
