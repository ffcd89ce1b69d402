# SPDX-License-Identifier: Apache-2.0
"""The thread budget: how many threads one call may use.

None (automatic) means one thread for small work and one per usable core for large work.  The
usable cores are those of the process's affinity mask, capped by a cgroup quota.
"""

from __future__ import annotations

import math
import operator
import os
from pathlib import Path

from kvcore.errors import ParamInvalidError, shown

__all__ = [
    "AUTO",
    "MAX_THREADS",
    "check",
    "get_num_threads",
    "set_num_threads",
    "usable_cores",
]

AUTO = 0
MAX_THREADS = 1024
ENVIRONMENT = "KVCORE_NUM_THREADS"

_default = AUTO


def _cgroup_quota() -> float:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def _count_cores() -> int:
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    if quota < cores:
        cores = max(1, math.ceil(quota))
    return min(cores, MAX_THREADS)


_cores = _count_cores()


def usable_cores() -> int:
    """Cores this process may use, as counted when kvcore was imported."""
    return _cores


def check(value: object, name: str = "num_threads") -> int:
    """The count as an int (0 for None); raises ParamInvalidError unless it is in 1..1024."""
    if value is None:
        return AUTO
    seen = ""
    if not isinstance(value, bool):
        try:
            count = operator.index(value)  # type: ignore[arg-type]
        except Exception:  # an __index__ may raise what it likes
            pass
        else:
            if 1 <= count <= MAX_THREADS:
                return count
            seen = shown(count)
    expected = f"an int from 1 to {MAX_THREADS}, or None"
    seen = seen or f"{type(value).__name__} {shown(value)}"
    raise ParamInvalidError(
        f"{name}: expected {expected}, got {seen}",
        argument=name,
        seen=value,
        expected=expected,
    )


def from_environment(text: str) -> int:
    """What KVCORE_NUM_THREADS says; empty means automatic."""
    if not text.strip():
        return AUTO
    try:
        value: object = int(text)
    except ValueError:
        value = text
    return check(value, ENVIRONMENT)


def set_num_threads(num_threads: int | None) -> None:
    """Set the default for calls without num_threads=; None is automatic again."""
    global _default
    _default = check(num_threads)


def get_num_threads() -> int | None:
    """The default that set_num_threads or KVCORE_NUM_THREADS left; None is automatic."""
    count = default_threads()
    return None if count == AUTO else count


def default_threads() -> int:
    """0 (automatic) or the count in force: set_num_threads before the environment."""
    if _default != AUTO:
        return _default
    text = os.environ.get(ENVIRONMENT)
    return AUTO if text is None else from_environment(text)
