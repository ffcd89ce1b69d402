# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules of element types that numpy does not export.

numpy makes the capsule, of the same memory as unsigned integers, and with it the shape, the flags
and the way to give it back.  Here the element type is written over.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid

from kvcore._core.dlpack cimport kv_dl_managed, kv_dl_type, kv_dl_versioned
from kvcore._core.dlpack import BEYOND_NUMPY


def retype(object capsule, str name):
    """Give an unused capsule of unsigned integers the type of that name, if numpy lacks the type.

    Returns the capsule.
    """
    cdef kv_dl_type* dtype
    if name not in BEYOND_NUMPY:
        return capsule
    cdef tuple kind = BEYOND_NUMPY[name]
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
