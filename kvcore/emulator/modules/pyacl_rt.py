# SPDX-License-Identifier: Apache-2.0
"""``acl.rt``: functions of the runtime on addresses."""

from __future__ import annotations

import ctypes

from kvcore.emulator import machine

__all__ = ["memcpy"]


def memcpy(dst: int, dest_max: int, src: int, count: int, direction: int) -> int:
    """Copy count bytes from src to dst, which has room for dest_max, and wait for it.

    direction: 0 within the host, 1 to the device, 2 to the host, 3 within the device.
    Returns aclrtMemcpy's code, 0 for success.
    """
    copy = machine.load().core.aclrtMemcpy
    copy.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
    ]  # fmt: skip
    code: int = copy(dst, dest_max, src, count, direction)
    return code
