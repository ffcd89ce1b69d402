# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

ctypedef struct span:
    int64_t start
    int64_t end

cdef class Spans:
    cdef span* data
    cdef int64_t n
    cdef bint ascending   # the ranges ascend and none overlaps another

    cdef object ranges(self)

    # The caller has asked spans_for for enough room.
    cdef inline void add(self, int64_t start, int64_t nbytes) noexcept:
        cdef span* last = self.data + self.n - 1
        if self.n > 0:
            if last.end == start:
                last.end = start + nbytes
                return
            if last.end > start:
                self.ascending = False
        last[1].start = start
        last[1].end = start + nbytes
        self.n += 1

cdef Spans spans_for(int64_t pieces, int64_t each)
cdef object one_range(int64_t start, int64_t end)
