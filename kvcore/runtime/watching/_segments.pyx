# SPDX-License-Identifier: Apache-2.0
"""A map from byte ranges to the records of who wrote and read them: the shadow's store.

A sorted array cut into chunks of at most CHUNK segments, so that a change moves little memory
however many segments there are.  Readers are short chains in one array, with a free list.  What
the records mean is the business of ``_shadow``.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove


cdef class SegmentMap:
    """Segments in ascending order; gaps are not stored.

    at: the chunk of the last look-up; the next one is often there, as ranges ascend.
    """

    def __cinit__(self):
        self.chunks = NULL
        self.readers = NULL
        self.free_reader = NONE

    def __dealloc__(self):
        self.free_chunks()
        free(self.chunks)
        free(self.readers)

    cdef void free_chunks(self) noexcept:
        cdef Py_ssize_t i
        for i in range(self.num_chunks):
            free(self.chunks[i])
        self.num_chunks = 0

    @property
    def num_segments(self):
        cdef Py_ssize_t i
        cdef int64_t total = 0
        for i in range(self.num_chunks):
            total += self.chunks[i].n
        return total

    # -- readers

    cdef int32_t new_reader(self, int64_t record, int32_t next_reader) except -2:
        cdef int32_t i = self.free_reader
        cdef int32_t wanted
        cdef void* fresh
        if i != NONE:
            self.free_reader = self.readers[i].next
        else:
            if self.num_readers == self.max_readers:
                wanted = max(1024, 2 * self.max_readers)
                fresh = realloc(self.readers, <size_t>wanted * sizeof(Reader))
                if fresh == NULL:
                    raise MemoryError
                self.readers = <Reader*>fresh
                self.max_readers = wanted
            i = self.num_readers
            self.num_readers += 1
        self.readers[i].record = record
        self.readers[i].next = next_reader
        return i

    cdef int32_t copy_readers(self, int32_t i) except -2:
        cdef int32_t head = NONE
        while i != NONE:
            head = self.new_reader(self.readers[i].record, head)
            i = self.readers[i].next
        return head

    cdef void drop_readers(self, int32_t i) noexcept:
        cdef int32_t following
        while i != NONE:
            following = self.readers[i].next
            self.readers[i].next = self.free_reader
            self.free_reader = i
            i = following

    # -- the sorted array

    cdef int32_t insert(self, Py_ssize_t c, int32_t i, int64_t start, int64_t end,
                        int64_t writer, int32_t readers) except -1:
        """Put a segment before place i of chunk c; the chunk is split when full.

        Afterwards ``self.at`` is the chunk that holds it; returns its place there.
        """
        cdef Chunk* chunk
        cdef Chunk* fresh
        cdef void* more
        cdef int32_t half
        if c < self.num_chunks:
            chunk = self.chunks[c]
        else:
            chunk = NULL
        if chunk == NULL or chunk.n == CHUNK:
            if self.num_chunks + 1 > self.max_chunks:
                more = realloc(self.chunks, <size_t>max(16, 2 * self.max_chunks) * sizeof(Chunk*))
                if more == NULL:
                    raise MemoryError
                self.chunks = <Chunk**>more
                self.max_chunks = max(16, 2 * self.max_chunks)
            fresh = <Chunk*>malloc(sizeof(Chunk))
            if fresh == NULL:
                raise MemoryError
            if chunk == NULL:
                fresh.n = 0
                self.chunks[c] = fresh
                self.num_chunks += 1
                chunk = fresh
            else:
                # Ascending inserts fill the last chunk, so keep that one nearly full.
                half = CHUNK - 4 if i >= CHUNK - 4 else CHUNK // 2
                fresh.n = CHUNK - half
                memcpy(fresh.segments, chunk.segments + half, fresh.n * sizeof(Segment))
                chunk.n = half
                memmove(self.chunks + c + 2, self.chunks + c + 1,
                        (self.num_chunks - c - 1) * sizeof(Chunk*))
                self.chunks[c + 1] = fresh
                self.num_chunks += 1
                if i > half:
                    i -= half
                    c += 1
                    chunk = fresh
        memmove(chunk.segments + i + 1, chunk.segments + i, (chunk.n - i) * sizeof(Segment))
        chunk.segments[i].start = start
        chunk.segments[i].end = end
        chunk.segments[i].writer = writer
        chunk.segments[i].readers = readers
        chunk.n += 1
        self.at = c
        return i

    cdef void remove(self, Py_ssize_t c, int32_t i, int32_t n) noexcept:
        """Take n segments out of chunk c from place i on; an empty chunk goes away."""
        cdef Chunk* chunk = self.chunks[c]
        memmove(chunk.segments + i, chunk.segments + i + n,
                (chunk.n - i - n) * sizeof(Segment))
        chunk.n -= n
        if chunk.n == 0:
            free(chunk)
            memmove(self.chunks + c, self.chunks + c + 1,
                    (self.num_chunks - c - 1) * sizeof(Chunk*))
            self.num_chunks -= 1

    cdef int32_t find(self, int64_t start) noexcept:
        """The first segment that ends after start: its place in chunk ``self.at``.

        ``self.at`` is ``num_chunks`` when there is none.
        """
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = self.num_chunks
        cdef Py_ssize_t mid
        cdef int32_t a = 0
        cdef int32_t b, m
        cdef Chunk* chunk
        cdef Py_ssize_t step = 1
        # The chunk of the last look-up or one soon after it, since ranges ascend.
        if self.at < high and self.chunks[self.at].segments[0].start <= start:
            low = self.at
            while low + step <= high:
                chunk = self.chunks[low + step - 1]
                if chunk.segments[chunk.n - 1].end > start:
                    high = low + step
                    break
                low += step
                step *= 2
        while low < high:
            mid = (low + high) // 2
            chunk = self.chunks[mid]
            if chunk.segments[chunk.n - 1].end > start:
                high = mid
            else:
                low = mid + 1
        self.at = low
        if low >= self.num_chunks:
            return 0
        chunk = self.chunks[low]
        b = chunk.n
        while a < b:
            m = (a + b) // 2
            if chunk.segments[m].end > start:
                b = m
            else:
                a = m + 1
        return a

    cdef int32_t cut(self, int64_t start) except -1:
        """Make ``start`` a border; the place of the first segment at or after it."""
        cdef int32_t i = self.find(start)
        cdef Segment* s
        cdef int64_t end
        if self.at < self.num_chunks:
            s = &self.chunks[self.at].segments[i]
            if s.start < start:
                end = s.end
                s.end = start
                return self.insert(self.at, i + 1, start, end, s.writer,
                                   self.copy_readers(s.readers))
        return i

    cdef int32_t place(self, int64_t start) noexcept:
        """Where a segment that starts here is to be inserted: its place in chunk ``at``."""
        cdef int32_t i = self.find(start)
        if self.at == self.num_chunks and self.num_chunks:
            self.at -= 1
            i = self.chunks[self.at].n
        return i

    def clear(self, int64_t start, int64_t end):
        """Forget a range: its memory has gone back."""
        cdef int32_t i, n
        cdef Py_ssize_t c
        if start >= end or self.num_chunks == 0:
            return
        self.cut(end)
        i = self.cut(start)
        c = self.at
        while c < self.num_chunks:
            if i >= self.chunks[c].n:
                c += 1
                i = 0
                continue
            n = 0
            while i + n < self.chunks[c].n and self.chunks[c].segments[i + n].start < end:
                self.drop_readers(self.chunks[c].segments[i + n].readers)
                n += 1
            if n == 0:
                return
            if n == self.chunks[c].n:
                self.remove(c, i, n)
                i = 0
            else:
                self.remove(c, i, n)
