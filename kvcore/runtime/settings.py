# SPDX-License-Identifier: Apache-2.0
"""What a device is asked to be, checked as a whole before anything is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvcore.errors import ParamInvalidError
from kvcore.runtime.profile import DeviceProfile

__all__ = ["RaceMode", "Settings", "default_race_check", "one_of"]

RaceMode = Literal["off", "record", "raise"]
RACE_MODES = ("off", "record", "raise")
CLOCKS = ("wall", "model")
MAX_WORKERS = 64
DEFAULT_MAX_EVENTS = 1_000_000

_default_race_check: RaceMode = "off"


@contextlib.contextmanager
def default_race_check(mode: RaceMode) -> Iterator[None]:
    """Inside, devices that are made without ``race_check=`` have this one.

    For test runners.  It holds for the whole process, since tests make devices in threads and
    event loops of their own; devices that exist and devices that name a mode are left alone.
    """
    global _default_race_check
    one_of("mode", mode, RACE_MODES)
    before, _default_race_check = _default_race_check, mode
    try:
        yield
    finally:
        _default_race_check = before


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a ``Device``; see there."""

    profile: DeviceProfile | None
    clock: str
    race_check: str
    check_host: bool
    max_events: int
    workers: int
    seed: int | None

    @classmethod
    def checked(
        cls,
        profile: object,
        *,
        clock: object,
        race_check: object,
        trace: object,
        workers: object,
        seed: object,
        check_host: object,
        max_events: object,
    ) -> Settings:
        """Raises ParamInvalidError; ``max_events`` 0: no trace."""
        found = _profile(profile)
        clock = one_of("clock", clock, CLOCKS)
        if race_check is None:
            race_check = _default_race_check
        race_check = one_of("race_check", race_check, RACE_MODES)
        trace = _flag("trace", trace)
        check_host = _flag("check_host", check_host)
        workers = _whole("workers", workers, 1, MAX_WORKERS)
        if seed is not None:
            seed = _whole("seed", seed, -(2**63), 2**64 - 1)
        if max_events is not None:
            events = _whole("max_events", max_events, 1, 2**40)
        else:
            events = DEFAULT_MAX_EVENTS if trace else 0
        if clock == "model" and found is None:
            raise ParamInvalidError(
                "clock: expected 'wall' for a device without a profile, got 'model'; name a "
                "profile ('A2', 'A3', '950')",
                argument="clock",
                seen=clock,
            )
        if check_host and race_check == "off":
            raise ParamInvalidError(
                "check_host: expected a race check to be on, got race_check='off'",
                argument="check_host",
                seen=check_host,
            )
        return cls(found, clock, race_check, check_host, events, workers, seed)


def _profile(profile: object) -> DeviceProfile | None:
    if profile is None or isinstance(profile, DeviceProfile):
        return profile
    if isinstance(profile, str):
        return DeviceProfile.named(profile)
    raise ParamInvalidError(
        f"profile: expected a profile's name, a DeviceProfile or None, got {profile!r}",
        argument="profile",
        seen=profile,
    )


def one_of(argument: str, value: object, allowed: tuple[str, ...]) -> str:
    """The value, when it is one of the allowed strings; ParamInvalidError otherwise."""
    if not isinstance(value, str) or value not in allowed:
        raise ParamInvalidError(
            f"{argument}: expected one of {', '.join(allowed)}, got {value!r}",
            argument=argument,
            seen=value,
            expected=allowed,
        )
    return value


def _flag(argument: str, value: object) -> bool:
    try:
        return bool(value)
    except Exception as error:
        raise ParamInvalidError(
            f"{argument}: expected True or False, got {value!r}", argument=argument, seen=value
        ) from error


def _whole(argument: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ParamInvalidError(
            f"{argument}: expected a whole number from {low} to {high}, got {value!r}",
            argument=argument,
            seen=value,
        )
    return value
