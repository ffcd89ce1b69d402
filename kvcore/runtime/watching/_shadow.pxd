# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int32_t, int64_t

from kvcore.runtime.watching._segments cimport Segment, SegmentMap
from kvcore.runtime.watching._vectors cimport Vector

cdef struct Entry:
    int64_t count
    int32_t lane


@cython.final
cdef class Shadow(SegmentMap):
    cdef Entry* records
    cdef int64_t num_records, max_records

    cdef int64_t _record(self, int32_t lane, int64_t count) except -1
    cdef bint _ordered(self, int64_t record, int32_t lane, int64_t host, Vector vector) noexcept
    cdef list _one(self, int64_t start, int64_t end, bint write, int64_t record, int32_t lane,
                   int64_t host, Vector vector, list hits)
    cdef list _compare(self, Segment* s, bint write, int32_t lane, int64_t host,
                       Vector vector, list hits)
    cdef int _enter(self, Segment* s, bint write, int64_t record, int32_t lane, int64_t host,
                    Vector vector) except -1
    cdef list _write(self, int64_t start, int64_t end, int32_t i, int64_t record, int32_t lane,
                     int64_t host, Vector vector, list hits)
    cdef list _read(self, int64_t start, int64_t end, int32_t i, int64_t record, int32_t lane,
                    int64_t host, Vector vector, list hits)
    cpdef list access(self, const int64_t[:, :] ranges, bint write, int32_t lane, int64_t count,
                      int64_t host, Vector vector)
    cpdef list sweep(self, int64_t host, Vector floor)
