# SPDX-License-Identifier: Apache-2.0
"""Options of the NPU backend that are not arguments of a call.

check:     "host" (default): slots, lengths and tables are checked when they are on the host.
           "device": those on the device are copied back and checked too; each call then waits
           for its stream.
quirks:    "refuse" (default): a call that this machine's kernels are known to do wrong without an
           error is refused. "pass": it is made all the same (this is known from the sources, and
           kernels change).
fallback:  None (default), or "cpu": where CANN is not usable, host arrays given to
           ``backend="aclnn"`` are worked on by this library's own kernels.

Per task with ``use_options``, per process with KVCORE_ACLNN_CHECK, KVCORE_ACLNN_QUIRKS and
KVCORE_ACLNN_FALLBACK.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvcore.errors import fail

__all__ = ["check", "fallback", "quirks", "use_options"]

KNOWN: dict[str, tuple[str, ...]] = {
    "check": ("host", "device"),
    "quirks": ("refuse", "pass"),
    "fallback": ("cpu",),
}
_set: ContextVar[dict[str, str] | None] = ContextVar("kvcore_aclnn_options", default=None)


def _of(option: str) -> str | None:
    found = (_set.get() or {}).get(option)
    if found is None:
        name = f"KVCORE_ACLNN_{option.upper()}"
        found = os.environ.get(name, "").strip() or None
        if found is not None:
            _require(option, found, name)
    return found


def _require(option: str, value: object, argument: str) -> None:
    known = KNOWN[option]
    if value not in known:
        fail(argument, "one of " + ", ".join(map(repr, known)), repr(value))


def check() -> str:
    """Which index arrays are checked: "host" for those on the host, "device" for all."""
    return _of("check") or "host"


def quirks() -> str:
    """Whether calls that kernels are known to get wrong are refused: "refuse" or "pass"."""
    return _of("quirks") or "refuse"


def fallback() -> str | None:
    """The backend that serves host arrays where CANN cannot be used: None or "cpu"."""
    return _of("fallback")


@contextmanager
def use_options(
    *, check: str | None = None, quirks: str | None = None, fallback: str | None = None
) -> Iterator[None]:
    """Set options for this task in the block; None leaves one as it is."""
    wanted = {"check": check, "quirks": quirks, "fallback": fallback}
    given = {option: value for option, value in wanted.items() if value is not None}
    for option, value in given.items():
        _require(option, value, option)
    token = _set.set((_set.get() or {}) | given)
    try:
        yield
    finally:
        _set.reset(token)
