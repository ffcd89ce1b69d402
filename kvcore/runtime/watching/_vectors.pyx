# SPDX-License-Identifier: Apache-2.0
"""Vector clocks: how far each lane has been reached."""

cimport cython
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy


@cython.final
cdef class Vector:
    """What has been reached of each lane: counts by lane, never changed once made.

    Lanes beyond the end are at 0.  Shared by operations, records and lanes.
    """

    def __cinit__(self, Py_ssize_t n=0):
        self.counts = <int64_t*>calloc(max(n, 1), sizeof(int64_t))
        if self.counts == NULL:
            raise MemoryError
        self.n = n

    def __dealloc__(self):
        free(self.counts)

    def __len__(self):
        return self.n

    def __getitem__(self, Py_ssize_t lane):
        if lane < 0:
            raise IndexError("lane")
        return self.counts[lane] if lane < self.n else 0

    cpdef Vector join(self, Vector other, Py_ssize_t lane, int64_t count):
        """The least vector that has reached both, and the count on the lane."""
        cdef Py_ssize_t n = max(self.n, max(other.n, lane + 1))
        cdef Vector out = Vector(n)
        cdef Py_ssize_t i
        memcpy(out.counts, self.counts, self.n * sizeof(int64_t))
        for i in range(other.n):
            if other.counts[i] > out.counts[i]:
                out.counts[i] = other.counts[i]
        if count > out.counts[lane]:
            out.counts[lane] = count
        return out

    cpdef Vector meet(self, Vector other):
        """The greatest vector that both have reached."""
        cdef Py_ssize_t n = min(self.n, other.n)
        cdef Vector out = Vector(n)
        cdef Py_ssize_t i
        for i in range(n):
            out.counts[i] = min(self.counts[i], other.counts[i])
        return out

    cpdef bint reached(self, Vector other, Py_ssize_t lane, int64_t count) except -1:
        """True when this has reached everything of the other, and the count on the lane."""
        cdef Py_ssize_t i
        if count > (self.counts[lane] if lane < self.n else 0):
            return False
        if other is self:
            return True
        for i in range(other.n):
            if other.counts[i] > (self.counts[i] if i < self.n else 0):
                return False
        return True
