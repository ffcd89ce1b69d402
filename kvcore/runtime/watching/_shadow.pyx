# SPDX-License-Identifier: Apache-2.0
"""The shadow of memory: who last wrote each byte, and who has read it since.

A map from byte ranges to *records* (one a launch: its lane and its count on that lane).  A new
access is compared with what its bytes hold:
a record is ordered before it if it is of the same lane or if the access's vector has reached the
record's count.  Anything else is a race.  Then a write replaces what was there, and a read joins
the readers and takes out those ordered before it.

Accesses arrive in an order that respects happens-before (an operation runs after all that it
waits for), so the last writer and the readers since are enough: if any two unordered accesses
met on a byte, one of them is found here (FastTrack; Flanagan and Freund, PLDI 2009).
"""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc, realloc

from kvcore.runtime.watching._segments cimport NONE, Segment, SegmentMap
from kvcore.runtime.watching._vectors cimport Vector

HIT_WRITE = 1       # the earlier access was a write
HIT_READ = 0


@cython.final
cdef class Shadow(SegmentMap):
    """Byte ranges and the accesses that matter for them.

    ``access`` compares and enters ranges; ``clear`` forgets a range, ``reset`` everything,
    ``sweep`` what is ordered before all that is still to come.
    """

    def __dealloc__(self):
        free(self.records)

    # -- records

    @property
    def num_live(self):
        """Records entered since the last sweep."""
        return self.num_records

    cdef int64_t _record(self, int32_t lane, int64_t count) except -1:
        cdef int64_t wanted
        cdef void* fresh
        if self.num_records == self.max_records:
            wanted = max(1024, 2 * self.max_records)
            fresh = realloc(self.records, wanted * sizeof(Entry))
            if fresh == NULL:
                raise MemoryError
            self.records = <Entry*>fresh
            self.max_records = wanted
        self.records[self.num_records].lane = lane
        self.records[self.num_records].count = count
        self.num_records += 1
        return self.num_records - 1

    cdef bint _ordered(self, int64_t record, int32_t lane, int64_t host,
                       Vector vector) noexcept:
        cdef int32_t its = self.records[record].lane
        if its == lane:
            return True
        if its == 0:
            return host >= self.records[record].count
        return its < vector.n and vector.counts[its] >= self.records[record].count

    # -- accesses

    cpdef list access(self, const int64_t[:, :] ranges, bint write, int32_t lane, int64_t count,
                      int64_t host, Vector vector):
        """Compare ranges with what is there and enter them, as a new record.

        lane, count: the launch.  host, vector: what it comes after.  The record's number is
        ``num_live`` from before the call.  Returns None, or rows (other record, start, end,
        HIT_WRITE or HIT_READ).
        """
        cdef Py_ssize_t row
        cdef list hits = None
        cdef int64_t record = self._record(lane, count)
        for row in range(ranges.shape[0]):
            if ranges[row, 0] < ranges[row, 1]:
                hits = self._one(ranges[row, 0], ranges[row, 1], write, record, lane, host,
                                 vector, hits)
        return hits

    cdef list _one(self, int64_t start, int64_t end, bint write, int64_t record, int32_t lane,
                   int64_t host, Vector vector, list hits):
        cdef int32_t i = self.cut(start)
        cdef Py_ssize_t c = self.at
        cdef Segment* s
        if c < self.num_chunks:
            s = &self.chunks[c].segments[i]
            if s.start == start and s.end == end:       # the same rows again: nothing moves
                hits = self._compare(s, write, lane, host, vector, hits)
                self._enter(s, write, record, lane, host, vector)
                return hits
            if s.start < end:
                self.cut(end)
                i = self.find(start)
        if write:
            return self._write(start, end, i, record, lane, host, vector, hits)
        return self._read(start, end, i, record, lane, host, vector, hits)

    cdef list _compare(self, Segment* s, bint write, int32_t lane, int64_t host,
                       Vector vector, list hits):
        cdef int32_t reader
        if s.writer != NONE and not self._ordered(s.writer, lane, host, vector):
            if hits is None:
                hits = []
            hits.append((s.writer, s.start, s.end, HIT_WRITE))
        if write:
            reader = s.readers
            while reader != NONE:
                if not self._ordered(self.readers[reader].record, lane, host, vector):
                    if hits is None:
                        hits = []
                    hits.append((self.readers[reader].record, s.start, s.end, HIT_READ))
                reader = self.readers[reader].next
        return hits

    cdef int _enter(self, Segment* s, bint write, int64_t record, int32_t lane, int64_t host,
                    Vector vector) except -1:
        cdef int32_t reader = s.readers
        cdef int32_t following
        cdef int32_t kept = NONE
        if write:
            self.drop_readers(s.readers)
            s.readers = NONE
            s.writer = record
            return 0
        while reader != NONE:
            following = self.readers[reader].next
            if self._ordered(self.readers[reader].record, lane, host, vector):
                self.readers[reader].next = self.free_reader
                self.free_reader = reader
            else:
                self.readers[reader].next = kept
                kept = reader
            reader = following
        s.readers = kept
        s.readers = self.new_reader(record, kept)
        return 0

    cdef list _write(self, int64_t start, int64_t end, int32_t i, int64_t record, int32_t lane,
                     int64_t host, Vector vector, list hits):
        # The borders are cut, so segments are inside as a whole or outside; i is in chunk at.
        cdef Py_ssize_t c = self.at
        cdef int32_t n
        cdef Segment* s
        cdef bint moved = False
        while c < self.num_chunks:
            n = 0
            while i + n < self.chunks[c].n and self.chunks[c].segments[i + n].start < end:
                s = &self.chunks[c].segments[i + n]
                hits = self._compare(s, True, lane, host, vector, hits)
                self.drop_readers(s.readers)
                n += 1
            if n == 0:
                break
            moved = True
            if n == self.chunks[c].n:
                self.remove(c, i, n)         # the chunk is gone: c is the next one
                i = 0
                continue
            self.remove(c, i, n)
            if i < self.chunks[c].n:
                break
            c += 1
            i = 0
        if moved or self.at == self.num_chunks:
            i = self.place(start)
        self.insert(self.at, i, start, end, record, NONE)
        return hits

    cdef list _read(self, int64_t start, int64_t end, int32_t i, int64_t record, int32_t lane,
                    int64_t host, Vector vector, list hits):
        cdef Py_ssize_t c = self.at
        cdef int64_t place = start
        cdef Segment* s
        while place < end:
            if c < self.num_chunks and i >= self.chunks[c].n:
                c += 1
                i = 0
                continue
            s = NULL
            if c < self.num_chunks:
                s = &self.chunks[c].segments[i]
                if s.start >= end:
                    s = NULL
            if s != NULL and s.start == place:
                place = s.end
                hits = self._compare(s, False, lane, host, vector, hits)
                self._enter(s, False, record, lane, host, vector)
            else:
                # bytes that were not touched yet
                i = self.place(place)
                i = self.insert(self.at, i, place, end if s == NULL else s.start, NONE,
                                self.new_reader(record, NONE))
                c = self.at
                place = self.chunks[c].segments[i].end
            i += 1
        return hits

    # -- forgetting

    def reset(self):
        """Forget everything: whatever comes is ordered after it."""
        self.free_chunks()
        self.num_readers = 0
        self.free_reader = NONE
        self.num_records = 0
        self.at = 0

    cpdef list sweep(self, int64_t host, Vector floor):
        """Forget accesses ordered before everything to come, and renumber the records.

        host, floor: the least vector that any later access can have.  Returns the old numbers
        of the records that are left, in their new order.
        """
        cdef int64_t r, kept_count = 0
        cdef Py_ssize_t c
        cdef int32_t i, out, reader, following, kept
        cdef Segment* s
        cdef int64_t* renamed
        cdef Py_ssize_t chunk_out = 0
        cdef list left = []
        renamed = <int64_t*>malloc(<size_t>max(1, self.num_records) * sizeof(int64_t))
        if renamed == NULL:
            raise MemoryError
        try:
            for r in range(self.num_records):
                renamed[r] = NONE
            for c in range(self.num_chunks):
                out = 0
                for i in range(self.chunks[c].n):
                    s = &self.chunks[c].segments[i]
                    if s.writer != NONE:
                        if self._ordered(s.writer, NONE, host, floor):
                            s.writer = NONE
                        else:
                            renamed[s.writer] = 0
                    kept = NONE
                    reader = s.readers
                    while reader != NONE:
                        following = self.readers[reader].next
                        if self._ordered(self.readers[reader].record, NONE, host, floor):
                            self.readers[reader].next = self.free_reader
                            self.free_reader = reader
                        else:
                            renamed[self.readers[reader].record] = 0
                            self.readers[reader].next = kept
                            kept = reader
                        reader = following
                    s.readers = kept
                    if s.writer != NONE or kept != NONE:
                        self.chunks[c].segments[out] = s[0]
                        out += 1
                self.chunks[c].n = out
            for c in range(self.num_chunks):
                if self.chunks[c].n:
                    self.chunks[chunk_out] = self.chunks[c]
                    chunk_out += 1
                else:
                    free(self.chunks[c])
            self.num_chunks = chunk_out
            self.at = 0
            for r in range(self.num_records):
                if renamed[r] != NONE:
                    renamed[r] = kept_count
                    self.records[kept_count] = self.records[r]
                    kept_count += 1
                    left.append(r)
            self.num_records = kept_count
            for c in range(self.num_chunks):
                for i in range(self.chunks[c].n):
                    s = &self.chunks[c].segments[i]
                    if s.writer != NONE:
                        s.writer = renamed[s.writer]
                    reader = s.readers
                    while reader != NONE:
                        self.readers[reader].record = renamed[self.readers[reader].record]
                        reader = self.readers[reader].next
        finally:
            free(renamed)
        return left

    def segments(self):
        """For tests: rows (start, end, writer or -1, sorted readers)."""
        cdef Py_ssize_t c
        cdef int32_t i, reader
        found = []
        for c in range(self.num_chunks):
            for i in range(self.chunks[c].n):
                readers = []
                reader = self.chunks[c].segments[i].readers
                while reader != NONE:
                    readers.append(self.readers[reader].record)
                    reader = self.readers[reader].next
                found.append((self.chunks[c].segments[i].start, self.chunks[c].segments[i].end,
                              self.chunks[c].segments[i].writer, sorted(readers)))
        return found
