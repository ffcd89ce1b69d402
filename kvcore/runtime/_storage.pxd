# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t


@cython.final
cdef class Ledger:
    cdef public int64_t used, peak, capacity, allocations, frees

    cdef void give_back(self, int64_t nbytes) noexcept


@cython.final
cdef class Storage:
    cdef readonly Ledger ledger
    cdef readonly str space
    cdef readonly int64_t nbytes
    cdef readonly object array
    cdef readonly bint freed
    cdef readonly object owner
    cdef public object origin
    cdef object __weakref__


cdef class BufferCore:
    cdef readonly Storage storage


cpdef int64_t total_bytes(const int64_t[:, :] ranges) except -1
