# SPDX-License-Identifier: Apache-2.0
"""The hardware whose limits a call can be checked against."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from kvcore.errors import ParamInvalidError

__all__ = ["A2", "A3", "A950", "PROFILES", "SoC", "current", "resolve", "use_soc"]

ENVIRONMENT = "KVCORE_SOC"


@dataclass(frozen=True, slots=True)
class SoC:
    """One hardware generation."""

    name: str

    def __str__(self) -> str:
        return self.name


A2 = SoC("A2")
A3 = SoC("A3")
A950 = SoC("950")
PROFILES: dict[str, SoC] = {s.name: s for s in (A2, A3, A950)}

#: Set by use_soc, per task. The compiled path reads it at each call.
CURRENT: ContextVar[SoC | None] = ContextVar("kvcore_soc", default=None)


def resolve(soc: object, name: str = "soc") -> SoC | None:
    """The profile of a name; None stays None. ParamInvalidError lists the known names."""
    if soc is None or isinstance(soc, SoC):
        return soc
    found = PROFILES.get(soc) if isinstance(soc, str) else None
    if found is None:
        expected = "one of " + ", ".join(map(repr, PROFILES)) + " or None"
        raise ParamInvalidError(
            f"{name}: expected {expected}, got {soc!r}",
            argument=name,
            seen=soc,
            expected=expected,
        )
    return found


def from_environment() -> SoC | None:
    """What KVCORE_SOC says; unset or empty is None."""
    text = os.environ.get(ENVIRONMENT, "").strip()
    return resolve(text, ENVIRONMENT) if text else None


def current() -> SoC | None:
    """The profile in force for calls without soc=: use_soc before KVCORE_SOC."""
    return CURRENT.get() or from_environment()


@contextmanager
def use_soc(soc: SoC | str | None) -> Iterator[SoC | None]:
    """Check every call of this task in the block against that hardware's documented limits."""
    found = resolve(soc)
    token = CURRENT.set(found)
    try:
        yield found
    finally:
        CURRENT.reset(token)
