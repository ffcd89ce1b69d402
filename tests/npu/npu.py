# SPDX-License-Identifier: Apache-2.0
"""Calls on arrays of the double's device, from numpy arrays."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

import kvcore
from kvcore.npu.call.device_arrays import DeviceArray
from kvcore.npu.cann import library

Array = np.ndarray[Any, Any]

#: What aclrtGetSocName says of one machine each.
MACHINES = {"A2": "Ascend910B3", "A3": "Ascend910_9391", "950": "Ascend950PR_9599"}


class Placed:
    """Host arrays on the device; arrays of one base share memory there too."""

    def __init__(self, **arrays: Array | None) -> None:
        self.arrays: dict[str, DeviceArray | None] = {}
        self._bases: dict[int, DeviceArray] = {}
        self._keep: list[Array] = []
        for name, array in arrays.items():
            self.arrays[name] = None if array is None else self._place(array)

    def __getitem__(self, name: str) -> DeviceArray:
        found = self.arrays[name]
        assert found is not None
        return found

    def _place(self, array: Array) -> DeviceArray:
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        self._keep.append(base)
        raw = base.view(f"u{base.itemsize}") if base.dtype.kind == "V" else base
        if id(base) not in self._bases:
            self._bases[id(base)] = DeviceArray.of(np.array(raw, copy=True), _name(base))
        whole = self._bases[id(base)]
        offset = array.ctypes.data - base.ctypes.data
        return DeviceArray(whole.memory, array.shape, _name(array), array.strides, offset)

    def host(self, name: str) -> Array:
        """The array as it is on the device now."""
        return self[name].to_host()

    def free(self) -> None:
        """Wait for the device and give all memory back."""
        with contextlib.suppress(kvcore.KVCoreError):  # a test of failures looks for itself
            library.current().aclrtSynchronizeDevice()
        for array in self._bases.values():
            array.free()


def _name(array: Array) -> str:
    return array.dtype.name


def run(operator: str, arrays: dict[str, Array | None], **options: Any) -> dict[str, Array]:
    """Call kvcore's operator with arrays on the device; every array afterwards, and ``returned``.

    Options that are host arrays stay on the host.
    """
    placed = Placed(**arrays)
    try:
        answer = getattr(kvcore, operator)(**placed.arrays, **options)
        found = {name: placed.host(name) for name, array in arrays.items() if array is not None}
        if operator == "gather_selection_kv_cache":
            found["returned"] = answer.to_host()
            answer.free()
        elif operator == "kv_cache_update":
            assert answer is placed["past"]
        else:
            assert answer is None
        return found
    finally:
        placed.free()
