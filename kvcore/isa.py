# SPDX-License-Identifier: Apache-2.0
"""What the kernels use: by the CPU (``kvcore.cpus``), and by the environment's KVCORE_CPU,
KVCORE_ISA, KVCORE_STREAM_BYTES and KVCORE_PARALLEL_BYTES.

Read once, when kvcore is imported.  What cannot be used there does not stop the import: every call
raises it.
"""

from __future__ import annotations

import os

from kvcore import cpus
from kvcore._kernels import isa, parallel
from kvcore.errors import ParamInvalidError, fail

__all__ = ["apply_environment", "apply_row", "faults", "require"]

_faults: list[ParamInvalidError] = []


def apply_environment() -> None:
    """Put in force what the variables say; what they cannot say is left to require()."""
    for apply in (_cpu, _instruction_set, _streaming, _parallel):
        try:
            apply()
        except ParamInvalidError as error:
            _faults.append(error)


def apply_row(name: str) -> None:
    """Put a row of ``kvcore.cpus`` in force, whatever the variables say: to measure it.

    Raises ParamInvalidError for a name that no row has.
    """
    cpus.use(name)
    isa.select(isa.current(), cpus.chosen().row.path)
    _set_stream_bytes(None)
    _set_parallel_bytes(None)


def require() -> None:
    """Raise ParamInvalidError if a variable had a value it cannot have when kvcore was imported."""
    for fault in _faults:
        raise fault.with_traceback(None)


def faults() -> list[str]:
    """What is wrong with each variable, a sentence each."""
    return [str(fault) for fault in _faults]


def _cpu() -> None:
    cpus.use(os.environ.get("KVCORE_CPU", "").strip() or None)


def _instruction_set() -> None:
    name = os.environ.get("KVCORE_ISA", "").strip()
    if name and name not in isa.available():
        fail("KVCORE_ISA", "one of " + ", ".join(isa.available()) + " on this CPU", repr(name))
    isa.select(name or None, cpus.chosen().row.path)


def _streaming() -> None:
    _set_stream_bytes(None)
    _set_stream_bytes(_bytes("KVCORE_STREAM_BYTES"))


def _parallel() -> None:
    _set_parallel_bytes(None)
    _set_parallel_bytes(_bytes("KVCORE_PARALLEL_BYTES"))


def _set_stream_bytes(count: int | None) -> None:
    # None: the kernels' default, and no less than the row has it.
    isa.set_stream_bytes(count)
    if count is None:
        isa.set_stream_bytes(max(isa.stream_bytes(), cpus.chosen().least_stream_bytes))


def _set_parallel_bytes(count: int | None) -> None:
    parallel.set_parallel_bytes(cpus.chosen().parallel_bytes if count is None else count)


def _bytes(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    # Of long digits int() itself would complain.
    if text and not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 1 << 62):
        fail(variable, "a number of bytes from 0 to 2**62", repr(text))
    return int(text) if text else None
