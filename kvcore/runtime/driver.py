# SPDX-License-Identifier: Apache-2.0
"""Devices of other backends, by name.

``Device(backend=name)`` makes an object of the class that is entered here.  A class is named as
text and imported when the first device of it is made: the runtime lies below the backends and
knows none of them, and who has no such hardware loads nothing.

A driver is a subclass of Device.  It keeps the books that Device keeps (launches, failures,
captures, the race check, the trace, waking of tasks), takes order, completion and memory from its
hardware: it has classes of its own for streams, events, buffers and the waiting host.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore.runtime.device import Device

__all__ = ["DRIVERS", "driver_of"]

#: "module:class" by the name of the backend.
DRIVERS: dict[str, str] = {"aclnn": "kvcore.npu.driver.device:AclDevice"}


def driver_of(backend: object) -> type[Device] | None:
    """The class of devices of that backend; None for this machine and for names not known.

    ``"aclnn:1"`` is the second device of a backend: what follows the colon is the class's own.
    """
    name = backend.partition(":")[0] if isinstance(backend, str) else ""
    if name not in DRIVERS:
        return None
    module, _, attribute = DRIVERS[name].partition(":")
    found: type[Device] = getattr(import_module(module), attribute)
    return found
