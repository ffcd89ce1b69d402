# SPDX-License-Identifier: Apache-2.0
"""The machine's libraries, loaded, and its controls.

The libraries are opened for all to see (RTLD_GLOBAL) and carry CANN's names, so that torch_npu's
own request for ``libascendcl.so`` finds them in the process and looks no further.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_int, c_ssize_t, c_uint64, c_void_p

from kvcore.emulator.environment import Settings
from kvcore.emulator.installed import HOME, LIBRARIES
from kvcore.errors import BackendUnavailableError

__all__ = ["PRODUCTS", "Machine", "foreign_library", "load"]

#: What aclrtGetSocName says, of the names that torch_npu knows.
PRODUCTS = {"A2": "Ascend910B3", "A3": "Ascend910_9391", "950": "Ascend950PR_9599"}

#: A stream begins by itself one to two of these after a launch; at once when somebody waits.
PATIENCE_NS = 1_000_000


def foreign_library() -> str | None:
    """A library of a real CANN that this process has loaded already."""
    names = {name.rpartition("/")[2] for name in LIBRARIES[1:]} | {"libascend_hal.so"}
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            name = path[2].rpartition("/")[2]
            if name in names and not f"/{path[2]}".startswith(str(HOME)):
                return f"/{path[2]}"
    return None


class Machine:
    """The libraries of one process."""

    def __init__(self) -> None:
        opened = []
        for name in LIBRARIES:
            try:
                opened.append(ctypes.CDLL(str(HOME / name), mode=ctypes.RTLD_GLOBAL))
            except OSError as error:
                raise BackendUnavailableError(
                    f"the emulated machine's {name} cannot be loaded: {error}"
                ) from error
        self.libraries: list[ctypes.CDLL] = opened
        self.core: ctypes.CDLL = opened[0]
        for name, result, *arguments in (
            ("kvdouble_violations", c_char_p),
            ("kvdouble_soc", None, c_char_p),
            ("kvdouble_devices", None, c_int),
            ("kvdouble_capacity", None, c_uint64),
            ("kvdouble_budget", None, c_uint64),
            ("kvdouble_patience", None, c_uint64),
            ("kvdouble_quiet", None, c_bool),
            ("kvdouble_lenient_texts", None, c_bool),
            ("kvdouble_patch", c_int, c_char_p),
            ("kvdouble_python_gone", None),
            ("kvdouble_ranges", c_int, c_void_p, c_void_p, c_void_p, c_void_p),
        ):
            function = getattr(self.core, name)
            function.restype = result
            function.argtypes = arguments

    def become(self, settings: Settings, memory: int, budget: int) -> None:
        """Apply the settings to a machine on which nothing was done yet.

        memory: bytes of each device.  budget: bytes of all devices and pinned memory together.
        """
        self.core.kvdouble_soc(PRODUCTS[settings.soc].encode())
        self.core.kvdouble_devices(settings.devices)
        self.core.kvdouble_capacity(memory)
        self.core.kvdouble_budget(budget)
        self.core.kvdouble_patience(PATIENCE_NS)
        self.core.kvdouble_quiet(True)
        self.core.kvdouble_lenient_texts(True)

    def address(self, name: str) -> int:
        """The address of a function or a counter of the machine, for compiled callers."""
        found = ctypes.cast(getattr(self.core, name), c_void_p).value
        assert found is not None
        return found

    def ranges(self) -> tuple[int, int, int, int]:
        """Device addresses: the first, how many, how far from each its byte lies, and from which
        on they are the device's view of registered host memory, which has no such byte.
        """
        start, size, alias, swapped = c_uint64(), c_uint64(), c_ssize_t(), c_uint64()
        if self.core.kvdouble_ranges(*map(ctypes.byref, (start, size, alias, swapped))):
            raise BackendUnavailableError("no range of addresses is left for device memory")
        return start.value, size.value, alias.value, swapped.value

    def violations(self) -> list[str]:
        """Broken rules so far, oldest first: ``[section] symbol: what``."""
        text: bytes = self.core.kvdouble_violations()
        return text.decode(errors="replace").splitlines()


_loaded: Machine | None = None


def load() -> Machine:
    """The machine of this process, loaded at the first call."""
    global _loaded
    if _loaded is None:
        _loaded = Machine()
    return _loaded
