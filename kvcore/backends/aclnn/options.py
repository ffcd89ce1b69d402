# SPDX-License-Identifier: Apache-2.0
"""What a caller may ask of the NPU backend beyond a call's own arguments.

check:     "host" (default): slots, lengths and tables are checked when they are on the host.
           "device": those on the device are copied back and checked too; each call then waits
           for its stream.
fallback:  None (default), or "cpu": where CANN is not usable, host arrays given to
           ``backend="aclnn"`` are worked on by this library's own kernels.

Per task with ``use_options``, per process with KVCORE_ACLNN_CHECK and KVCORE_ACLNN_FALLBACK.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvcore.errors import fail

__all__ = ["check", "fallback", "use_options"]

CHECKS = ("host", "device")
FALLBACKS = ("cpu",)
_check: ContextVar[str | None] = ContextVar("kvcore_aclnn_check", default=None)
_fallback: ContextVar[str | None] = ContextVar("kvcore_aclnn_fallback", default=None)


def _from(name: str, known: tuple[str, ...]) -> str | None:
    text = os.environ.get(name, "").strip()
    if text and text not in known:
        fail(name, "one of " + ", ".join(map(repr, known)), repr(text))
    return text or None


def check() -> str:
    """ "host" or "device"."""
    return _check.get() or _from("KVCORE_ACLNN_CHECK", CHECKS) or "host"


def fallback() -> str | None:
    """None or "cpu"."""
    return _fallback.get() or _from("KVCORE_ACLNN_FALLBACK", FALLBACKS)


@contextmanager
def use_options(*, check: str | None = None, fallback: str | None = None) -> Iterator[None]:
    """Set options for this task in the block; None leaves one as it is."""
    if check is not None and check not in CHECKS:
        fail("check", "'host' or 'device'", repr(check))
    if fallback is not None and fallback not in FALLBACKS:
        fail("fallback", "'cpu' or None", repr(fallback))
    old_check = _check.set(check or _check.get())
    old_fallback = _fallback.set(fallback or _fallback.get())
    try:
        yield
    finally:
        _check.reset(old_check)
        _fallback.reset(old_fallback)
