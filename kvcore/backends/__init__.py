# SPDX-License-Identifier: Apache-2.0
"""Backends: who moves the bytes of a plan."""

from kvcore.backends.base import Backend
from kvcore.backends.registry import (
    available,
    get,
    load_errors,
    names,
    register,
    use,
    why_not,
)

__all__ = ["Backend", "available", "get", "load_errors", "names", "register", "use", "why_not"]
