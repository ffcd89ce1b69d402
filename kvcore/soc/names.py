# SPDX-License-Identifier: Apache-2.0
"""Machines by name, and which one a call is checked against."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from kvcore.errors import fail, shown
from kvcore.soc import printing
from kvcore.soc.profiles import TABLE, Profile

__all__ = [
    "A2",
    "A3",
    "A950",
    "CURRENT",
    "ENVIRONMENT",
    "PROFILES",
    "SoC",
    "current",
    "from_environment",
    "from_product",
    "resolve",
    "use_soc",
]

ENVIRONMENT = "KVCORE_SOC"


@dataclass(frozen=True, slots=True)
class SoC:
    """One hardware generation by name: "A2", "A3" or "950".

    Equal names are equal.  str and print give its table, an f-string its name.
    ParamInvalidError for other names.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in TABLE:
            fail("name", "one of " + ", ".join(map(repr, TABLE)), _unknown(self.name))

    @property
    def profile(self) -> Profile:
        """What it accepts."""
        return TABLE[self.name]

    def __repr__(self) -> str:
        return f"SoC({self.name!r})"

    def __str__(self) -> str:
        return "\n".join(printing.lines(self.name, self.profile))

    def __format__(self, spec: str) -> str:
        # Inside a sentence the name is meant: f"on {soc}".
        return format(self.name, spec)


#: Products that the documents name and on which they support none of the operators.
_WITHOUT_PROFILE = {
    "Atlas inference products": r"(ascend)?310P\d?",
    "Atlas 200I/500 A2": r"(ascend)?310B\d?",
    "Ascend 310": r"(ascend)?310",
    # A bare Ascend910B is this old one; "910B" may mean an A2 too and is left unknown.
    "the first Ascend 910": r"(ascend)?910(A|ProA|ProB|PremiumA)?|ascend910B",
    "Ascend 350": r"(ascend|atlas ?)?350(_\w+)?",
}

A2 = SoC("A2")
A3 = SoC("A3")
A950 = SoC("950")
PROFILES: dict[str, SoC] = {s.name: s for s in (A2, A3, A950)}

#: Set by use_soc, per task. The compiled path reads it at each call.
CURRENT: ContextVar[SoC | None] = ContextVar("kvcore_soc", default=None)


def resolve(soc: object, name: str = "soc") -> SoC | None:
    """The SoC of a name; None stays None. ParamInvalidError lists the known names."""
    if soc is None or isinstance(soc, SoC):
        return soc
    found = PROFILES.get(soc) if isinstance(soc, str) else None
    if found is None:
        fail(name, "one of " + ", ".join(map(repr, PROFILES)) + " or None", _unknown(soc))
    return found


def _unknown(soc: object) -> str:
    """A name that has no profile, as an error says it: products that exist are no misspellings."""
    if isinstance(soc, str):
        for product, pattern in _WITHOUT_PROFILE.items():
            if re.fullmatch(pattern, soc, re.IGNORECASE):
                return f"{soc!r} ({product}): the operators are not supported there"
    return shown(soc)


def from_product(name: str) -> SoC | None:
    """The SoC whose pattern matches a name of aclrtGetSocName; None: a machine not in the table."""
    for soc in PROFILES.values():
        if re.search(soc.profile.pattern, name):
            return soc
    return None


def from_environment() -> SoC | None:
    """What KVCORE_SOC says; unset or empty is None."""
    text = os.environ.get(ENVIRONMENT, "").strip()
    return resolve(text, ENVIRONMENT) if text else None


def current() -> SoC | None:
    """The SoC in force for calls without soc=: use_soc before KVCORE_SOC."""
    return CURRENT.get() or from_environment()


@contextmanager
def use_soc(soc: SoC | str | None) -> Iterator[SoC | None]:
    """Check every call of this task in the block against that hardware's documented limits.

    Other tasks and threads keep theirs; None leaves the choice to KVCORE_SOC.
    """
    found = resolve(soc)
    token = CURRENT.set(found)
    try:
        yield found
    finally:
        CURRENT.reset(token)
