# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint64_t, uintptr_t


cdef class Name:
    cdef readonly str text
    cdef const char* symbol


cdef class Task:
    cdef Name name
    cdef uint64_t number
    cdef int work(self) except -1
    cdef object used(self)


cdef int launch(uintptr_t stream, Name name, Task task, const uint64_t* touches, size_t count,
                const char* text, bint for_waiters) except -1
cdef bint updating(uintptr_t stream) noexcept
cdef bint watched() noexcept
