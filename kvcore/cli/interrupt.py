# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C that stops work between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

__all__ = ["Interrupt"]


class Interrupt:
    """While entered, the first SIGINT only sets a flag; a second one is an ordinary Ctrl-C.

    Outside the main thread, where Python allows no handler, the flag is never set.
    """

    def __init__(self) -> None:
        self._set = False
        self._entered = False

    def is_set(self) -> bool:
        """True from the first SIGINT on."""
        return self._set

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
            self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._entered:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._set:
            raise KeyboardInterrupt
        self._set = True
