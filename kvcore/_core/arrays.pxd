# SPDX-License-Identifier: Apache-2.0
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

cdef enum:
    MAX_RANK = 8
    READ_ONLY = 1   # View.flags
    ON_DEVICE = 2

cdef enum:          # View.way: how unchanged() looks at the array again
    OPAQUE          # it cannot: only the object's own code says what it is
    ABSENT          # no array was given
    PLAIN           # a numpy array of a dtype that its descriptor tells
    STRUCTURE       # a numpy array of another dtype or of a subclass, or the one behind a buffer
    TENSOR          # TENSOR + k: a torch tensor, by row k of the exchange tables

# A signature copies the first four fields as one piece of memory, so they must stay together.
ctypedef struct View:
    int32_t rank       # -1: no array was given
    int32_t dtype      # row of kvcore.dtypes.TABLE; below 0: not in it
    int32_t itemsize
    int32_t flags
    int64_t shape[MAX_RANK]
    int64_t strides[MAX_RANK]  # bytes
    char* data
    int64_t low        # first and one past the last byte, relative to data
    int64_t high
    int32_t way
    PyObject* source   # what unchanged() looks at; the array, or something that it keeps alive

cdef int check_tensor(object obj, str name) except -1
cdef int read_view(object obj, str name, View* view, list keep) except -1
cdef bint ask(object obj, str name, const View* view) except -1
cdef bint unchanged(const View* view) noexcept
cdef char* data_of(object array) except NULL
cdef ArrayInfo info_of(object obj, str name, const View* view)

cdef class ArrayInfo:
    cdef readonly str name
    cdef readonly tuple shape
    cdef readonly tuple strides
    cdef readonly object dtype
    cdef readonly str dtype_name
    cdef readonly int64_t itemsize
    cdef readonly bint read_only
    cdef readonly bint on_device
    cdef readonly int64_t address

cdef class HeldArray:
    cdef View _view
    cdef list _keep
    cdef bint _lasts
    cdef readonly object obj
    cdef readonly ArrayInfo info
