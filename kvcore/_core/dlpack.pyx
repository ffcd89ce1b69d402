# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules, versioned and not, read field by field.

numpy's own importer refuses bfloat16 and the float8 types; the structure itself carries them.
Layout and codes: dlpack.h, DLPack 1.1.
"""

from cpython.pycapsule cimport (
    PyCapsule_GetPointer,
    PyCapsule_IsValid,
    PyCapsule_SetName,
)
from libc.stdint cimport SIZE_MAX

from kvcore.dtypes import DLPACK, DLPACK_BEYOND_NUMPY
from kvcore.strides import dense_strides

# The runtime, which does not know the table of types, takes these from here.
BEYOND_NUMPY = DLPACK_BEYOND_NUMPY
# Names by (code, bits), of types that are not packed.
NAMES = {(code, bits): name for name, (code, bits, lanes) in DLPACK.items() if lanes == 1}
cdef object FLOAT4_X2 = DLPACK["float4_e2m1"]


cdef class Tensor:
    """One imported tensor: holds the producer's memory until it goes."""

    cdef kv_dl_managed* old
    cdef kv_dl_versioned* new
    cdef readonly size_t address
    cdef readonly tuple shape
    cdef readonly tuple strides
    cdef readonly str dtype_name
    cdef readonly int itemsize
    cdef readonly int device_type
    cdef readonly bint read_only
    cdef readonly bint is_copy

    def __dealloc__(self):
        if self.old != NULL and self.old.deleter != NULL:
            self.old.deleter(self.old)
        if self.new != NULL and self.new.deleter != NULL:
            self.new.deleter(self.new)

    cdef fill(self, const kv_dl_tensor* t):
        cdef int i
        cdef object item  # not a C integer: a producer may say anything
        code = (t.dtype.code, t.dtype.bits)
        if (t.dtype.code, t.dtype.bits, t.dtype.lanes) == FLOAT4_X2:
            self.dtype_name = "float4_e2m1"
            self.itemsize = 1
        elif t.dtype.lanes != 1:
            raise ValueError(f"dtype with {t.dtype.lanes} lanes")
        elif code[1] % 8:
            raise ValueError(f"dtype of {code[1]} bits, not packed in bytes")
        else:
            self.dtype_name = NAMES.get(code, f"dlpack code {code[0]} bits {code[1]}")
            self.itemsize = code[1] // 8
        if t.ndim < 0 or t.ndim > 64:
            raise ValueError(f"{t.ndim} axes")
        if t.ndim > 0 and t.shape == NULL:
            raise ValueError("no shape")
        self.device_type = t.device.device_type
        if t.data == NULL and t.byte_offset:
            raise ValueError("an offset from a null pointer")
        if t.byte_offset > SIZE_MAX - <size_t>t.data:
            raise ValueError(f"a byte offset of {t.byte_offset}, past the end of the address space")
        self.address = <size_t>t.data + t.byte_offset
        self.shape = tuple([t.shape[i] for i in range(t.ndim)])
        item = self.itemsize
        if t.strides != NULL:
            self.strides = tuple([item * t.strides[i] for i in range(t.ndim)])
        else:
            self.strides = dense_strides(self.shape, item)


def import_tensor(obj):
    """Take the tensor out of obj.__dlpack__(), asking for the versioned capsule first."""
    cdef Tensor tensor = Tensor.__new__(Tensor)
    try:
        capsule = obj.__dlpack__(max_version=(1, 1))
    except TypeError:
        capsule = obj.__dlpack__()
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        tensor.new = <kv_dl_versioned*>PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        PyCapsule_SetName(capsule, b"used_dltensor_versioned")
        if tensor.new.major != 1:
            raise BufferError(f"DLPack version {tensor.new.major} is not understood")
        tensor.read_only = tensor.new.flags & 1
        tensor.is_copy = tensor.new.flags & 2 != 0
        tensor.fill(&tensor.new.dl_tensor)
    elif PyCapsule_IsValid(capsule, b"dltensor"):
        tensor.old = <kv_dl_managed*>PyCapsule_GetPointer(capsule, b"dltensor")
        PyCapsule_SetName(capsule, b"used_dltensor")
        tensor.fill(&tensor.old.dl_tensor)
    else:
        raise TypeError("__dlpack__() gave no unused DLPack capsule")
    return tensor
