# SPDX-License-Identifier: Apache-2.0
"""One door for arrays: address, shape, strides in bytes, dtype row and flags of anything.

A numpy array of a known dtype is read from its C structure (some 20 ns).  Everything else
goes through adopt.read, in Python: torch tensors without importing torch, runtime buffers,
__array_interface__, DLPack, the buffer protocol.  No array is ever copied.
"""

from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

import numpy

from kvcore import dtypes
from kvcore._core import adopt

cdef extern from "../_core/ndarray.h":
    ctypedef struct kv_ndarray:
        char* data
        int nd
        Py_ssize_t* dimensions
        Py_ssize_t* strides
        PyObject* descr
        int flags
    int KV_NDARRAY_WRITEABLE

cdef extern from "../_core/dlpack.h":
    ctypedef struct kv_dl_device:
        int32_t device_type
    ctypedef struct kv_dl_type:
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct kv_dl_tensor:
        void* data
        kv_dl_device device
        int32_t ndim
        kv_dl_type dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    ctypedef struct kv_dl_exchange:
        uint32_t major
        int (*tensor_from_object)(void* object, kv_dl_tensor* out) except -1

cdef enum:
    KNOWN = 32
    DL_CPU = 1

cdef PyObject* known_descr[KNOWN]
cdef int32_t known_dtype[KNOWN]
cdef int32_t known_size[KNOWN]
cdef int n_known = 0
cdef list known_refs = []
cdef object NDARRAY = numpy.ndarray
cdef bint mirror_is_right = False
cdef PyObject* table_types[KNOWN]
cdef kv_dl_exchange* tables[KNOWN]
cdef bint table_is_torch[KNOWN]
cdef int n_tables = 0
cdef int FLOAT16 = dtypes.get("float16").id
cdef int BFLOAT16 = dtypes.get("bfloat16").id
cdef int FLOAT32 = dtypes.get("float32").id
cdef int INT8 = dtypes.get("int8").id
cdef int INT32 = dtypes.get("int32").id
cdef int INT64 = dtypes.get("int64").id
cdef int UINT8 = dtypes.get("uint8").id
cdef int FLOAT8_E4M3FN = dtypes.get("float8_e4m3fn").id
cdef int FLOAT8_E5M2 = dtypes.get("float8_e5m2").id


cdef void finish(View* view) noexcept:
    # The extent; an array without elements touches no byte.
    cdef int i
    cdef int64_t span
    view.low = 0
    view.high = view.itemsize
    for i in range(view.rank):
        if view.shape[i] == 0:
            view.low = 0
            view.high = 0
            return
        span = (view.shape[i] - 1) * view.strides[i]
        if span < 0:
            view.low += span
        else:
            view.high += span


cdef bint read_ndarray(PyObject* obj, View* view) noexcept:
    cdef kv_ndarray* array = <kv_ndarray*>obj
    cdef int i
    if array.nd > MAX_RANK:
        return False
    for i in range(n_known):
        if known_descr[i] == array.descr:
            break
    else:
        return False
    view.dtype = known_dtype[i]
    view.itemsize = known_size[i]
    view.rank = array.nd
    view.flags = 0 if array.flags & KV_NDARRAY_WRITEABLE else READ_ONLY
    view.data = array.data
    for i in range(array.nd):
        view.shape[i] = array.dimensions[i]
        view.strides[i] = array.strides[i]
    finish(view)
    return True


cdef bint learn_exchange(type kind) except -1:
    # A subclass may mean something else by its memory: the type must offer the table itself.
    global n_tables
    cdef bint is_torch = kind is adopt.torch_tensor_type()
    cdef kv_dl_exchange* table = NULL
    capsule = kind.__dict__.get("__dlpack_c_exchange_api__")
    if capsule is None and is_torch:
        capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is not None and PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
        table = <kv_dl_exchange*>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    if table == NULL or table.major != 1 or table.tensor_from_object == NULL:
        return False
    known_refs.append(kind)
    table_types[n_tables] = <PyObject*>kind
    tables[n_tables] = table
    table_is_torch[n_tables] = is_torch
    n_tables += 1
    return True


cdef int dl_dtype(const kv_dl_type* kind) noexcept:
    # Row of dtypes.TABLE of the types that torch has; -1 sends the tensor down the slow door.
    if kind.lanes == 1:
        if kind.code == 2 and kind.bits == 16:
            return FLOAT16
        if kind.code == 4 and kind.bits == 16:
            return BFLOAT16
        if kind.code == 2 and kind.bits == 32:
            return FLOAT32
        if kind.code == 0 and kind.bits == 8:
            return INT8
        if kind.code == 0 and kind.bits == 32:
            return INT32
        if kind.code == 0 and kind.bits == 64:
            return INT64
        if kind.code == 1 and kind.bits == 8:
            return UINT8
        if kind.code == 10 and kind.bits == 8:
            return FLOAT8_E4M3FN
        if kind.code == 12 and kind.bits == 8:
            return FLOAT8_E5M2
    return -1


cdef bint read_exchange(object obj, View* view) except -1:
    """A torch CPU tensor read from C (some 100 ns); False sends it down the slow door."""
    cdef kv_dl_tensor t
    cdef int i, at = 0
    cdef type kind = type(obj)
    while at < n_tables and table_types[at] != <PyObject*>kind:
        at += 1
    if at == n_tables and (at == KNOWN or not learn_exchange(kind)):
        return False
    if table_is_torch[at] and (obj.requires_grad or obj.is_neg()):
        return False
    try:
        tables[at].tensor_from_object(<void*>obj, &t)
    except (BufferError, RuntimeError, ValueError, TypeError):
        return False
    view.dtype = dl_dtype(&t.dtype)
    if view.dtype < 0 or t.device.device_type != DL_CPU or t.ndim > MAX_RANK:
        return False
    if t.strides == NULL and t.ndim > 0:
        return False
    view.itemsize = t.dtype.bits // 8
    view.rank = t.ndim
    view.flags = 0
    view.data = <char*>t.data + t.byte_offset
    for i in range(t.ndim):
        view.shape[i] = t.shape[i]
        view.strides[i] = t.strides[i] * view.itemsize
    finish(view)
    return True


cdef int read_view(object obj, str name, View* view, list keep) except -1:
    """Fill view from obj; what must stay alive besides obj itself is appended to keep."""
    cdef int i
    if obj is None:
        view.rank = -1
        view.dtype = -1
        view.itemsize = 0
        view.flags = 0
        view.data = NULL
        view.low = 0
        view.high = 0
        return 0
    if type(obj) is NDARRAY and mirror_is_right and read_ndarray(<PyObject*>obj, view):
        return 0
    if read_exchange(obj, view):
        return 0
    address, shape, strides, dtype, itemsize, read_only, on_device, owner = adopt.read(obj, name)
    view.rank = len(shape)
    view.dtype = dtype
    view.itemsize = itemsize
    view.flags = (READ_ONLY if read_only else 0) | (ON_DEVICE if on_device else 0)
    view.data = <char*><size_t>address
    for i in range(view.rank):
        view.shape[i] = shape[i]
        view.strides[i] = strides[i]
    finish(view)
    if owner is not None:
        keep.append(owner)
    return 0


cdef bint unchanged(object obj, str name, const View* view) except -1:
    """Whether obj still is what view says (arrays can be resized or reshaped in place)."""
    cdef View now
    cdef int i
    if obj is None:
        return True
    if not (type(obj) is NDARRAY and mirror_is_right and read_ndarray(<PyObject*>obj, &now)):
        if not read_exchange(obj, &now):
            if adopt.is_fixed(obj):
                return True
            read_view(obj, name, &now, [])
    if (
        now.data != view.data
        or now.rank != view.rank
        or now.dtype != view.dtype
        or now.flags != view.flags
    ):
        return False
    for i in range(view.rank):
        if now.shape[i] != view.shape[i] or now.strides[i] != view.strides[i]:
            return False
    return True


cdef class ArrayInfo:
    """What an operator's checks see of one array.

    name: the argument; shape: of the stored items; strides: bytes; dtype: DType, or None for one
    that no operator takes; dtype_name: the name in either case; address: of element 0.
    """

    def __repr__(self):
        return f"<{self.name}: {self.dtype_name} {self.shape}>"


cdef ArrayInfo info_of(object obj, str name, const View* view):
    cdef ArrayInfo info = ArrayInfo.__new__(ArrayInfo)
    info.name = name
    info.shape = tuple([view.shape[i] for i in range(view.rank)])
    info.strides = tuple([view.strides[i] for i in range(view.rank)])
    info.dtype = dtypes.TABLE[view.dtype] if view.dtype >= 0 else None
    info.dtype_name = info.dtype.name if view.dtype >= 0 else adopt.dtype_name(obj)
    info.itemsize = view.itemsize
    info.read_only = view.flags & READ_ONLY
    info.on_device = view.flags & ON_DEVICE
    info.address = <int64_t>view.data
    return info


def read(object obj, str name="array"):
    """ArrayInfo of one array; raises a typed error that names the argument."""
    cdef View view
    if obj is None:
        raise adopt.not_an_array(obj, name)
    read_view(obj, name, &view, [])
    return info_of(obj, name, &view)


def _learn(object descr, int dtype):
    global n_known
    if n_known == KNOWN:
        return
    known_refs.append(descr)
    known_descr[n_known] = <PyObject*>descr
    known_dtype[n_known] = dtype
    known_size[n_known] = descr.itemsize
    n_known += 1


def _probe():
    """Whether the mirrored structure reads numpy arrays right; decides for the process."""
    global mirror_is_right
    cdef View view
    cdef bint ok = True
    base = numpy.arange(240, dtype=numpy.int32).reshape(4, 5, 12)
    frozen = base[1:, ::2, ::-1]
    frozen.flags.writeable = False
    for array in (base, frozen, base[:0], base[0, 0, 0:1], numpy.zeros((), numpy.float16)):
        memset(&view, 0, sizeof(View))
        if not read_ndarray(<PyObject*>array, &view):
            ok = False
            break
        face = array.__array_interface__
        strides = array.strides
        ok = (
            <size_t>view.data == face["data"][0]
            and bool(view.flags & READ_ONLY) == face["data"][1]
            and tuple([view.shape[i] for i in range(view.rank)]) == face["shape"]
            and tuple([view.strides[i] for i in range(view.rank)]) == strides
        )
        if not ok:
            break
    mirror_is_right = ok


for _row in dtypes.TABLE:
    _descr = adopt.numpy_dtype(_row)
    if _descr is not None:
        _learn(_descr, _row.id)
_probe()
