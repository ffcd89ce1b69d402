# SPDX-License-Identifier: Apache-2.0
"""The environment's word on kernels: KVCORE_ISA, KVCORE_STREAM_BYTES, KVCORE_PARALLEL_BYTES.

Read once, when kvcore is imported.  What cannot be used there does not stop the import: every call
raises it.
"""

from __future__ import annotations

import os

from kvcore._kernels import isa, parallel
from kvcore.errors import ParamInvalidError, fail

__all__ = ["apply_environment", "require"]

_fault: ParamInvalidError | None = None


def apply_environment() -> None:
    """Put in force what the variables say; what they cannot say is left to require()."""
    global _fault
    try:
        _apply()
    except ParamInvalidError as error:
        _fault = error


def require() -> None:
    """Raise ParamInvalidError if a variable had a value it cannot have when kvcore was imported."""
    if _fault is not None:
        raise _fault.with_traceback(None)


def _apply() -> None:
    name = os.environ.get("KVCORE_ISA", "").strip()
    if name and name not in isa.available():
        fail("KVCORE_ISA", "one of " + ", ".join(isa.available()) + " on this CPU", repr(name))
    isa.select(name or None)
    isa.set_stream_bytes(_bytes("KVCORE_STREAM_BYTES"))
    parallel.set_parallel_bytes(_bytes("KVCORE_PARALLEL_BYTES"))


def _bytes(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    # Of long digits int() itself would complain.
    if text and not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 1 << 62):
        fail(variable, "a number of bytes from 0 to 2**62", repr(text))
    return int(text) if text else None
