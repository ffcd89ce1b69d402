# SPDX-License-Identifier: Apache-2.0
"""Portability warnings, given at the line of the caller outside of this package."""

from __future__ import annotations

import sys
import warnings

from kvcore.errors import KVPortabilityWarning

__all__ = ["warn"]

PACKAGE = __name__.partition(".")[0]


def warn(text: str) -> None:
    """Give a KVPortabilityWarning that points at whoever called into the package."""
    level = 2
    frame = sys._getframe(1)
    # Compiled functions have no frame, so the distance is not the same on every path.
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == PACKAGE:
        frame = frame.f_back
        level += 1
    warnings.warn(text, KVPortabilityWarning, stacklevel=level)
