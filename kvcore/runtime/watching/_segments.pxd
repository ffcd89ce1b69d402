# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t

cdef enum:
    CHUNK = 64
    NONE = -1

cdef struct Segment:
    int64_t start
    int64_t end
    int64_t writer      # a record, or NONE
    int32_t readers     # first reader, or NONE
    int32_t unused

cdef struct Chunk:
    int32_t n
    Segment segments[CHUNK]

cdef struct Reader:
    int64_t record
    int32_t next


cdef class SegmentMap:
    cdef Chunk** chunks
    cdef Py_ssize_t num_chunks, max_chunks
    cdef Reader* readers
    cdef int32_t num_readers, max_readers, free_reader
    cdef Py_ssize_t at

    cdef void free_chunks(self) noexcept
    cdef int32_t new_reader(self, int64_t record, int32_t next_reader) except -2
    cdef int32_t copy_readers(self, int32_t i) except -2
    cdef void drop_readers(self, int32_t i) noexcept
    cdef int32_t insert(self, Py_ssize_t c, int32_t i, int64_t start, int64_t end,
                        int64_t writer, int32_t readers) except -1
    cdef void remove(self, Py_ssize_t c, int32_t i, int32_t n) noexcept
    cdef int32_t find(self, int64_t start) noexcept
    cdef int32_t cut(self, int64_t start) except -1
    cdef int32_t place(self, int64_t start) noexcept
