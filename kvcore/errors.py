# SPDX-License-Identifier: Apache-2.0
"""Every error kvcore raises.

Each leaf is both a :class:`KVCoreError` and the builtin a caller would expect
(``ValueError``, ``TypeError``, ``IndexError``, ``MemoryError``), so existing
``except`` clauses keep working.  ``code`` is the aclnn status the same fault has on the
hardware (161001 null, 161002 invalid), or None where there is none.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = [
    "ACLNN_ERR_PARAM_INVALID",
    "ACLNN_ERR_PARAM_NULLPTR",
    "BackendUnavailableError",
    "CaptureError",
    "DeviceOutOfMemoryError",
    "KVCoreError",
    "KVPortabilityWarning",
    "ParamInvalidError",
    "ParamNullError",
    "RaceError",
    "SlotRangeError",
    "StreamError",
    "fail",
    "in_words",
    "shown",
]

ACLNN_ERR_PARAM_NULLPTR = 161001
ACLNN_ERR_PARAM_INVALID = 161002


class KVCoreError(Exception):
    """Base of all errors.

    code:     aclnn status, or None.
    argument: name of the argument at fault, or None.
    seen:     what was found there.
    expected: what is accepted.
    """

    code: int | None = None

    def __init__(
        self,
        message: str,
        *,
        argument: str | None = None,
        seen: object = None,
        expected: object = None,
        code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.argument = argument
        self.seen = seen
        self.expected = expected
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only state would be lost by the default, and errors cross process borders, where
        # what was seen may not be able to follow: its words do.
        state = {name: _portable(value) for name, value in self.__dict__.items()}
        return (_rebuild, (type(self), str(self), state))


def _portable(value: object) -> object:
    if isinstance(value, tuple | list) and all(_portable(item) is item for item in value):
        return value
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return shown(value)


def _rebuild(cls: type[KVCoreError], message: str, state: dict[str, object]) -> KVCoreError:
    error = cls(message)
    error.__dict__.update(state)
    return error


def shown(value: object) -> str:
    """repr, or the type where repr raises, as it does of ints of thousands of digits."""
    try:
        return repr(value)
    except Exception:
        return f"{type(value).__name__} that cannot be printed"


def in_words(value: object) -> str:
    """str of what was seen, for a message; shown's words where that raises."""
    try:
        return f"{value}"
    except Exception:
        return shown(value)


def fail(argument: str, expected: str, seen: object) -> NoReturn:
    """Raise ParamInvalidError in the one shape: argument, what was expected, what was seen.

    argument may carry a position, as in ``strides[1]``; the error's attribute is the bare name.
    """
    raise ParamInvalidError(
        f"{argument}: expected {expected}, got {in_words(seen)}",
        argument=argument.partition("[")[0],
        seen=seen,
        expected=expected,
    )


class ParamNullError(KVCoreError, TypeError):
    """A required array is None (aclnn 161001)."""

    code: int | None = ACLNN_ERR_PARAM_NULLPTR


class ParamInvalidError(KVCoreError, ValueError):
    """An argument has a wrong type, shape, dtype, mode or value (aclnn 161002)."""

    code: int | None = ACLNN_ERR_PARAM_INVALID


class SlotRangeError(ParamInvalidError, IndexError):
    """A slot, or a slot of a run, lies outside the cache."""


class BackendUnavailableError(KVCoreError, RuntimeError):
    """The backend asked for cannot run here, or cannot reach the arrays' memory."""


class DeviceOutOfMemoryError(KVCoreError, MemoryError):
    """A device's memory is exhausted; ``wanted``, ``free`` and ``total`` are bytes."""

    wanted: int | None = None
    free: int | None = None
    total: int | None = None


class StreamError(KVCoreError, RuntimeError):
    """Work on a stream failed, or a stream was used where it must not be."""


class CaptureError(KVCoreError, RuntimeError):
    """Something was asked of a stream that is recording a graph and cannot be recorded."""


class RaceError(KVCoreError, RuntimeError):
    """Two unordered accesses to one byte, one of them a write."""


class KVPortabilityWarning(UserWarning):
    """The call works here and is legal, but the named hardware would do something else."""
