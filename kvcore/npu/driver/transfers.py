# SPDX-License-Identifier: Apache-2.0
"""Copies and fills as work of a hardware stream.

What moves between the device and pinned (or swapped) memory is aclrtMemcpyAsync, piece by piece,
or one aclrtMemcpyBatchAsync where this CANN has it.  Swapped memory is copied through its host
address: the device's view of it is for kernels.  Pageable memory would make the asynchronous copy
a synchronous one, and copies within host memory are refused (207000), so these go by host
functions, in stream order like everything: pageable to device through pinned staging memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import KVCoreError
from kvcore.npu.cann import constants
from kvcore.npu.cann.structs import MemcpyBatchAttr, MemLocation
from kvcore.npu.driver import hostcalls
from kvcore.runtime.arguments import PAGEABLE, array_of, space_of
from kvcore.runtime.copies import Copy, Fill, bits

if TYPE_CHECKING:
    from kvcore.npu.driver.parts import Hardware

__all__ = ["Transfer", "pieces_between", "within_host"]

Array = npt.NDArray[Any]
Keep = Callable[[object], object]
#: Bytes of the pattern that a fill starts from; the rest is doubled on the device.
PATTERN_BYTES = 1 << 16
ONE_LINK = constants.ACL_MEMCPY_HOST_TO_DEVICE, constants.ACL_MEMCPY_DEVICE_TO_HOST


def _spaces(plan: Copy | Fill) -> list[tuple[str, str]]:
    return [(space_of(dst), space_of(src)) for dst, src in plan.ends]


def within_host(plan: Copy | Fill) -> bool:
    """Whether a host function has to move some of it from pinned memory to pinned memory."""
    return any("device" not in spaces for spaces in _spaces(plan))


class Transfer:
    """A copy or a fill that was checked, with its arrays and the spaces they are in."""

    __slots__ = ("_driver", "_pairs", "_spaces", "plan")

    def __init__(self, driver: Hardware, plan: Copy | Fill) -> None:
        self._driver = driver
        self.plan: Copy | Fill = plan
        key = driver.core.key
        self._spaces = _spaces(plan)
        self._pairs = [
            (bits(array_of(dst, "dst", key)), bits(array_of(src, "src", key)))
            for dst, src in plan.ends
        ]

    def hand_over(self, handle: int, keep: Keep) -> None:
        """Put it on a stream; what must live until it is done goes to ``keep``."""
        keep(self)
        if isinstance(self.plan, Fill):
            ((space, _),) = self._spaces
            self._fill(self.plan, space, handle, keep)
            return
        for (dst, src), spaces in zip(self._pairs, self._spaces, strict=True):
            if dst.size:
                self._copy(dst, src, spaces, handle, keep)

    # -- copies

    def _copy(
        self, dst: Array, src: Array, spaces: tuple[str, str], handle: int, keep: Keep
    ) -> None:
        driver = self._driver
        to, source = spaces
        if "device" not in spaces:
            keep(hostcalls.launch(driver.cann, handle, lambda: np.copyto(dst, src)))
        elif to == source:
            if _meet(dst, src):
                between = driver.scratch("device", dst.nbytes).view(dst.dtype).reshape(dst.shape)
                keep(between)
                self._move(between, src, constants.ACL_MEMCPY_DEVICE_TO_DEVICE, handle, keep)
                src = between
            self._move(dst, src, constants.ACL_MEMCPY_DEVICE_TO_DEVICE, handle, keep)
        elif to == "device":
            if source == PAGEABLE:
                pinned = self._staging(src, keep)
                pageable = src
                keep(hostcalls.launch(driver.cann, handle, lambda: np.copyto(pinned, pageable)))
                src = pinned
            self._move(dst, src, constants.ACL_MEMCPY_HOST_TO_DEVICE, handle, keep)
        elif to == PAGEABLE:
            pinned = self._staging(dst, keep)
            self._move(pinned, src, constants.ACL_MEMCPY_DEVICE_TO_HOST, handle, keep)
            keep(hostcalls.launch(driver.cann, handle, lambda: np.copyto(dst, pinned)))
        else:
            self._move(dst, src, constants.ACL_MEMCPY_DEVICE_TO_HOST, handle, keep)

    def _staging(self, like: Array, keep: Keep) -> Array:
        found = self._driver.scratch("host", like.nbytes).view(like.dtype).reshape(like.shape)
        keep(found)
        return found

    def _move(self, dst: Array, src: Array, kind: int, handle: int, keep: Keep) -> None:
        driver = self._driver
        cann = driver.cann
        rows = pieces_between(dst, src)
        if len(rows) > 1 and kind in ONE_LINK and driver.batches and _apart(rows):
            try:
                _move_batch(driver, rows, kind, handle, keep)
            except KVCoreError as error:
                if error.code != constants.ACL_ERROR_RT_FEATURE_NOT_SUPPORT:
                    raise
                driver.batches = False  # the symbol is there, the driver cannot do it
            else:
                return
        for to, source, nbytes in rows.tolist():
            cann.aclrtMemcpyAsync(to, nbytes, source, nbytes, kind, handle)

    # -- fills

    def _fill(self, plan: Fill, space: str, handle: int, keep: Keep) -> None:
        cann = self._driver.cann
        array, value = plan.target, plan.value
        if not array.size:
            return
        if space != "device":
            keep(hostcalls.launch(cann, handle, plan.run))
            return
        raw = np.asarray(value).reshape(1).view(np.uint8)
        rows = pieces_between(array, array)
        if (raw == raw[0]).all():
            for to, _, nbytes in rows.tolist():
                cann.aclrtMemsetAsync(to, nbytes, int(raw[0]), nbytes, handle)
            return
        longest = int(rows[:, 2].max())
        first = min(longest, PATTERN_BYTES // raw.size * raw.size)
        pattern = self._driver.scratch("host", first)
        pattern.reshape(-1, raw.size)[...] = raw
        keep(pattern)
        for to, _, nbytes in rows.tolist():
            done = min(first, nbytes)
            cann.aclrtMemcpyAsync(
                to, done, pattern.ctypes.data, done, constants.ACL_MEMCPY_HOST_TO_DEVICE, handle
            )
            while done < nbytes:
                more = min(done, nbytes - done)
                cann.aclrtMemcpyAsync(
                    to + done, more, to, more, constants.ACL_MEMCPY_DEVICE_TO_DEVICE, handle
                )
                done += more


def _move_batch(
    driver: Hardware, rows: npt.NDArray[np.int64], kind: int, handle: int, keep: Keep
) -> None:
    n = len(rows)
    to, source, sizes = (np.ascontiguousarray(rows[:, i]) for i in range(3))
    there = MemLocation(driver.device_id, constants.ACL_MEM_LOCATION_TYPE_DEVICE)
    here = MemLocation(0, constants.ACL_MEM_LOCATION_TYPE_HOST)
    ends = (there, here) if kind == constants.ACL_MEMCPY_HOST_TO_DEVICE else (here, there)
    attributes = MemcpyBatchAttr(*ends)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    keep((to, source, sizes, attributes, first))
    driver.cann.aclrtMemcpyBatchAsync(
        to.ctypes.data_as(ctypes.POINTER(ctypes.c_void_p)),
        sizes.ctypes.data_as(ctypes.POINTER(ctypes.c_size_t)),
        source.ctypes.data_as(ctypes.POINTER(ctypes.c_void_p)),
        sizes.ctypes.data_as(ctypes.POINTER(ctypes.c_size_t)),
        n,
        ctypes.byref(attributes),
        ctypes.byref(first),
        1,
        ctypes.byref(failed),
        handle,
    )


def pieces_between(dst: Array, src: Array) -> npt.NDArray[np.int64]:
    """The contiguous pieces of a copy between arrays of one shape.

    Rows (destination address, source address, bytes), in the order of the elements.
    """
    if not dst.size:
        return np.empty((0, 3), np.int64)
    dims = [(n, s, t) for n, s, t in zip(dst.shape, dst.strides, src.strides, strict=True) if n > 1]
    run = dst.itemsize
    while dims and dims[-1][1] == run and dims[-1][2] == run:
        run *= dims.pop()[0]
    to = np.array([dst.ctypes.data], np.int64)
    source = np.array([src.ctypes.data], np.int64)
    for n, s, t in dims:
        steps = np.arange(n, dtype=np.int64)
        to = (to[:, None] + steps * s).ravel()
        source = (source[:, None] + steps * t).ravel()
    return np.stack([to, source, np.full(len(to), run, np.int64)], axis=1)


def _bounds(array: Array) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(bits(array))
    return int(low), int(high)


def _meet(dst: Array, src: Array) -> bool:
    (a, b), (c, d) = _bounds(dst), _bounds(src)
    return a < d and c < b


def _apart(rows: npt.NDArray[np.int64]) -> bool:
    """Whether the destinations have no byte in common: a batch promises no order."""
    order = np.argsort(rows[:, 0], kind="stable")
    starts = rows[order, 0]
    return bool((starts[1:] >= starts[:-1] + rows[order, 2][:-1]).all())
