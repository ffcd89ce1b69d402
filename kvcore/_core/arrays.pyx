# SPDX-License-Identifier: Apache-2.0
"""One door for arrays: address, shape, strides in bytes, dtype row and flags of anything.

A numpy array of a known dtype is read from its C structure (some 20 ns).  Everything else
goes through adopt.read, in Python: torch tensors without importing torch, runtime buffers,
__array_interface__, DLPack, the buffer protocol.  No array is ever copied.
"""

from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport SIZE_MAX, int32_t, int64_t
from libc.string cimport memset

import sys

import numpy

from kvcore import dtypes
from kvcore._core import adopt, dlpack, torch_questions
from kvcore._core.dlpack cimport kv_dl_exchange, kv_dl_tensor, kv_dl_type, kv_peek

cdef extern from "../_core/ndarray.h":
    ctypedef struct kv_ndarray:
        char* data
        int nd
        Py_ssize_t* dimensions
        Py_ssize_t* strides
        PyObject* descr
        int flags
    int KV_NDARRAY_WRITEABLE

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
cdef dict MODULES = sys.modules
cdef dict BY_NAME = dtypes.BY_NAME
cdef bint mirror_is_right = False
cdef PyObject* table_types[KNOWN]
cdef kv_dl_exchange* tables[KNOWN]
cdef bint table_is_torch[KNOWN]
cdef int n_tables = 0
cdef bint torch_is_known = False
cdef int dl_rows[16][4]  # row of dtypes.TABLE plus one, by DLPack code and log2(bits / 8)


# How libtorch is asked about a tensor; NULL: in Python. See torch_questions.py.
ctypedef int (*storage_question)(void* tensor, int64_t* answer) noexcept
ctypedef unsigned char (*flag_question)(const void* tensor) noexcept
cdef Py_ssize_t tensor_at = 0
cdef storage_question storage_bytes_of = NULL
cdef storage_question storage_offset_of = NULL
cdef flag_question is_negative = NULL  # of the C++ tensor
cdef flag_question requires_grad = NULL  # of its implementation


cdef bint finish(View* view) noexcept:
    """Set the extent; False when it does not lie inside the address space.

    Strides that mean nothing (of an empty array, or odd ones of an axis of one) are replaced, so
    that no computation with a stride leaves 64 bits.
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


cdef bint read_shape(const kv_ndarray* array, View* view) noexcept:
    """Fill everything but the dtype and the item size, which view holds already."""
    cdef int i
    if array.nd > MAX_RANK:
        return False
    view.rank = array.nd
    view.flags = 0 if array.flags & KV_NDARRAY_WRITEABLE else READ_ONLY
    view.data = array.data
    for i in range(array.nd):
        view.shape[i] = array.dimensions[i]
        view.strides[i] = array.strides[i]
    return finish(view)


cdef bint read_ndarray(PyObject* obj, View* view) noexcept:
    cdef kv_ndarray* array = <kv_ndarray*>obj
    cdef int i
    for i in range(n_known):
        if known_descr[i] == array.descr:
            break
    else:
        return False
    view.dtype = known_dtype[i]
    view.itemsize = known_size[i]
    view.way = PLAIN
    view.source = obj
    return read_shape(array, view)


cdef int take(tuple reading, View* view) except -1:
    """Fill view from a Reading; 0 when it does not stay inside the address space."""
    cdef int i
    address, shape, strides, dtype, itemsize, read_only, on_device, _, source = reading
    if len(shape) > MAX_RANK:
        return 0
    view.way = OPAQUE
    view.source = NULL
    if source is not None and mirror_is_right:
        view.way = STRUCTURE
        view.source = <PyObject*>source
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


cdef bint take_device(object obj, View* view, list keep) except -1:
    """Fill view from what the owner of memory on a device says of it.

    False where it says nothing, or something wrong: adopt.read then raises the error.
    """
    cdef object found, row
    try:
        found = obj.__kvcore_device_array__
        if found is None:
            return False
        shape, strides, itemsize = found.shape, found.strides, found.itemsize
        if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
            return False
        for number in (found.address, itemsize, *shape, *strides):
            if type(number) is not int:
                return False
        row = BY_NAME.get(found.dtype)
        if not 0 <= itemsize < 1 << 31 or not take((
            found.address, shape, strides, -1 if row is None else row.id, itemsize,
            bool(found.read_only), True, found, None,
        ), view):
            return False
    except MemoryError:
        raise
    except Exception:
        return False
    keep.append(found)
    return True


cdef bint is_torch_type(object kind) except -1:
    """Whether the type is torch.Tensor itself; torch is not imported to find out."""
    module = MODULES.get("torch")
    return module is not None and kind is getattr(module, "Tensor", None)


cdef bint learn_exchange(type kind) except -1:
    # A subclass may mean something else by its memory: the type must offer the table itself.
    global n_tables, torch_is_known
    cdef bint is_torch = is_torch_type(kind)
    cdef kv_dl_exchange* table = NULL
    capsule = kind.__dict__.get("__dlpack_c_exchange_api__")
    if capsule is None and is_torch:
        capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is not None and PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
        table = <kv_dl_exchange*>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    if table == NULL or table.major != 1 or table.tensor_from_object == NULL:
        return False
    if row_of(<PyObject*>kind) >= 0:  # another thread, or code that ran here, was first
        return True
    known_refs.append(kind)
    table_types[n_tables] = <PyObject*>kind
    tables[n_tables] = table
    table_is_torch[n_tables] = is_torch
    n_tables += 1
    if is_torch:
        torch_is_known = True
        learn_questions()
    return True


cdef int learn_questions() except -1:
    global tensor_at, storage_bytes_of, storage_offset_of, is_negative, requires_grad
    found = torch_questions.questions()
    if found is not None:
        tensor_at = found.tensor_at
        storage_bytes_of = <storage_question><void*><size_t>found.storage_bytes
        storage_offset_of = <storage_question><void*><size_t>found.storage_offset
        is_negative = <flag_question><void*><size_t>found.is_negative
        requires_grad = <flag_question><void*><size_t>found.requires_grad
    return 0


cdef bint is_stored(PyObject* obj, const View* view) noexcept:
    """Whether the storage of a torch tensor, which can be made smaller, still holds the view."""
    cdef int64_t size = 0, start = 0
    cdef void* tensor = <char*>obj + tensor_at
    if storage_bytes_of == NULL or view.low == view.high:
        return True  # check_tensor() has asked, or there is nothing to hold
    if storage_bytes_of(tensor, &size) != 0 or storage_offset_of(tensor, &start) != 0:
        return False
    return not kv_mul(start, view.itemsize, &start) and view.high <= size - start


cdef bint is_flagged(object obj) except -1:
    """Whether a torch tensor wants a gradient, or stands for the negative of its memory."""
    cdef void** tensor = <void**>(<char*><PyObject*>obj + tensor_at)
    if is_negative == NULL:
        return obj.requires_grad or obj.is_neg()
    return requires_grad(tensor[0]) or is_negative(tensor)


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


cdef bint read_tensor(int row, PyObject* obj, View* view) noexcept:
    """A CPU tensor read from C through that row of the tables (some 100 ns)."""
    cdef kv_dl_tensor t
    cdef int i
    if kv_peek(tables[row], obj, &t) != 0:
        return False
    view.dtype = dl_dtype(&t.dtype)
    if view.dtype < 0 or t.device.device_type != DL_CPU or not 0 <= t.ndim <= MAX_RANK:
        return False
    if t.strides == NULL and t.ndim > 0:
        return False
    if t.byte_offset > SIZE_MAX - <size_t>t.data:
        return False
    view.itemsize = t.dtype.bits // 8
    view.rank = t.ndim
    view.flags = 0
    view.data = <char*>t.data + t.byte_offset
    view.way = TENSOR + row
    view.source = obj
    for i in range(t.ndim):
        view.shape[i] = t.shape[i]
        if view.shape[i] < 0 or kv_mul(t.strides[i], view.itemsize, &view.strides[i]):
            return False
    return finish(view) and (not table_is_torch[row] or is_stored(obj, view))


cdef int row_of(PyObject* kind) noexcept:
    """Row of the exchange tables for a type; -1: none is known."""
    cdef int at
    for at in range(n_tables):
        if table_types[at] == kind:
            return at
    return -1


cdef int check_tensor(object obj, str name) except -1:
    """Raise for a tensor whose memory does not mean what it seems to; 1 for a tensor, else 0.

    Where libtorch is not asked in C this runs the code of a torch function mode, so a call asks it
    of all its arrays before it reads the first.
    """
    cdef type kind = type(obj)
    cdef int row
    if <object>kind is NDARRAY or obj is None:
        return 0
    row = row_of(<PyObject*>kind)
    if row < 0 and not torch_is_known and n_tables < KNOWN and is_torch_type(kind):
        # The first tensor of all: those behind it in its call are asked as tensors too.
        learn_exchange(kind)
        row = row_of(<PyObject*>kind)
    if row < 0 or not table_is_torch[row]:
        return 0
    if is_flagged(obj):
        adopt.read(obj, name)
    elif storage_bytes_of == NULL and torch_questions.is_too_small(obj) is not None:
        adopt.read(obj, name)
    return 1


cdef int read_view(object obj, str name, View* view, list keep) except -1:
    """Fill view from obj; what must stay alive besides obj itself is appended to keep.

    Returns 1 when Python code may have run, which may have done anything to any array, else 0.
    Of a torch tensor whose type is known check_tensor() is asked before.
    """
    cdef type kind = type(obj)
    cdef int row
    if obj is None:
        view.rank = -1
        view.dtype = -1
        view.itemsize = 0
        view.flags = 0
        view.data = NULL
        view.low = 0
        view.high = 0
        view.way = ABSENT
        view.source = NULL
        return 0
    if <object>kind is NDARRAY and mirror_is_right and read_ndarray(<PyObject*>obj, view):
        return 0
    row = row_of(<PyObject*>kind)
    if row >= 0:
        if read_tensor(row, <PyObject*>obj, view):
            if table_is_torch[row]:
                return 0
            view.way = OPAQUE  # whose table may run anything
            return 1
    elif hasattr(kind, "__kvcore_device_array__") and take_device(obj, view, keep):
        return 1
    elif n_tables < KNOWN and learn_exchange(kind):
        check_tensor(obj, name)
        read_view(obj, name, view, keep)
        return 1
    reading = adopt.read(obj, name)
    if not take(reading, view):
        if not take(adopt.settle(reading, name), view):
            raise MemoryError(f"{name}: an extent outside the address space passed the checks")
    if type(obj) is NDARRAY and view.dtype == HIFLOAT8:
        _learn(obj.dtype, view.dtype)  # its package came after this one
    if reading[7] is not None:
        keep.append(reading[7])
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


cdef bint unchanged(const View* view) noexcept:
    """Whether the array is what view says, as far as that can be seen without its own code.

    Runs no Python code and makes no Python object that the collector knows.
    """
    cdef View now
    if view.way == PLAIN:
        if same_ndarray(<kv_ndarray*>view.source, view):
            return True
        return read_ndarray(view.source, &now) and same(&now, view)
    if view.way == STRUCTURE:
        now.dtype = view.dtype
        now.itemsize = view.itemsize
        return read_shape(<kv_ndarray*>view.source, &now) and same(&now, view)
    if view.way >= TENSOR:
        return read_tensor(view.way - TENSOR, view.source, &now) and same(&now, view)
    return True


cdef bint ask(object obj, str name, const View* view) except -1:
    """Read obj once more and compare with view: the changes that unchanged() cannot see."""
    cdef View now
    if view.way == PLAIN or view.way == ABSENT:
        return True
    if view.way >= TENSOR:
        check_tensor(obj, name)
        return True
    if view.way == OPAQUE and not view.flags & ON_DEVICE and adopt.is_fixed(obj):
        return True
    check_tensor(obj, name)
    read_view(obj, name, &now, [])
    return same(&now, view)


cdef char* data_of(object array) except NULL:
    """The address of the items of a numpy array that the caller has just made."""
    if mirror_is_right:
        return (<kv_ndarray*><PyObject*>array).data
    return <char*><size_t>array.ctypes.data


cdef class ArrayInfo:
    """One array as an operator's checks see it.

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
    check_tensor(obj, name)
    read_view(obj, name, &view, [])
    return info_of(obj, name, &view)


cdef class HeldArray:
    """An array that is taken now and used later, by its address.

    obj: what was passed, kept alive with its memory; info: the ArrayInfo of this moment.
    Raises what ``read`` raises.
    """

    def __init__(self, object obj, str name="array"):
        if obj is None:
            raise adopt.not_an_array(obj, name)
        self._keep = []
        check_tensor(obj, name)
        read_view(obj, name, &self._view, self._keep)
        self.obj = obj
        self.info = info_of(obj, name, &self._view)
        # A buffer of the runtime keeps shape and bytes: launched work may outlive its free().
        self._lasts = hasattr(type(obj), "__kvcore_array__")

    def check(self):
        """Raise ParamInvalidError when the array was resized, reshaped or moved since."""
        if self._lasts:
            return
        if not ask(self.obj, self.info.name, &self._view) or not unchanged(&self._view):
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
_probe()
