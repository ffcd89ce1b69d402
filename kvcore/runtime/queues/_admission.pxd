# SPDX-License-Identifier: Apache-2.0
cimport cython


@cython.final
cdef class Admission:
    cdef readonly object key
    cdef readonly bint modelled
    cdef public object refuse
    cdef dict types

    cdef int learn(self, object plan) except -1
    cdef int admit(self, object plan) except -1
    cdef bint reachable(self, object owner) noexcept
    cdef int admit_all(self, object accesses) except -1
