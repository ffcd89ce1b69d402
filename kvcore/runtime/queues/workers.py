# SPDX-License-Identifier: Apache-2.0
"""The worker threads of one device: started together, or not at all.

An operation that forks makes a process whose only thread is the copy of a worker.  When the
operation returns there, nothing is left to do, and that process ends at once, without the ends of
Python and of libraries: these are the parent's, and some abort in a thread that is not Python's
first.
"""

from __future__ import annotations

import os
import sys
import threading

from kvcore.errors import StreamError
from kvcore.runtime.queues._executor import Executor

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
                    target=_work, args=(self._executor,), name=f"kvcore-worker-{i}", daemon=True
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


def _work(executor: Executor) -> None:
    """The life of one worker, and of the process that an operation on it forked."""
    status = 0
    try:
        executor.work()
    except BaseException as error:
        if not executor.is_forked:
            raise
        status = 1
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            threading.excepthook(
                threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
            )
    finally:
        if executor.is_forked:
            os._exit(status & 0xFF)
