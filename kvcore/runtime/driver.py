# SPDX-License-Identifier: Apache-2.0
"""Drivers by the name of their backend.

``Device(backend=name)`` makes an object of the class that is entered here.  A class is named as
text and imported when the first device of it is made: the runtime lies below the backends and
knows none of them, and who has no such hardware loads nothing.  What a driver owes its device is
in ``abc``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from kvcore.errors import BackendUnavailableError

if TYPE_CHECKING:
    from kvcore.runtime.abc import Driver

__all__ = ["DRIVERS", "driver_of"]

#: "module:class" by the name of the backend; the class is made with what the program named.
DRIVERS: dict[str, str] = {"aclnn": "kvcore.npu.driver.device:AclDriver"}
_THIS_MACHINE = "kvcore.runtime.model.driver:ModelDriver"


def driver_of(backend: object) -> Driver:
    """A driver for that backend: a name, None for this machine, or a driver itself.

    ``"aclnn:1"`` is the second device of a backend: what follows the colon is the class's own.
    Raises BackendUnavailableError for anything else.
    """
    from kvcore.runtime.abc import Driver

    if isinstance(backend, Driver):
        return backend
    if backend is None or (isinstance(backend, str) and backend == "cpu"):
        return _class_of(_THIS_MACHINE)()
    name = backend.partition(":")[0] if isinstance(backend, str) else ""
    if name not in DRIVERS:
        known = ", ".join(map(repr, DRIVERS))
        raise BackendUnavailableError(
            f"backend: expected None, 'cpu' or {known}, got {backend!r}",
            argument="backend",
            seen=backend,
            expected=(None, "cpu", *DRIVERS),
        )
    return _class_of(DRIVERS[name])(backend)


def _class_of(text: str) -> Callable[..., Driver]:
    module, _, attribute = text.partition(":")
    found: Callable[..., Driver] = getattr(import_module(module), attribute)
    return found
