# SPDX-License-Identifier: Apache-2.0
"""What Ctrl-C does: to work that must end between two steps, and to the process of the command."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from kvcore import _end_at_once  # what SIGINT does while the package is imported

__all__ = ["CommandInterrupt", "Interrupt"]


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


class CommandInterrupt:
    """What SIGINT does to a process that is the command.

    raises:  whether KeyboardInterrupt would be caught now; set by the command.
    pressed: whether it was raised.

    The first SIGINT raises KeyboardInterrupt, so that files and processes are left in order.  The
    second one, and any while ``raises`` is False, ends the process at once: an exception that
    nothing catches would print a traceback.
    """

    def __init__(self) -> None:
        self.raises = False
        self.pressed: bool = False

    def install(self) -> None:
        """Become the handler of SIGINT, if this is the main thread and no other was set."""
        # A shell starts what is to run in the background with Ctrl-C ignored: so it stays.
        found = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and found in (
            signal.default_int_handler,
            _end_at_once,
        ):
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.pressed or not self.raises:
            _end_at_once(number, frame)
        self.pressed = True
        raise KeyboardInterrupt
