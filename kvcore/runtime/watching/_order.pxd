# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t

from kvcore.runtime.watching._vectors cimport Vector


@cython.final
cdef class Note:
    cdef public object site
    cdef public object node
    cdef public object checksums
    cdef readonly Vector vector
    cdef readonly int lane
    cdef readonly int64_t count
    cdef readonly int64_t host
    cdef readonly tuple late


@cython.final
cdef class Stamp:
    cdef readonly int lane
    cdef readonly int64_t count
    cdef readonly Vector vector
    cdef readonly int64_t host
    cdef readonly tuple late


@cython.final
cdef class StreamClock:
    cdef readonly str name
    cdef readonly Vector vector
    cdef readonly int64_t count
    cdef int64_t host_version
    cdef readonly tuple late


cdef class Order:
    cdef readonly list lanes
    cdef readonly dict in_flight
    cdef int64_t host_count
    cdef int64_t host_version
    cdef Vector host_vector

    cdef StreamClock at(self, int index)
    cdef int follow(self, StreamClock lane, Stamp stamp) except -1
    cdef int settle(self, StreamClock lane) except -1
    cdef int fold(self, Note note) except -1
    cpdef launched(self, int index, Note note, number)
    cpdef marked(self, int index)
    cpdef waited(self, int index, mark)
