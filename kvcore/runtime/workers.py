# SPDX-License-Identifier: Apache-2.0
"""The worker threads of one device: started together, or not at all."""

from __future__ import annotations

import threading

from kvcore.errors import StreamError
from kvcore.runtime._executor import Executor

__all__ = ["Workers"]


class Workers:
    """Threads that advance the streams of one device."""

    def __init__(self, executor: Executor, number: int) -> None:
        self._executor = executor
        self._number = number
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start them all; StreamError, with none left, when the system gives one no thread."""
        try:
            for i in range(self._number):
                thread = threading.Thread(
                    target=self._executor.work, name=f"kvcore-worker-{i}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        except BaseException as error:
            self.end()
            if not isinstance(error, RuntimeError | MemoryError):
                raise
            raise StreamError(
                f"workers: expected {self._number} threads, got {i} of this system ({error})",
                argument="workers",
                seen=i,
                expected=self._number,
            ) from error

    def end(self) -> None:
        """Let them finish what is ready, and wait for their end."""
        self._executor.stop()
        for thread in self._threads:
            if thread.ident is not None:  # None: it was never started
                thread.join()
        self._threads.clear()
