# SPDX-License-Identifier: Apache-2.0
"""Values that the hardware does not check: slots, lengths, tables.

A slot past the cache is no error there but memory overwritten.  So index arrays are checked by
the operator's own rules before anything is queued, wherever they can be seen: on the host always,
on the device when ``check="device"`` asks for it.  What is checked is a private copy, and the
same copy goes to the device.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvcore._core import adopt, portability
from kvcore.npu import options
from kvcore.npu.call import copies
from kvcore.npu.call.arrays import Argument
from kvcore.npu.call.call import INDEX_ARGUMENTS, OperatorCall
from kvcore.npu.cann.library import Cann

__all__ = ["Values"]

#: Index arrays that are written, or must lie on the device, but whose values are checked too.
DEVICE_INDEX = frozenset({"selection_kv_block_table", "selection_kv_block_status"})


class Values:
    """Host copies of a call's index arrays, for one run at a time; the call is any of its form's.

    copies: by the argument's position.  on_host: those that the caller has on the host.
    """

    def __init__(self, call: OperatorCall) -> None:
        self._names: dict[int, str] = {}
        self.copies: dict[int, NDArray[Any]] = {}
        self.on_host: list[int] = []
        for i, one in enumerate(call.arguments):
            if one is not None and one.name in INDEX_ARGUMENTS | DEVICE_INDEX:
                self._names[i] = one.name
                self.copies[i] = np.empty(one.shape, f"i{one.itemsize}")
                if not one.on_device:
                    self.on_host.append(i)
        # The rules about values read these arrays only.
        arrays = tuple([self.copies.get(i) for i in range(len(call.arguments))])
        self._shadow = call.operator.plan_of_values(call.spec, arrays, call.params)

    def read_host(self, arguments: list[Argument | None]) -> None:
        """Take the values that are on the host now."""
        for i in self.on_host:
            one, target = _of(arguments[i]), self.copies[i]
            if type(one.source) is np.ndarray and one.source.dtype == target.dtype:
                target[...] = one.source
            else:
                raw = adopt.as_raw(one.source, one.name)
                target[...] = raw.view(target.dtype).reshape(one.shape)

    def read_device(
        self, cann: Cann, stream: int, arguments: list[Argument | None], names: Any = None
    ) -> None:
        """Wait for the stream and take the values from the device.

        arguments: contiguous where they are index arrays.  names: only these.
        """
        cann.aclrtSynchronizeStream(stream)
        for i, target in self.copies.items():
            one = _of(arguments[i])
            if i in self.on_host or target.nbytes == 0:
                continue
            if names is None or one.name in names:
                if one.host_address is None:
                    copies.to_host(cann, target.ctypes.data, one.address, target.nbytes)
                else:
                    ctypes.memmove(target.ctypes.data, one.host_address, target.nbytes)

    def check(self) -> None:
        """Raise the operator's errors about values, and for values this machine gets wrong."""
        portability.within(_instead, self._shadow.check_values)

    def by_name(self) -> dict[str, NDArray[Any]]:
        """The checked copies on the host, by the name of their argument."""
        return {self._names[i]: array for i, array in self.copies.items()}


def _instead() -> Literal["refuse", "silence"]:
    return "refuse" if options.quirks() == "refuse" else "silence"


def _of(argument: Argument | None) -> Argument:
    assert argument is not None
    return argument
