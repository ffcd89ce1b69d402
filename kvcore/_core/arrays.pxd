# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t

cdef enum:
    MAX_RANK = 8
    READ_ONLY = 1   # View.flags
    ON_DEVICE = 2
    SAME = 0        # what compare() answers
    CHANGED = 1
    FOREIGN = 2

# `head` is what a signature holds besides shape and strides: keep the four together.
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

cdef int read_view(object obj, str name, View* view, list keep) except -1
cdef int compare(object obj, str name, const View* view) except -1
cdef int64_t* int64_data(object array) except NULL
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

cdef class Held:
    cdef View _view
    cdef list _keep
    cdef bint _lasts
    cdef readonly object obj
    cdef readonly ArrayInfo info
