# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t


@cython.final
cdef class Vector:
    cdef int64_t* counts
    cdef Py_ssize_t n

    cpdef Vector join(self, Vector other, Py_ssize_t lane, int64_t count)
    cpdef Vector meet(self, Vector other)
    cpdef bint reached(self, Vector other, Py_ssize_t lane, int64_t count) except -1
