# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t


@cython.final
cdef class Vector:
    cdef int64_t* counts
    cdef Py_ssize_t n
