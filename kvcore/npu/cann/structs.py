# SPDX-License-Identifier: Apache-2.0
"""Structures that cross to CANN, with the sizes its headers compile to on 64-bit machines."""

from __future__ import annotations

import ctypes

__all__ = [
    "HOST_FUNC",
    "MallocAttribute",
    "MallocConfig",
    "MemLocation",
    "MemcpyBatchAttr",
    "PtrAttributes",
]

#: aclrtHostFunc and aclrtCallback: keep the object alive until it has run.
HOST_FUNC = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class MallocAttribute(ctypes.Structure):
    """aclrtMallocAttribute: 12 bytes, since its union of 8 is declared 4-aligned."""

    _pack_ = 4
    _layout_ = "ms"
    _fields_ = (("attr", ctypes.c_int32), ("value", ctypes.c_uint64))


class MallocConfig(ctypes.Structure):
    """The structure aclrtMallocConfig."""

    _fields_ = (("attrs", ctypes.POINTER(MallocAttribute)), ("num_attrs", ctypes.c_size_t))


class MemLocation(ctypes.Structure):
    """The structure aclrtMemLocation."""

    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int32))


class PtrAttributes(ctypes.Structure):
    """The structure aclrtPtrAttributes."""

    _fields_ = (
        ("location", MemLocation),
        ("page_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 4),
    )


class MemcpyBatchAttr(ctypes.Structure):
    """The structure aclrtMemcpyBatchAttr."""

    _fields_ = (
        ("destination", MemLocation),
        ("source", MemLocation),
        ("reserved", ctypes.c_uint8 * 16),
    )
