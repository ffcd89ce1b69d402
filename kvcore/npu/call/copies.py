# SPDX-License-Identifier: Apache-2.0
"""Copies of strided arrays into contiguous memory, in the order of a stream.

A kernel that ignores strides gets a copy.  Axes that lie behind one another are joined, the
innermost two become one two-dimensional copy, and the rest a loop over such copies.  A CANN that
copies in two dimensions between host and device alone (all before 9.0) gets a copy a row.
Source: the manual pages of aclrtMemcpy2dAsync of CANN 8.0 to 9.1.
"""

from __future__ import annotations

import itertools
import math

from kvcore.errors import KVCoreError, fail
from kvcore.npu.call.arrays import Argument
from kvcore.npu.cann.constants import (
    ACL_MEMCPY_DEVICE_TO_DEVICE,
    ACL_MEMCPY_DEVICE_TO_HOST,
    ACL_MEMCPY_HOST_TO_DEVICE,
)
from kvcore.npu.cann.library import Cann
from kvcore.strides import coalesce

__all__ = ["gather", "to_device", "to_host"]

#: A queue of more copies than this for one argument costs more than the call is worth.
MAX_COPIES = 4096
#: Bytes of a row and rows that aclrtMemcpy2dAsync takes at most.
MAX_WIDTH, MAX_HEIGHT = 5_000_000, 5 << 20
#: The status by which CANN refuses two-dimensional copies within a device.
NOT_WITHIN_A_DEVICE = (100000, 107000, 200001, 200006, 207000)


def gather(cann: Cann, argument: Argument, address: int, stream: int) -> None:
    """Queue copies of an array on the device to contiguous memory at an address."""
    if argument.size == 0:
        return
    axes, run = coalesce(zip(argument.shape, argument.strides, strict=True), argument.itemsize)
    rows, pitch = axes.pop() if axes else (1, run)
    source, kind = argument.address, ACL_MEMCPY_DEVICE_TO_DEVICE
    if argument.host_address is not None:
        source, kind = argument.host_address, ACL_MEMCPY_HOST_TO_DEVICE
    # Rows that overlap, or lie in reverse, cannot be given as a pitch.
    if pitch < run or run > MAX_WIDTH or rows > MAX_HEIGHT or not _in_two_dimensions(cann, kind):
        axes.append((rows, pitch))
        rows, pitch = 1, run
    copies = math.prod(n for n, _ in axes)
    if copies > MAX_COPIES:
        fail(
            argument.name,
            "a contiguous array, or one of few strided pieces, on this SoC",
            f"shape {list(argument.shape)}, strides {list(argument.strides)} bytes",
        )
    place = address
    for index in itertools.product(*(range(n) for n, _ in axes)):
        start = source + sum(i * stride for i, (_, stride) in zip(index, axes, strict=True))
        if rows == 1:
            cann.aclrtMemcpyAsync(place, run, start, run, kind, stream)
        else:
            try:
                cann.aclrtMemcpy2dAsync(place, run, start, pitch, run, rows, kind, stream)
            except KVCoreError as error:
                within = kind == ACL_MEMCPY_DEVICE_TO_DEVICE
                if not within or error.code not in NOT_WITHIN_A_DEVICE:
                    raise
                cann.copies_in_two_dimensions = False
                gather(cann, argument, address, stream)
                return
        place += run * rows


def _in_two_dimensions(cann: Cann, kind: int) -> bool:
    possible = cann.copies_in_two_dimensions or kind != ACL_MEMCPY_DEVICE_TO_DEVICE
    return possible and cann.has("aclrtMemcpy2dAsync")


def to_device(cann: Cann, address: int, source: int, nbytes: int) -> None:
    """Copy host bytes to memory that no stream uses; done when it returns."""
    cann.aclrtMemcpy(address, nbytes, source, nbytes, ACL_MEMCPY_HOST_TO_DEVICE)


def to_host(cann: Cann, destination: int, address: int, nbytes: int) -> None:
    """Copy device bytes to the host. It waits for no stream: synchronise before."""
    cann.aclrtMemcpy(destination, nbytes, address, nbytes, ACL_MEMCPY_DEVICE_TO_HOST)
