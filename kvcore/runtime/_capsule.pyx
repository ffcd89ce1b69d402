# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules of element types that numpy does not export.

numpy makes the capsule, of the same memory as unsigned integers, and with it the shape, the flags
and the way to give it back.  Here the element type is written over.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid

from kvcore._core.dlpack cimport kv_dl_managed, kv_dl_type, kv_dl_versioned

#: (code, bits, lanes) of DLPack 1.1 by the element type's name.  float4 is packed two a byte.
TYPES = {
    "bfloat16": (4, 16, 1),
    "float8_e3m4": (7, 8, 1),
    "float8_e4m3": (8, 8, 1),
    "float8_e4m3b11fnuz": (9, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1": (17, 4, 2),
}


def retype(object capsule, str name):
    """Give an unused capsule of unsigned integers the type of that name; returns the capsule."""
    cdef kv_dl_type* dtype
    cdef tuple kind = TYPES[name]
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        dtype = &(<kv_dl_versioned*>PyCapsule_GetPointer(
            capsule, b"dltensor_versioned")).dl_tensor.dtype
    else:
        dtype = &(<kv_dl_managed*>PyCapsule_GetPointer(capsule, b"dltensor")).dl_tensor.dtype
    code, bits, lanes = kind
    dtype.code = code
    dtype.bits = bits
    dtype.lanes = lanes
    return capsule
