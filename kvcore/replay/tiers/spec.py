# SPDX-License-Identifier: Apache-2.0
"""The tiers of a prefix cache, read from one line: ``hbm=40GiB,dram=200GiB@50GB/s,ssd=2TiB@6GB/s``.

A tier is ``NAME=CAPACITY``, below the device with ``@BANDWIDTH``; then, after colons, what differs
from the rule::

    ssd=2TiB@6GB/s:write=3GB/s:latency=100us
    hbm=40GiB:prefix=off                        # what is freed on the device is not kept there

Units are said, never guessed: KB, MB, GB and TB are powers of 1,000, KiB to TiB of 1,024, and a
small b is refused, since it would be bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvcore.errors import fail, shown
from kvcore.replay.tiers.policies import POLICIES

__all__ = ["NAMES", "TierSpec", "parse_policies", "parse_tiers"]

#: From the fastest to the slowest; the first is the device's own memory.
NAMES = ("hbm", "dram", "ssd", "remote")
MAX_BYTES = 2**60
MAX_LATENCY_US = 1e9
SIZES = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip
TIMES = {"us": 1.0, "ms": 1e3, "s": 1e6}
FORM = "tiers like hbm=40GiB,dram=200GiB@50GB/s,ssd=2TiB@6GB/s"


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier.

    name:           of `NAMES`.
    capacity_bytes: of the keys and values it can hold.
    read_bytes_per_us, write_bytes_per_us: of its link, towards the device and from it; None: of
                    device memory, and of host memory where the device's profile says it.
    latency_us:     of one load, before its first byte.
    policy:         of `POLICIES`: which block goes first when it is full.
    keeps:          whether blocks stay when no request holds them (of device memory alone).
    """

    name: str
    capacity_bytes: int
    read_bytes_per_us: float | None = None
    write_bytes_per_us: float | None = None
    latency_us: float = 0.0
    policy: str = "lru"
    keeps: bool = True


def parse_tiers(text: str, policies: str = "lru") -> tuple[TierSpec, ...]:
    """The tiers of a line, from the fastest to the slowest, with their policies.

    Raises ParamInvalidError that names what is wrong: an unknown or doubled tier, no device
    memory, a size of 0, a bandwidth of 0, a unit that is none, and bandwidths that are missing
    (all at once).
    """
    if not isinstance(text, str):
        fail("tiers", FORM, shown(text))
    found: dict[str, TierSpec] = {}
    for part in text.split(","):
        spec = _tier(part.strip())
        if spec.name in found:
            fail("tiers", f"{spec.name} once", "twice")
        found[spec.name] = spec
    if "hbm" not in found:
        fail("tiers", "hbm among them, the device's own memory", ", ".join(found))
    slow = [name for name in found if name not in ("hbm", "dram")]
    missing = [name for name in slow if found[name].read_bytes_per_us is None]
    if missing:
        fail("tiers", f"a bandwidth (@6GB/s) of {', '.join(missing)}", "none")
    chosen = parse_policies(policies, found)
    return tuple(
        TierSpec(
            name, spec.capacity_bytes, spec.read_bytes_per_us, spec.write_bytes_per_us,
            spec.latency_us, chosen[name], spec.keeps,
        )
        for name in NAMES if name in found for spec in (found[name],)
    )  # fmt: skip


def parse_policies(text: str, tiers: Mapping[str, object]) -> dict[str, str]:
    """The policy of each tier: of ``lru`` for all, or of ``hbm=lru,dram=arc``, lru where not said.

    Raises ParamInvalidError for a policy or a tier that is not there.
    """
    if not isinstance(text, str):
        fail("tier_policy", "a policy, or hbm=lru,dram=arc", shown(text))
    chosen = dict.fromkeys(tiers, "lru")
    if "=" not in text:
        return dict.fromkeys(tiers, _policy(text.strip()))
    named: set[str] = set()
    for part in text.split(","):
        name, _, policy = part.strip().partition("=")
        if name not in tiers or name in named:
            some = ", ".join(tiers)
            fail("tier_policy", f"tiers of {some}, each once, like hbm=lru", shown(part))
        named.add(name)
        chosen[name] = _policy(policy)
    return chosen


def _policy(text: str) -> str:
    if text not in POLICIES:
        fail("tier_policy", f"one of {', '.join(POLICIES)}", shown(text))
    return text


def _tier(part: str) -> TierSpec:
    name, equals, rest = part.partition("=")
    if not equals or name not in NAMES:
        fail("tiers", f"{FORM}, of {', '.join(NAMES)}", shown(part))
    size, *extras = rest.split(":")
    capacity, at, bandwidth = size.partition("@")
    nbytes = _size(name, capacity)
    read = _bandwidth(name, bandwidth) if at else None
    write, latency, keeps = read, 0.0, True
    said: set[str] = set()
    for extra in extras:
        key, _, value = extra.partition("=")
        known = ("prefix",) if name == "hbm" else ("write", "latency")
        if key not in known or key in said:
            fail("tiers", f"{name} with {' and '.join(known)}, each once, after :", shown(extra))
        said.add(key)
        if key == "write":
            write = _bandwidth(name, value)
        elif key == "latency":
            latency = _latency(name, value)
        else:
            keeps = _on(value)
    if name == "hbm" and at:
        fail("tiers", "hbm without a bandwidth: what it holds is not loaded", shown(bandwidth))
    if "write" in said and read is None:
        fail("tiers", f"a bandwidth (@6GB/s) of {name} beside that of its writes", "none")
    return TierSpec(name, nbytes, read, write, latency, keeps=keeps)


def _size(name: str, text: str) -> int:
    number, unit = _split(text)
    nbytes = number * SIZES.get(unit, math.nan)
    if not 1 <= nbytes <= MAX_BYTES:
        least = f"from 1B to {MAX_BYTES // 2**50}PiB"
        fail("tiers", f"a size of {name} {least}, like 40GiB or 2TB", shown(text))
    return int(nbytes)


def _bandwidth(name: str, text: str) -> float:
    number, unit = _split(text)
    per_second = number * SIZES.get(unit.removesuffix("/s"), math.nan)
    if not unit.endswith("/s") or not 1 <= per_second <= MAX_BYTES:
        fail("tiers", f"a bandwidth of {name} above 0, like 50GB/s or 800MiB/s", shown(text))
    return per_second / 1e6


def _latency(name: str, text: str) -> float:
    number, unit = _split(text)
    us = number * TIMES.get(unit, math.nan)
    if not 0 <= us <= MAX_LATENCY_US:
        fail("tiers", f"a latency of {name} like 100us or 2ms", shown(text))
    return us


def _on(text: str) -> bool:
    if text not in ("on", "off"):
        fail("tiers", "hbm with prefix=on or prefix=off", shown(text))
    return text == "on"


def _split(text: str) -> tuple[float, str]:
    """A number and its unit; NaN where there is no number."""
    digits = len(text) - len(text.lstrip("0123456789.")) if text.isascii() else 0
    try:
        return float(text[:digits]), text[digits:]
    except ValueError:
        return math.nan, text
