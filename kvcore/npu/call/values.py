# SPDX-License-Identifier: Apache-2.0
"""Values that the hardware does not check: slots, lengths, tables.

A slot past the cache is no error there but memory overwritten.  So index arrays are checked by
the operator's own rules before anything is queued, wherever they can be seen: on the host always,
on the device when ``check="device"`` asks for it.  What is checked is a private copy, and the
same copy goes to the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core import adopt, portability
from kvcore._core.plan import Plan
from kvcore.npu import options
from kvcore.npu.call import copies
from kvcore.npu.call.arrays import Argument
from kvcore.npu.call.call import INDEX_ARGUMENTS, Call
from kvcore.npu.cann.library import Cann

__all__ = ["Values"]

#: Index arrays that are written, or must lie on the device, but whose values are checked too.
DEVICE_INDEX = frozenset({"selection_kv_block_table", "selection_kv_block_status"})


class _Checker:
    """The backend of a plan that is never run: its index arrays are on the host."""

    name = "checker"
    spaces = frozenset({"host", "device"})
    uploads = INDEX_ARGUMENTS | DEVICE_INDEX

    def why_not(self, plan: Plan | None = None) -> str | None:
        """None: it does nothing."""
        return None

    def prepare(self, plan: Plan) -> Callable[[], Any]:
        """Nothing."""
        return lambda: None


class Values:
    """Host copies of a call's index arrays."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._shadow: Plan | None = None
        self.copies: dict[int, NDArray[Any]] = {}
        for i, one in enumerate(call.arguments):
            if one is not None and one.name in INDEX_ARGUMENTS | DEVICE_INDEX:
                self.copies[i] = np.empty(one.shape, f"i{one.itemsize}")

    def on_host(self) -> list[int]:
        """Index arrays that the caller has on the host."""
        arguments = self._call.arguments
        return [i for i in self.copies if not _of(arguments[i]).on_device]

    def read_host(self) -> None:
        """Take the values that are on the host now."""
        for i in self.on_host():
            one = _of(self._call.arguments[i])
            raw = adopt.as_raw(one.source, one.name)
            self.copies[i][...] = raw.view(f"i{raw.itemsize}").reshape(one.shape)

    def read_device(
        self, cann: Cann, stream: int, arguments: list[Argument | None], names: Any = None
    ) -> None:
        """Wait for the stream and take the values from the device.

        arguments: contiguous where they are index arrays.  names: only these.
        """
        cann.aclrtSynchronizeStream(stream)
        for i, target in self.copies.items():
            one = _of(arguments[i])
            if not _of(self._call.arguments[i]).on_device or target.nbytes == 0:
                continue
            if names is None or one.name in names:
                if one.host_address is None:
                    copies.to_host(cann, target.ctypes.data, one.address, target.nbytes)
                else:
                    ctypes.memmove(target.ctypes.data, one.host_address, target.nbytes)

    def check(self) -> None:
        """Raise the operator's errors about values, and for values this machine gets wrong."""
        if self._shadow is None:
            call = self._call
            arrays = tuple([self.copies.get(i, array) for i, array in enumerate(call.arrays)])
            with portability.instead("silence"):
                self._shadow = call.operator.plan(arrays, call.params, call.soc, _Checker())
        with portability.instead("refuse" if options.quirks() == "refuse" else "silence"):
            self._shadow.check_values()

    def by_name(self) -> dict[str, NDArray[Any]]:
        """The copies by argument."""
        return {_of(self._call.arguments[i]).name: array for i, array in self.copies.items()}


def _of(argument: Argument | None) -> Argument:
    assert argument is not None
    return argument
