# SPDX-License-Identifier: Apache-2.0
"""Producers of DLPack capsules, made field by field: what no installed package would make.

Structures after dlpack.h.  A producer counts how often its memory was released.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU, CUDA, CUDA_HOST = 1, 2, 3
READ_ONLY, IS_COPIED = 1, 2
INT, UINT, FLOAT, BFLOAT, BOOL = 0, 1, 2, 4, 6
E4M3FN, E5M2, FLOAT4_E2M1 = 10, 12, 17


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("dl_tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", Deleter))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _Tensor),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


_exported: list[Producer] = []


class Producer:
    """A tensor of any kind over an array's memory.

    versioned: which capsule; an unversioned producer does not know max_version.
    strides: in elements; None is a null pointer.  Every other keyword is the field of that name.
    """

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        code: int = UINT,
        bits: int | None = None,
        lanes: int = 1,
        *,
        versioned: bool = True,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        device_type: int = CPU,
        flags: int = 0,
        major: int = 1,
        ndim: int | None = None,
        byte_offset: int = 0,
        data: int | None = None,
        no_shape: bool = False,
    ) -> None:
        self.array = array
        self.versioned = versioned
        self.released = 0
        self.exported = 0
        shape = array.shape if shape is None else shape
        tensor = _Tensor()
        tensor.data = array.ctypes.data if data is None else data
        tensor.device = _Device(device_type, 0)
        tensor.ndim = len(shape) if ndim is None else ndim
        tensor.dtype = _Type(code, 8 * array.itemsize if bits is None else bits, lanes)
        self.sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        if not no_shape:
            tensor.shape = ctypes.cast(self.sizes, ctypes.POINTER(ctypes.c_int64))
        if strides is not None:
            self.steps = (ctypes.c_int64 * max(len(strides), 1))(*strides)
            tensor.strides = ctypes.cast(self.steps, ctypes.POINTER(ctypes.c_int64))
        tensor.byte_offset = byte_offset
        self.deleter = Deleter(self._release)
        if versioned:
            self.managed: Any = _Versioned(major, 0, None, self.deleter, flags, tensor)
            self.name = b"dltensor_versioned"
        else:
            self.managed = _Managed(tensor, None, self.deleter)
            self.name = b"dltensor"

    def _release(self, _managed: int) -> None:
        self.released += 1

    def __dlpack__(self, **keywords: Any) -> Any:
        if not self.versioned and keywords:
            raise TypeError("__dlpack__() takes no keyword")
        self.exported += 1
        # A capsule may outlive its producer; who holds it calls into this structure.
        _exported.append(self)
        return _new_capsule(ctypes.addressof(self.managed), self.name, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)
