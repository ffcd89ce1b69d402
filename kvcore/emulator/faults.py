# SPDX-License-Identifier: Apache-2.0
"""The host follows a device pointer: the process ends, and says why and on which line."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import sys
from typing import Any

from kvcore.emulator import machine

__all__ = ["watch"]

_watching = False


def watch() -> None:
    """Have a message and the line of Python on stderr before the process ends.

    Python's faulthandler prints the line; it is turned on where it was not.  When it is
    turned on again, as pytest does, the machine's own message still comes first.
    """
    global _watching
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            faulthandler.enable(sys.__stderr__ or 2)
    core = machine.load().core
    core.kvdouble_watch_faults()
    if _watching:
        return
    _watching = True
    original = faulthandler.enable

    @functools.wraps(original)
    def enable(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        core.kvdouble_watch_faults()

    faulthandler.enable = enable
