# SPDX-License-Identifier: Apache-2.0
"""Byte ranges [start, end) of pieces that come in any order, merged.

The race check asks for the bytes that each run touched, so this must cost far less than the run: a
piece that begins where the one before it ends is joined to it at once, and the ranges are sorted
(by radix) only where the pieces did not come in ascending order.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

import numpy

from kvcore._core.arrays cimport data_of

cdef enum:
    INSERTION = 32        # up to so many ranges are sorted by insertion
    FEW = 2048            # up to so many by digits of 8 bits, more by digits of 11
    DIGIT_VALUES = 2048

cdef int64_t MAX_PIECES = <int64_t>1 << 58
cdef object EMPTY = numpy.empty
cdef object INT64 = numpy.dtype(numpy.int64)


cdef class Spans:
    """Ranges that are being collected; spans_for makes one with room for them."""

    def __dealloc__(self):
        PyMem_Free(self.data)

    cdef object ranges(self):
        """The ranges as int64 [n, 2]: ascending, those that touch or overlap merged."""
        cdef int64_t i, count
        cdef int64_t* out
        if not self.ascending:
            sort_spans(self)
            count = 0
            for i in range(1, self.n):
                if self.data[i].start > self.data[count].end:
                    count += 1
                    self.data[count] = self.data[i]
                elif self.data[i].end > self.data[count].end:
                    self.data[count].end = self.data[i].end
            self.n = count + 1
            self.ascending = True
        found = EMPTY((self.n, 2), INT64)
        if self.n:
            out = <int64_t*>data_of(found)
            for i in range(self.n):
                out[2 * i] = self.data[i].start
                out[2 * i + 1] = self.data[i].end
        return found


cdef int sort_spans(Spans spans) except -1:
    cdef span* data = spans.data
    cdef span* spare
    cdef span value
    cdef int64_t i, j, n = spans.n
    cdef int64_t low = data[0].start, high = data[0].start
    if n <= INSERTION:
        for i in range(1, n):
            value = data[i]
            j = i
            while j > 0 and data[j - 1].start > value.start:
                data[j] = data[j - 1]
                j -= 1
            data[j] = value
        return 0
    for i in range(1, n):
        low = min(low, data[i].start)
        high = max(high, data[i].start)
    spare = <span*>PyMem_Malloc(<size_t>n * sizeof(span))
    if spare == NULL:
        raise MemoryError(f"{n} ranges do not fit memory")
    if radix_sort(data, spare, n, <uint64_t>low, <uint64_t>high - <uint64_t>low):
        spans.data = spare
        spare = data
    PyMem_Free(spare)
    return 0


cdef bint radix_sort(
    span* data, span* spare, int64_t n, uint64_t low, uint64_t reach
) noexcept nogil:
    """Sort by start; returns whether the sorted ranges ended in spare instead of in data."""
    cdef int64_t[DIGIT_VALUES] places
    cdef int bits = 8 if n <= FEW else 11
    cdef int shift = 0
    cdef int64_t values = <int64_t>1 << bits
    cdef int64_t i, at, count, k
    cdef span* other
    cdef bint swapped = False
    while shift < 64 and reach >> shift:
        memset(places, 0, <size_t>values * 8)
        for i in range(n):
            places[((<uint64_t>data[i].start - low) >> shift) & (values - 1)] += 1
        at = 0
        for k in range(values):
            count = places[k]
            places[k] = at
            at += count
        for i in range(n):
            k = ((<uint64_t>data[i].start - low) >> shift) & (values - 1)
            spare[places[k]] = data[i]
            places[k] += 1
        other = data
        data = spare
        spare = other
        swapped = not swapped
        shift += bits
    return swapped


cdef Spans spans_for(int64_t pieces, int64_t each):
    """An empty Spans with room for pieces * each ranges."""
    cdef Spans spans = Spans.__new__(Spans)
    if each > 0 and pieces > MAX_PIECES // each:
        raise MemoryError(f"{pieces} times {each} ranges do not fit memory")
    spans.ascending = True
    spans.data = <span*>PyMem_Malloc(<size_t>(pieces * each) * sizeof(span))
    if spans.data == NULL:
        raise MemoryError(f"{pieces * each} ranges do not fit memory")
    return spans


cdef object one_range(int64_t start, int64_t end):
    """One range as int64 [1, 2]."""
    cdef int64_t* out
    found = EMPTY((1, 2), INT64)
    out = <int64_t*>data_of(found)
    out[0] = start
    out[1] = end
    return found


def merge(const int64_t[:] starts, int64_t nbytes):
    """Ranges [n, 2] of pieces of one length: ascending, those that touch or overlap merged."""
    cdef Spans spans = spans_for(starts.shape[0], 1)
    cdef int64_t i
    for i in range(starts.shape[0]):
        spans.add(starts[i], nbytes)
    return spans.ranges()
