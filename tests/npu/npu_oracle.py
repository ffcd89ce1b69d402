# SPDX-License-Identifier: Apache-2.0
"""A CPU's test on the NPU: the same call with its arrays on the device, bytes back afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

import kvcore
from kvcore.npu import options
from kvcore.npu.call import copies
from kvcore.npu.call.call import INDEX_ARGUMENTS
from kvcore.npu.call.device_arrays import DeviceArray
from kvcore.npu.call.memory import DeviceMemory, allocate
from kvcore.npu.cann import library

__all__ = ["Placed", "on_npu"]

Array = np.ndarray[Any, Any]


class There:
    """What a host array is, on the device: shape, strides, dtype (of any name), flags."""

    device_id = stream = 0

    def __init__(
        self,
        memory: DeviceMemory,
        array: Array,
        offset: int,
        made: list[DeviceArray],
        dtype: str,
    ) -> None:
        self.shape, self.strides = array.shape, array.strides
        self.dtype, self.itemsize = dtype, array.itemsize
        self.read_only = not array.flags.writeable
        self._made = made
        self.address, self.base = memory.address + offset, memory.address
        self.storage_bytes = memory.nbytes

    @property
    def __kvcore_device_array__(self) -> There:
        return self

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """What an operator returns."""
        self._made.append(DeviceArray(allocate(library.current(), 0, 4 * shape[0]), shape, dtype))
        return self._made[-1]


def _root(array: Array) -> Array:
    """The array that owns the memory, through memory views and whatever else lies between."""
    root, below = array, array.base
    while below is not None:
        if isinstance(below, np.ndarray):
            root = below
        below = below.obj if isinstance(below, memoryview) else getattr(below, "base", None)
    return root


def _bytes(array: Array) -> Array:
    """All of the memory that an array spans."""
    low, high = np.lib.array_utils.byte_bounds(array)
    if not array.size or low == high:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)


def nct_sources(arguments: dict[str, Any]) -> frozenset[str]:
    """Arguments that are read by the memory behind them, whatever their strides."""
    is_nct = arguments.get("scatter_mode") == "Nct" and arguments.get("cache_mode") != "PA_NZ"
    return frozenset({"key", "value"}) if is_nct else frozenset()


class Placed:
    """Arguments with their plain arrays on the device.

    dense:   each array in memory of its own, contiguous; else arrays of one base share memory, as
             they do on the host.  Sources of Nct keep the memory that they are views of.
    on_host: names of index arrays that stay where they are.
    dtypes:  what arrays of a dtype are said to hold there, where that is another name.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        dense: bool,
        on_host: frozenset[str] = frozenset(),
        dtypes: dict[str, str] | None = None,
    ) -> None:
        self.arguments: dict[str, Any] = {}
        self._dtypes = dtypes or {}
        self._made: list[DeviceArray] = []
        self._regions: dict[int, tuple[Array, DeviceMemory, bool]] = {}
        for name, value in arguments.items():
            plain = type(value) is np.ndarray and value.dtype.isnative
            if plain and name not in on_host:
                value = self._place(value, dense and name not in nct_sources(arguments))
            self.arguments[name] = value

    def _place(self, array: Array, dense: bool) -> There:
        dtype = self._dtypes.get(array.dtype.name, array.dtype.name)
        if dense:
            if id(array) not in self._regions:
                raw = np.frombuffer(array.tobytes(), np.uint8)
                self._regions[id(array)] = array, DeviceArray.of(raw).memory, True
            memory = self._regions[id(array)][1]
            like = np.ndarray(array.shape, array.dtype)
            like.flags.writeable = array.flags.writeable
            return There(memory, like, 0, self._made, dtype)
        root = _root(array)
        low = np.lib.array_utils.byte_bounds(root)[0]
        if low not in self._regions:
            self._regions[low] = root, DeviceArray.of(_bytes(root)).memory, False
        return There(self._regions[low][1], array, array.ctypes.data - low, self._made, dtype)

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *_: object) -> None:
        """Bring back, free."""
        self.fetch()
        self.free()

    def send(self) -> None:
        """What the arrays hold now, to the device."""
        cann = library.current()
        with cann.on_device(0):
            for array, memory, dense in self._regions.values():
                here = array.tobytes() if dense else _bytes(array)
                raw = np.frombuffer(here, np.uint8)
                if raw.size:
                    copies.to_device(cann, memory.address, raw.ctypes.data, raw.nbytes)

    def fetch(self) -> None:
        """Wait, and bring every byte back to where it came from."""
        cann = library.current()
        with cann.on_device(0):
            cann.aclrtSynchronizeDevice()
            for array, memory, dense in self._regions.values():
                here = array.tobytes() if dense else _bytes(array)
                now = np.empty(len(here), np.uint8)
                if now.size:
                    copies.to_host(cann, now.ctypes.data, memory.address, now.nbytes)
                if not array.flags.writeable:
                    assert bytes(here) == now.tobytes()
                elif dense:
                    if bytes(here) != now.tobytes():
                        array[...] = np.frombuffer(now, array.dtype).reshape(array.shape)
                else:
                    here[:] = now

    def free(self) -> None:
        """Give the memory back."""
        for _, memory, _ in self._regions.values():
            memory.free()
        for answer in self._made:
            answer.free()


def on_npu(
    operator: str,
    *,
    check: str = "device",
    planned: bool = False,
    host: bool = False,
    dense: bool = False,
) -> Callable[..., Any]:
    """The public function of an operator, its arrays on the NPU.

    check: whether values on the device are checked.  host: index arrays stay on the host.
    dense: arrays are contiguous there, however they are here.
    """
    function = getattr(kvcore, f"plan_{operator}" if planned else operator)

    def call(**arguments: Any) -> Any:
        arguments.pop("num_threads", None)
        named = INDEX_ARGUMENTS if host else frozenset()
        with (
            Placed(arguments, dense, named) as placed,
            options.use_options(check=check, quirks="pass"),
        ):
            answer = function(**placed.arguments, **({"backend": "aclnn"} if host else {}))
            if planned:
                answer = answer.run()
            if operator == "kv_cache_update":
                assert answer is placed.arguments["past"]
                return arguments["past"]
            return answer.to_host() if isinstance(answer, DeviceArray) else answer

    return call
