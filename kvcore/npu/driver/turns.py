# SPDX-License-Identifier: Apache-2.0
"""One run of a plan at a time, although several queues may hand it over.

Handing over takes a moment on the host and is done by workers, and by the thread that ends a
capture.  A program that launches a plan and then captures it has done nothing wrong, so those who
hand over wait for each other; the hardware has an order of its own for what was handed over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Turns"]


class Turns:
    """Locks for the plans that are being handed over at a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, tuple[threading.Lock, list[int]]] = {}

    @contextmanager
    def of(self, plan: object) -> Iterator[None]:
        """Wait until no other thread hands this plan over."""
        with self._lock:
            lock, users = self._taken.setdefault(id(plan), (threading.Lock(), [0]))
            users[0] += 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                users[0] -= 1
                if not users[0]:
                    del self._taken[id(plan)]
