# SPDX-License-Identifier: Apache-2.0
"""The shadow of memory: who last wrote each byte, and who has read it since.

A map from byte ranges to *records* (one a launch: its lane and its count on that lane), in
ascending order, without gaps being stored.  A new access is compared with what its bytes hold:
a record is ordered before it if it is of the same lane or if the access's vector has reached the
record's count.  Anything else is a race.  Then a write replaces what was there, and a read joins
the readers and takes out those ordered before it.

Accesses arrive in an order that respects happens-before (an operation runs after all that it
waits for), so the last writer and the readers since are enough: if any two unordered accesses
met on a byte, one of them is found here (FastTrack; Flanagan and Freund, PLDI 2009).

The map is a sorted array cut into chunks of at most CHUNK segments, so a change moves little
memory however many segments there are.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove

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

cdef struct Record:
    int64_t count
    int32_t lane

HIT_WRITE = 1       # the earlier access was a write
HIT_READ = 0


@cython.final
cdef class Vector:
    """What has been reached of each lane: counts by lane, never changed once made.

    Lanes beyond the end are at 0.  Shared by operations, records and lanes.
    """

    cdef int64_t* counts
    cdef Py_ssize_t n

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

    def join(self, Vector other, Py_ssize_t lane, int64_t count):
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

    def meet(self, Vector other):
        """The greatest vector that both have reached."""
        cdef Py_ssize_t n = min(self.n, other.n)
        cdef Vector out = Vector(n)
        cdef Py_ssize_t i
        for i in range(n):
            out.counts[i] = min(self.counts[i], other.counts[i])
        return out

    def reached(self, Vector other, Py_ssize_t lane, int64_t count):
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


cdef class Shadow:
    """Byte ranges and the accesses that matter for them.

    ``record`` adds a record; ``access`` compares and enters ranges; ``clear`` forgets a range,
    ``reset`` everything, ``sweep`` what is ordered before all that is still to come.
    """

    cdef Chunk** chunks
    cdef Py_ssize_t num_chunks, max_chunks
    cdef Reader* readers
    cdef int32_t num_readers, max_readers, free_reader
    cdef Record* records
    cdef int64_t num_records, max_records
    # where the last look-up ended: ranges come in ascending order
    cdef Py_ssize_t at

    def __cinit__(self):
        self.chunks = NULL
        self.readers = NULL
        self.records = NULL
        self.free_reader = NONE

    def __dealloc__(self):
        self._free_chunks()
        free(self.chunks)
        free(self.readers)
        free(self.records)

    cdef void _free_chunks(self) noexcept:
        cdef Py_ssize_t i
        for i in range(self.num_chunks):
            free(self.chunks[i])
        self.num_chunks = 0

    # -- records

    @property
    def num_live(self):
        """Records entered since the last sweep."""
        return self.num_records

    @property
    def num_segments(self):
        cdef Py_ssize_t i
        cdef int64_t total = 0
        for i in range(self.num_chunks):
            total += self.chunks[i].n
        return total

    cdef int64_t _record(self, int32_t lane, int64_t count) except -1:
        cdef int64_t wanted
        cdef void* fresh
        if self.num_records == self.max_records:
            wanted = max(1024, 2 * self.max_records)
            fresh = realloc(self.records, wanted * sizeof(Record))
            if fresh == NULL:
                raise MemoryError
            self.records = <Record*>fresh
            self.max_records = wanted
        self.records[self.num_records].lane = lane
        self.records[self.num_records].count = count
        self.num_records += 1
        return self.num_records - 1

    cdef inline bint _ordered(self, int64_t record, int32_t lane, int64_t host,
                              Vector vector) noexcept:
        cdef int32_t its = self.records[record].lane
        if its == lane:
            return True
        if its == 0:
            return host >= self.records[record].count
        return its < vector.n and vector.counts[its] >= self.records[record].count

    # -- readers

    cdef int32_t _new_reader(self, int64_t record, int32_t next_reader) except -2:
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

    cdef int32_t _copy_readers(self, int32_t i) except -2:
        cdef int32_t head = NONE
        while i != NONE:
            head = self._new_reader(self.readers[i].record, head)
            i = self.readers[i].next
        return head

    cdef void _drop_readers(self, int32_t i) noexcept:
        cdef int32_t following
        while i != NONE:
            following = self.readers[i].next
            self.readers[i].next = self.free_reader
            self.free_reader = i
            i = following

    # -- the sorted array

    cdef int _insert(self, Py_ssize_t c, int32_t i, int64_t start, int64_t end,
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

    cdef void _remove(self, Py_ssize_t c, int32_t i, int32_t n) noexcept:
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

    cdef int32_t _find(self, int64_t start) noexcept:
        """The first segment that ends after start: its place in chunk ``self.at``.

        ``self.at`` is ``num_chunks`` when there is none.
        """
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = self.num_chunks
        cdef Py_ssize_t mid
        cdef int32_t a = 0
        cdef int32_t b, m
        cdef Chunk* chunk
        # the chunk of the last look-up, when it still fits
        if self.at < high:
            chunk = self.chunks[self.at]
            if chunk.segments[chunk.n - 1].end > start and chunk.segments[0].start <= start:
                low = self.at
                high = self.at + 1
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

    cdef int32_t _cut(self, int64_t start) except -1:
        """Make ``start`` a border; the place of the first segment at or after it."""
        cdef int32_t i = self._find(start)
        cdef Segment* s
        cdef int64_t end
        if self.at < self.num_chunks:
            s = &self.chunks[self.at].segments[i]
            if s.start < start:
                end = s.end
                s.end = start
                return self._insert(self.at, i + 1, start, end, s.writer,
                                    self._copy_readers(s.readers))
        return i

    # -- accesses

    def access(self, const int64_t[:, :] ranges, bint write, int32_t lane, int64_t count,
               int64_t host, Vector vector not None):
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
        cdef int32_t i = self._cut(start)
        cdef Py_ssize_t c = self.at
        cdef Segment* s
        if c < self.num_chunks:
            s = &self.chunks[c].segments[i]
            if s.start == start and s.end == end:       # the same rows again: nothing moves
                hits = self._compare(s, write, lane, host, vector, hits)
                self._enter(s, write, record, lane, host, vector)
                return hits
            if s.start < end:
                self._cut(end)
                i = self._find(start)
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
            self._drop_readers(s.readers)
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
        s.readers = self._new_reader(record, kept)
        return 0

    cdef list _write(self, int64_t start, int64_t end, int32_t i, int64_t record, int32_t lane,
                     int64_t host, Vector vector, list hits):
        # The borders are cut, so segments are inside as a whole or outside; i is in chunk at.
        cdef Py_ssize_t c = self.at
        cdef int32_t n
        cdef Segment* s
        while c < self.num_chunks:
            n = 0
            while i + n < self.chunks[c].n and self.chunks[c].segments[i + n].start < end:
                s = &self.chunks[c].segments[i + n]
                hits = self._compare(s, True, lane, host, vector, hits)
                self._drop_readers(s.readers)
                n += 1
            if n == 0:
                break
            if n == self.chunks[c].n:
                self._remove(c, i, n)         # the chunk is gone: c is the next one
                i = 0
                continue
            self._remove(c, i, n)
            if i < self.chunks[c].n:
                break
            c += 1
            i = 0
        i = self._place(start)
        self._insert(self.at, i, start, end, record, NONE)
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
                # bytes that nobody has touched yet
                i = self._place(place)
                i = self._insert(self.at, i, place, end if s == NULL else s.start, NONE,
                                 self._new_reader(record, NONE))
                c = self.at
                place = self.chunks[c].segments[i].end
            i += 1
        return hits

    cdef int32_t _place(self, int64_t start) noexcept:
        """Where a segment that starts here is to be inserted: its place in chunk ``at``."""
        cdef int32_t i = self._find(start)
        if self.at == self.num_chunks and self.num_chunks:
            self.at -= 1
            i = self.chunks[self.at].n
        return i

    # -- forgetting

    def clear(self, int64_t start, int64_t end):
        """Forget a range: its memory has gone back."""
        cdef int32_t i, n
        cdef Py_ssize_t c
        if start >= end or self.num_chunks == 0:
            return
        self._cut(end)
        i = self._cut(start)
        c = self.at
        while c < self.num_chunks:
            if i >= self.chunks[c].n:
                c += 1
                i = 0
                continue
            n = 0
            while i + n < self.chunks[c].n and self.chunks[c].segments[i + n].start < end:
                self._drop_readers(self.chunks[c].segments[i + n].readers)
                n += 1
            if n == 0:
                return
            if n == self.chunks[c].n:
                self._remove(c, i, n)
                i = 0
            else:
                self._remove(c, i, n)

    def reset(self):
        """Forget everything: whatever comes is ordered after it."""
        self._free_chunks()
        self.num_readers = 0
        self.free_reader = NONE
        self.num_records = 0
        self.at = 0

    def sweep(self, int64_t host, Vector floor not None):
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
