# SPDX-License-Identifier: Apache-2.0
"""What the call path must know of backends without importing them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

__all__ = ["BACKEND", "active", "choose"]

#: The backend's name set by kvcore.backends.use(), per task.
BACKEND: ContextVar[str | None] = ContextVar("kvcore_backend", default=None)

#: True once use() was called in this process: calls must look at BACKEND from then on.
active: bool = False

Chooser = Callable[[Any, Any, bool], tuple[Any, Callable[[], Any] | None]]
_chooser: Chooser | None = None


def install(chooser: Chooser) -> None:
    """The registry says here how a plan finds its backend."""
    global _chooser
    _chooser = chooser


def activate() -> None:
    """From now on every call looks at BACKEND."""
    global active
    active = True


def choose(plan: Any, backend: Any, on_device: bool) -> tuple[Any, Callable[[], Any] | None]:
    """(backend, what run() calls) of a plan; (None, None) is this library's own kernels."""
    if _chooser is None:
        return None, None
    return _chooser(plan, backend, on_device)
