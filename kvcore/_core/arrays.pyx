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
from kvcore._core import adopt, dlpack

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

cdef extern from *:
    """
    #define kv_mul __builtin_mul_overflow
    #define kv_add __builtin_add_overflow
    """
    bint kv_mul(int64_t a, int64_t b, int64_t* out)
    bint kv_add(int64_t a, int64_t b, int64_t* out)

cdef enum:
    KNOWN = 32
    DL_CPU = 1

cdef int64_t MAX_STRIDE = <int64_t>1 << 47
cdef int64_t MAX_EXTENT = adopt.MAX_EXTENT
cdef int HIFLOAT8 = dtypes.BY_NAME["hifloat8"].id

cdef PyObject* known_descr[KNOWN]
cdef int32_t known_dtype[KNOWN]
cdef int32_t known_size[KNOWN]
cdef int n_known = 0
cdef PyObject* descr_of[KNOWN]  # by row of the table
cdef list known_refs = []
cdef object NDARRAY = numpy.ndarray
cdef bint mirror_is_right = False
cdef PyObject* table_types[KNOWN]
cdef kv_dl_exchange* tables[KNOWN]
cdef bint table_is_torch[KNOWN]
cdef int n_tables = 0
cdef int dl_rows[16][4]  # row of dtypes.TABLE plus one, by DLPack code and log2(bits / 8)


cdef bint finish(View* view) noexcept:
    """Set the extent; False when it does not lie inside the address space.

    Strides that mean nothing (of an empty array, or odd ones of an axis of one) are replaced, so
    that nobody who computes with a stride leaves 64 bits.
    """
    cdef int i
    cdef int64_t span, low = 0, high = view.itemsize, base = <int64_t>view.data
    cdef int64_t nbytes = view.itemsize
    cdef bint empty = False
    for i in range(view.rank):
        if view.shape[i] == 0:
            empty = True
        elif kv_mul(nbytes, view.shape[i], &nbytes):
            return False
    if empty:
        finish_empty(view)
        return True
    for i in range(view.rank):
        if view.shape[i] == 1:
            if view.strides[i] > MAX_STRIDE or view.strides[i] < -MAX_STRIDE:
                view.strides[i] = view.itemsize
            continue
        if kv_mul(view.shape[i] - 1, view.strides[i], &span):
            return False
        if kv_add(low if span < 0 else high, span, &low if span < 0 else &high):
            return False
    if base <= 0 or base + low <= 0 or kv_add(base, high, &span) or high - low > MAX_EXTENT:
        return False
    view.low = low
    view.high = high
    return True


cdef void finish_empty(View* view) noexcept:
    cdef int i
    cdef int64_t step = view.itemsize
    for i in range(view.rank - 1, -1, -1):
        view.strides[i] = step
        if view.shape[i] > 1:
            step *= view.shape[i]
    view.low = 0
    view.high = 0


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
    return finish(view)


cdef int take(tuple reading, View* view) except -1:
    """Fill view from a Reading; 0 when it does not stay inside the address space."""
    cdef int i
    address, shape, strides, dtype, itemsize, read_only, on_device, _ = reading
    if len(shape) > MAX_RANK:
        return 0
    view.rank = len(shape)
    view.dtype = dtype
    view.itemsize = itemsize
    view.flags = (READ_ONLY if read_only else 0) | (ON_DEVICE if on_device else 0)
    try:
        view.data = <char*><size_t>address
        for i in range(view.rank):
            view.shape[i] = shape[i]
            view.strides[i] = strides[i]
            if view.shape[i] < 0:
                return 0
    except OverflowError:
        return 0
    return finish(view)


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
    # Row of dtypes.TABLE; -1 sends the tensor down the slow door.
    if kind.lanes != 1 or kind.code > 15:
        return -1
    if kind.bits == 8:
        return dl_rows[kind.code][0] - 1
    if kind.bits == 16:
        return dl_rows[kind.code][1] - 1
    if kind.bits == 32:
        return dl_rows[kind.code][2] - 1
    if kind.bits == 64:
        return dl_rows[kind.code][3] - 1
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
    if view.dtype < 0 or t.device.device_type != DL_CPU or not 0 <= t.ndim <= MAX_RANK:
        return False
    if t.strides == NULL and t.ndim > 0:
        return False
    view.itemsize = t.dtype.bits // 8
    view.rank = t.ndim
    view.flags = 0
    view.data = <char*>t.data + t.byte_offset
    for i in range(t.ndim):
        view.shape[i] = t.shape[i]
        if view.shape[i] < 0 or kv_mul(t.strides[i], view.itemsize, &view.strides[i]):
            return False
    return finish(view)


cdef int read_view(object obj, str name, View* view, list keep) except -1:
    """Fill view from obj; what must stay alive besides obj itself is appended to keep.

    Returns 1 when it ran the object's own code, which may have done anything to any array, else 0.
    """
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
    reading = adopt.read(obj, name)
    if not take(reading, view):
        if not take(adopt.settle(reading, name), view):
            raise MemoryError(f"{name}: an extent outside the address space passed the checks")
    if type(obj) is NDARRAY and view.dtype == HIFLOAT8:
        _learn(obj.dtype, view.dtype)  # its package came after this one
    owner = reading[7]
    if owner is None:
        return 0
    keep.append(owner)
    return 1


cdef bint same(const View* now, const View* view) noexcept:
    cdef int i
    if (
        now.data != view.data
        or now.rank != view.rank
        or now.dtype != view.dtype
        or now.itemsize != view.itemsize
        or now.flags != view.flags
    ):
        return False
    for i in range(view.rank):
        if now.shape[i] != view.shape[i] or now.strides[i] != view.strides[i]:
            return False
    return True


cdef bint same_ndarray(const kv_ndarray* array, const View* view) noexcept:
    # The common answer without a second View; a No is asked again by the longer way.
    cdef int i
    if (
        array.data != view.data
        or array.nd != view.rank
        or view.dtype < 0
        or array.descr != descr_of[view.dtype]
        or view.flags != (0 if array.flags & KV_NDARRAY_WRITEABLE else READ_ONLY)
    ):
        return False
    for i in range(view.rank):
        if array.dimensions[i] != view.shape[i] or array.strides[i] != view.strides[i]:
            return False
    return True


cdef int compare(object obj, str name, const View* view) except -1:
    """SAME, or CHANGED when obj is not what view says (arrays can be resized or reshaped in
    place); with FOREIGN added when the object's own code ran to find out."""
    cdef View now
    cdef int foreign
    if obj is None:
        return SAME
    if type(obj) is NDARRAY and mirror_is_right:
        if same_ndarray(<kv_ndarray*><PyObject*>obj, view):
            return SAME
        if read_ndarray(<PyObject*>obj, &now):
            return SAME if same(&now, view) else CHANGED
    if read_exchange(obj, &now):
        return SAME if same(&now, view) else CHANGED
    if adopt.is_fixed(obj):
        return SAME | FOREIGN
    foreign = FOREIGN if read_view(obj, name, &now, []) else 0
    return foreign | (SAME if same(&now, view) else CHANGED)


cdef int64_t* int64_data(object array) except NULL:
    """Where the numbers of a numpy array of int64 lie that the caller has just made."""
    if mirror_is_right:
        return <int64_t*>(<kv_ndarray*><PyObject*>array).data
    return <int64_t*><size_t>array.ctypes.data


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


cdef class Held:
    """An array that is taken now and used later, by its address.

    obj: what was passed, kept alive with its memory; info: the ArrayInfo of this moment.
    Raises what ``read`` raises.
    """

    def __init__(self, object obj, str name="array"):
        if obj is None:
            raise adopt.not_an_array(obj, name)
        self._keep = []
        read_view(obj, name, &self._view, self._keep)
        self.obj = obj
        self.info = info_of(obj, name, &self._view)
        # A buffer of the runtime keeps shape and bytes: launched work may outlive its free().
        self._lasts = hasattr(type(obj), "__kvcore_array__")

    def check(self):
        """Raise ParamInvalidError when the array was resized, reshaped or moved since."""
        if not self._lasts and compare(self.obj, self.info.name, &self._view) & CHANGED:
            raise adopt.changed(self.info.name)


def _learn(object descr, int dtype):
    global n_known
    if n_known == KNOWN or dtype >= KNOWN:
        return
    known_refs.append(descr)
    descr_of[dtype] = <PyObject*>descr
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
for (_code, _bits), _name in dlpack.NAMES.items():
    if _name in dtypes.BY_NAME:
        dl_rows[_code][(_bits // 8).bit_length() - 1] = dtypes.BY_NAME[_name].id + 1
for (_code, _bits), _name in dlpack.NAMES.items():
    if _name in dtypes.BY_NAME:
        dl_rows[_code][(_bits // 8).bit_length() - 1] = dtypes.BY_NAME[_name].id + 1
_probe()
