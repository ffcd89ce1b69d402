# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that are numbers."""

from __future__ import annotations

from kvcore.errors import fail

__all__ = ["check_integer"]


def check_integer(argument: str, value: object, low: int, high: int | None = None) -> int:
    """The value, when it is an int (no bool, no float) from ``low`` to ``high``.

    Raises ParamInvalidError.
    """
    if type(value) is not int or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        fail(argument, f"an integer {allowed}", repr(value))
    return value
