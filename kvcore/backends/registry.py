# SPDX-License-Identifier: Apache-2.0
"""Backends by name, and which one a call gets.

``backend=None`` goes by where the arrays live: host arrays to cpu, NPU tensors to aclnn, mixed is
an error.  ``use()`` overrides per task, ``KVCORE_BACKEND`` per process, ``backend=`` per call; an
override that cannot reach the memory is a BackendUnavailableError.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from kvcore._core import settings
from kvcore._core.plan import Plan
from kvcore.backends.base import Backend
from kvcore.backends.cpu import CpuBackend
from kvcore.errors import BackendUnavailableError, fail, shown
from kvcore.npu.backend import AclnnBackend

__all__ = ["available", "get", "load_errors", "names", "register", "use", "why_not"]

ENTRY_POINTS = "kvcore.backends"
ENVIRONMENT = "KVCORE_BACKEND"
NPU = "aclnn"
SPACES = frozenset({"host", "device"})
_NONE: frozenset[str] = frozenset()

_lock = threading.RLock()
_backends: dict[str, Backend] = {"cpu": CpuBackend(), NPU: AclnnBackend()}
_broken: dict[str, str] = {}
_searched = False


def register(name: str, backend: Backend) -> None:
    """Add a backend. Raises ParamInvalidError for a taken name or an object that is none."""
    if not isinstance(name, str) or not name.isidentifier():
        fail("name", "an identifier", shown(name))
    if isinstance(backend, type) or not isinstance(backend, Backend):
        seen = getattr(backend, "__qualname__", type(backend).__name__)
        fail("backend", "an object with name, spaces, why_not and prepare", seen)
    if not isinstance(backend.spaces, frozenset | set) or not backend.spaces <= SPACES:
        fail("backend", "spaces that are a set of 'host' and 'device'", shown(backend.spaces))
    with _lock:
        if name in _backends and _backends[name] is not backend:
            fail("name", "a name that is free", repr(name))
        _backends[name] = backend


def _search() -> None:
    # Third parties are looked up when a name is asked for, not when kvcore is imported.
    global _searched
    with _lock:
        if _searched:
            return
        _searched = True
        for point in entry_points(group=ENTRY_POINTS):
            try:
                found = point.load()
                register(point.name, found() if isinstance(found, type) else found)
            except Exception as error:  # a broken plug-in must not break the others
                _broken[point.name] = f"{type(error).__name__}: {error}"


def names() -> tuple[str, ...]:
    """Every registered backend."""
    _search()
    return tuple(_backends)


def load_errors() -> dict[str, str]:
    """What went wrong, by name, for each entry point that gave no backend."""
    _search()
    return dict(_broken)


def available() -> tuple[str, ...]:
    """The backends that can run here."""
    return tuple(name for name in names() if _reason(_backends[name]) is None)


def why_not(name: str) -> str | None:
    """Why that backend cannot run here; None when it can."""
    _search()
    if name in _backends:
        return _reason(_backends[name])
    return _broken.get(name, f"no backend of that name; known: {', '.join(_backends)}")


def get(name: str) -> Backend:
    """The backend of that name, usable or not; ParamInvalidError lists the known ones."""
    known = isinstance(name, str)
    if known and name not in _backends:
        _search()
    if not known or name not in _backends:
        if known and name in _broken:
            raise BackendUnavailableError(
                f"backend {name!r} is not available: {_broken[name]}", argument="backend", seen=name
            )
        fail("backend", "one of " + ", ".join(map(repr, _backends)), shown(name))
    return _backends[name]


@contextmanager
def use(name: str) -> Iterator[Backend]:
    """Send every call of this task in the block to that backend.

    Raises BackendUnavailableError when it cannot run here.
    """
    backend = get(name)
    _require(backend, None)
    settings.activate()
    token = settings.BACKEND.set(name)
    try:
        yield backend
    finally:
        settings.BACKEND.reset(token)


def _reason(backend: Backend, plan: Plan | None = None) -> str | None:
    try:
        return backend.why_not(plan)
    except Exception as error:  # one that cannot even say why it cannot run must not break others
        return f"why_not() raised {type(error).__name__}: {error}"


def _require(backend: Backend, plan: Plan | None) -> None:
    reason = _reason(backend, plan)
    if reason is not None:
        raise BackendUnavailableError(
            f"backend {backend.name!r} is not available: {reason}",
            argument="backend",
            seen=backend.name,
            expected=reason,
        )


def _choose(
    plan: Plan, backend: Any, on_device: bool
) -> tuple[Backend | None, Callable[[], Any] | None]:
    asked = backend
    if asked is None:
        asked = settings.BACKEND.get()
    if asked is None:
        asked = os.environ.get(ENVIRONMENT, "").strip() or None
    if asked is None and not on_device:
        return None, None
    named = asked
    if isinstance(asked, str):
        named = _backends.get(asked) or get(asked)
    elif asked is not None and (isinstance(asked, type) or not isinstance(asked, Backend)):
        # One that has a name was looked at when it was registered; to look costs more than a call.
        fail("backend", "a name or a Backend", type(asked).__name__)
    here, there = plan.places()
    if here and there and (asked is None or not getattr(named, "uploads", _NONE).issuperset(here)):
        # A backend that was named may take small arrays from the host beside the device's.
        fail("backend", "arrays that all live on the host or all on one device", "a mixture")
    if asked is None:
        if NPU not in names():
            raise BackendUnavailableError(
                f"backend {NPU!r} is not available: it is not installed, and NPU arrays need it",
                argument="backend",
                seen=NPU,
            )
        named = get(NPU)
    chosen: Backend = named
    if isinstance(chosen, CpuBackend) and not on_device:
        return None, None
    space = "device" if there else "host"
    if (here or there) and space not in chosen.spaces:
        if not on_device and _falls_back(chosen):
            return None, None
        _require(chosen, None)
        raise BackendUnavailableError(
            f"backend {chosen.name!r} cannot reach {space} memory",
            argument="backend",
            seen=chosen.name,
        )
    if _reason(chosen, plan) is not None:
        if not on_device and _falls_back(chosen):
            return None, None
        _require(chosen, None)
        _require(chosen, plan)
    return chosen, chosen.prepare(plan)


def _falls_back(backend: Backend) -> bool:
    """Whether the CPU stands in for a backend that cannot run here, as its options ask."""
    return getattr(backend, "fallback", None) == "cpu" and _reason(backend) is not None


settings.install(_choose)
