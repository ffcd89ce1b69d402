# SPDX-License-Identifier: Apache-2.0
"""Compressing windows of tokens per (batch, head) into runs of cache rows.

A source holds the heads of a token side by side, a cache one head a row, so a run taken by itself
would read a row here and a row there.  Therefore the heads of a batch go through the tokens in
tiles: some rows of one head, the same tokens of the next head, and so on, while sums wait in a
small buffer.  Where runs of different heads share slots the order matters: then each run is done
by itself, in order, and the threads share the lanes only.

Work is cut into units: a lane, a batch, a group of heads, a part of the rows.  A unit's sums fit a
buffer on the stack, so there is nothing to allocate and nothing to fail.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, qsort
from libc.string cimport memset

from kvcore._kernels.isa cimport active, kv_isa
from kvcore._kernels.lanes cimport kv_copy, kv_inside, kv_page
from kvcore._kernels.parallel cimport run_chunks
from kvcore._kernels.scan cimport DISTINCT, NO_MEMORY, REPEATED, map_fits

ctypedef void (*stream_t)(char* dst, const char* src, int64_t n) noexcept nogil

cdef extern from "means.h" nogil:
    ctypedef struct kv_float_mode:
        pass
    void kv_float_begin(kv_float_mode* saved)
    void kv_float_end(const kv_float_mode* saved)
    void kv_fetch(const char* src, int64_t ahead, int64_t nbytes)
    void kv_row(char* dst, const char* src, int64_t n)
    void kv_row_streamed(char* dst, const char* src, int64_t n, stream_t stream)
    void kv_set_hifloat8(const float* values, const uint32_t* limits, const unsigned char* codes)
    void kv_means_begin()
    void kv_pick(int kind, const char* isa, add_t* add, mean_t* mean)
    const char* kv_type_names

# Types that have a mean; their place here is the kernels' number of them.
MEANS = tuple(kv_type_names.decode("ascii").split())

cdef enum:
    MAX_SUMS = 4096        # 16 KiB of sums for all heads of a group
    LOOSE_ITEMS = 512      # items that are not contiguous are gathered in pieces of this many
    BURST_BYTES = 4096     # what a tile takes of one head: less, and the rows' streams break up
    TILE_BYTES = 65536     # what a tile takes of all heads: stays in a second-level cache
    STREAM_ROW = 64        # shorter rows are not worth streaming
    MIN_TILE = 4
    MAX_TILE = 64

kv_means_begin()


cdef void pick_mean(windows_job* job, int kind) noexcept nogil:
    """Means of items of that kind (see MEANS); below 0: no means."""
    job.add = NULL
    job.mean = NULL
    if kind >= 0:
        kv_pick(kind, active().name, &job.add, &job.mean)


cdef inline bint has_mean(const windows_job* job, int64_t i) noexcept nogil:
    return job.add != NULL and job.tails[i] > job.heads[i]


cdef int64_t run_rows_of(const windows_job* job, int64_t i) noexcept nogil:
    """Rows run i writes."""
    return (
        job.heads[i] + has_mean(job, i) + job.lengths[i // job.num_heads] - job.tails[i]
    )


cdef int by_first(const void* a, const void* b) noexcept nogil:
    cdef int64_t x = (<const int64_t*>a)[0], y = (<const int64_t*>b)[0]
    return (x > y) - (x < y)


cdef bint runs_overlap(const windows_job* job, int64_t* pairs) noexcept nogil:
    """Whether two runs share a slot.  pairs: room for 2 * batch * num_heads numbers."""
    cdef int64_t i, n = 0, rows, past = 0
    cdef bint ascending = True
    for i in range(job.batch * job.num_heads):
        rows = run_rows_of(job, i)
        if job.slots[i] < 0 or rows == 0:
            continue
        pairs[2 * n] = job.slots[i]
        pairs[2 * n + 1] = job.slots[i] + rows
        ascending = ascending and job.slots[i] >= past
        past = pairs[2 * n + 1]
        n += 1
    if ascending:
        return False
    qsort(pairs, <size_t>n, 2 * sizeof(int64_t), by_first)
    for i in range(1, n):
        if pairs[2 * i] < pairs[2 * i - 1]:
            return True
    return False


cdef int claim(uint64_t* words, int64_t first, int64_t past) noexcept nogil:
    # Set bits [first, past), which are not none; whether one of them was set.
    cdef int64_t i = first >> 6, last = (past - 1) >> 6
    cdef uint64_t taken = 0, mask = <uint64_t>-1 << (first & 63)
    while i < last:
        taken |= words[i] & mask
        words[i] |= mask
        mask = <uint64_t>-1
        i += 1
    mask &= <uint64_t>-1 >> (63 - ((past - 1) & 63))
    taken |= words[i] & mask
    words[i] |= mask
    return taken != 0


cdef int runs_apart(
    const windows_job* job, int64_t num_slots, int64_t* pairs, int64_t* at, int64_t* before
) noexcept nogil:
    """Whether each slot is written once: DISTINCT, REPEATED or NO_MEMORY.

    When REPEATED, runs at > before share a slot.  No more than num_slots rows are written.
    pairs: room for 2 * batch * num_heads numbers.
    """
    cdef int64_t i, n = 0, rows, past = 0, runs = job.batch * job.num_heads
    cdef bint ascending = True
    cdef uint64_t* words
    for i in range(runs):
        rows = run_rows_of(job, i)
        if job.slots[i] < 0 or rows == 0:
            continue
        ascending = ascending and job.slots[i] >= past
        past = job.slots[i] + rows
        pairs[2 * n] = job.slots[i]
        pairs[2 * n + 1] = i
        n += 1
    if ascending:
        return DISTINCT
    at[0] = -1
    if map_fits(n, num_slots):
        words = <uint64_t*>calloc(<size_t>(num_slots // 64 + 1), 8)
        if words == NULL:
            return NO_MEMORY
        for i in range(n):
            past = pairs[2 * i] + run_rows_of(job, pairs[2 * i + 1])
            if claim(words, pairs[2 * i], past):
                at[0] = i
                break
        free(words)
        if at[0] < 0:
            return DISTINCT
        for i in range(at[0]):
            if pairs[2 * i] < past and (
                pairs[2 * i] + run_rows_of(job, pairs[2 * i + 1]) > pairs[2 * at[0]]
            ):
                before[0] = pairs[2 * i + 1]
                break
        at[0] = pairs[2 * at[0] + 1]
        return REPEATED
    qsort(pairs, <size_t>n, 2 * sizeof(int64_t), by_first)
    for i in range(1, n):
        if pairs[2 * i - 2] + run_rows_of(job, pairs[2 * i - 1]) > pairs[2 * i]:
            at[0] = pairs[2 * i + 1] if pairs[2 * i + 1] > pairs[2 * i - 1] else pairs[2 * i - 1]
            before[0] = pairs[2 * i + 1] + pairs[2 * i - 1] - at[0]
            return REPEATED
    return DISTINCT


cdef void copy_rows(
    const windows_job* job, const window_lane* side, const char* tok, int64_t slot, int64_t n,
    int64_t first, int64_t items, int64_t ahead
) noexcept nogil:
    # n tokens from tok on (its item `first`) to consecutive slots.
    cdef const kv_lane* lane = &side.lane
    cdef int64_t t, e, nbytes = items * side.item_bytes
    cdef const kv_isa* isa = active() if job.stream and nbytes >= STREAM_ROW else NULL
    cdef char* page
    if side.tok_step != side.item_bytes or side.page_step != side.item_bytes:
        for t in range(n):
            page = kv_page(lane, slot + t) + first * side.page_step
            for e in range(items):
                kv_inside(lane.tok_lo, lane.tok_hi, tok + e * side.tok_step, side.item_bytes,
                          "token")
                kv_inside(lane.page_lo, lane.page_hi, page + e * side.page_step, side.item_bytes,
                          "cache")
                kv_copy(page + e * side.page_step, tok + e * side.tok_step, side.item_bytes)
            tok += lane.tok_stride
        return
    if lane.flat and lane.tok_stride == nbytes and lane.row_stride == nbytes:
        nbytes *= n
        n = 1
    for t in range(n):
        if ahead != 0:
            kv_fetch(tok, ahead, nbytes)
        page = kv_page(lane, slot + t) + first * side.page_step
        kv_inside(lane.tok_lo, lane.tok_hi, tok, nbytes, "token")
        kv_inside(lane.page_lo, lane.page_hi, page, nbytes, "cache")
        if isa == NULL:
            kv_row(page, tok, nbytes)
        else:
            kv_row_streamed(page, tok, nbytes, isa.stream)
        tok += lane.tok_stride


cdef void add_tokens(
    const windows_job* job, const window_lane* side, float* sums, const char* tok, int64_t n,
    int64_t items, int64_t ahead
) noexcept nogil:
    cdef const kv_lane* lane = &side.lane
    cdef int64_t e, k, part
    cdef char[LOOSE_ITEMS * 4] loose
    if side.tok_step == side.item_bytes:
        kv_inside(lane.tok_lo, lane.tok_hi, tok, items * side.item_bytes, "token")
        kv_inside(lane.tok_lo, lane.tok_hi, tok + (n - 1) * lane.tok_stride,
                  items * side.item_bytes, "token")
        job.add(sums, tok, lane.tok_stride, n, items, ahead)
        return
    while n > 0:
        n -= 1
        e = 0
        while e < items:
            part = items - e if items - e < LOOSE_ITEMS else LOOSE_ITEMS
            for k in range(part):
                kv_inside(lane.tok_lo, lane.tok_hi, tok + (e + k) * side.tok_step, side.item_bytes,
                          "token")
                kv_copy(loose + k * side.item_bytes, tok + (e + k) * side.tok_step,
                        side.item_bytes)
            job.add(sums + e, loose, 0, 1, part, 0)
            e += part
        tok += lane.tok_stride


cdef void write_mean(
    const windows_job* job, const window_lane* side, const float* sums, int64_t slot, int64_t count,
    int64_t first, int64_t items
) noexcept nogil:
    cdef const kv_lane* lane = &side.lane
    cdef char* page = kv_page(lane, slot) + first * side.page_step
    cdef int64_t e, k, part, nbytes = items * side.item_bytes
    cdef char[LOOSE_ITEMS * 4] loose
    cdef char[MAX_SUMS * 4] row
    if side.page_step == side.item_bytes:
        kv_inside(lane.page_lo, lane.page_hi, page, nbytes, "cache")
        if job.stream and nbytes >= STREAM_ROW:
            # As its neighbours: an ordinary store would fetch the lines it shares with them.
            job.mean(row, sums, items, count)
            kv_row_streamed(page, row, nbytes, active().stream)
        else:
            job.mean(page, sums, items, count)
        return
    e = 0
    while e < items:
        part = items - e if items - e < LOOSE_ITEMS else LOOSE_ITEMS
        job.mean(loose, sums + e, part, count)
        for k in range(part):
            kv_inside(lane.page_lo, lane.page_hi, page + (e + k) * side.page_step, side.item_bytes,
                      "cache")
            kv_copy(page + (e + k) * side.page_step, loose + k * side.item_bytes, side.item_bytes)
        e += part


cdef void run_unit(
    const windows_job* job, const window_lane* side, int64_t b, int64_t h_begin, int64_t h_end,
    int64_t part
) noexcept nogil:
    cdef float[MAX_SUMS] sums
    cdef float* own
    cdef int64_t first = part * MAX_SUMS
    cdef int64_t items = side.items - first if side.items - first < MAX_SUMS else MAX_SUMS
    cdef int64_t n = job.lengths[b], tile, begin, end, start, past, i, h, head, tail, t = n
    cdef int64_t ahead = 0
    cdef const char* tok
    cdef const char* origin = (
        side.lane.tok + job.starts[b] * side.start_stride + first * side.tok_step
    )
    for h in range(h_begin, h_end):
        i = b * job.num_heads + h
        if job.slots[i] >= 0:
            if job.heads[i] > 0:
                t = 0
            elif has_mean(job, i):
                t = 0
            elif job.tails[i] < t:
                t = job.tails[i]
    if job.add != NULL:
        memset(sums, 0, <size_t>((h_end - h_begin) * items) * sizeof(float))
    tile = job.tile if h_end - h_begin > 1 else n
    if side.lane.tok_stride != items * side.item_bytes:
        ahead = 2 * job.tile * side.lane.tok_stride
    while t < n:
        begin = t
        t = end = n if n - t < tile else t + tile
        for h in range(h_begin, h_end):
            i = b * job.num_heads + h
            if job.slots[i] < 0:
                continue
            head = job.heads[i]
            tail = job.tails[i]
            tok = origin + h * side.head_stride
            if begin < head:
                past = end if end < head else head
                copy_rows(job, side, tok + begin * side.lane.tok_stride, job.slots[i] + begin,
                          past - begin, first, items, ahead)
            if begin < tail and end > head and has_mean(job, i):
                own = sums + (h - h_begin) * items
                start = begin if begin > head else head
                past = end if end < tail else tail
                add_tokens(job, side, own, tok + start * side.lane.tok_stride, past - start, items,
                           ahead)
                if past == tail:
                    write_mean(job, side, own, job.slots[i] + head, tail - head, first, items)
            if end > tail:
                start = begin if begin > tail else tail
                copy_rows(job, side, tok + start * side.lane.tok_stride,
                          job.slots[i] + head + has_mean(job, i) + start - tail,
                          end - start, first, items, ahead)


cdef void unit_chunk(void* context, int64_t chunk) noexcept nogil:
    cdef const windows_job* job = <const windows_job*>context
    cdef kv_float_mode mode
    cdef int64_t part, group, b, h_end
    part = chunk % job.n_parts
    chunk = chunk // job.n_parts
    group = chunk % job.n_groups
    chunk = chunk // job.n_groups
    b = chunk % job.batch
    chunk = chunk // job.batch
    if part * MAX_SUMS >= job.lanes[chunk].items:
        return
    h_end = (group + 1) * job.group
    if h_end > job.num_heads:
        h_end = job.num_heads
    kv_float_begin(&mode)
    run_unit(job, &job.lanes[chunk], b, group * job.group, h_end, part)
    kv_float_end(&mode)
    if job.stream:
        active().fence()


cdef void ordered_chunk(void* context, int64_t chunk) noexcept nogil:
    # All runs of one lane and one part of the rows, in order.
    cdef const windows_job* job = <const windows_job*>context
    cdef kv_float_mode mode
    cdef int64_t part = chunk % job.n_parts, b, h
    chunk = chunk // job.n_parts
    if part * MAX_SUMS >= job.lanes[chunk].items:
        return
    kv_float_begin(&mode)
    for b in range(job.batch):
        for h in range(job.num_heads):
            run_unit(job, &job.lanes[chunk], b, h, h + 1, part)
    kv_float_end(&mode)
    if job.stream:
        active().fence()


cdef inline int64_t within(int64_t value, int64_t least, int64_t most) noexcept nogil:
    return least if value < least else most if value > most else value


cdef void run_windows(windows_job* job, int n_threads, int64_t* pairs) noexcept nogil:
    """Do all runs; checked before.  pairs: room for 2 * batch * num_heads numbers."""
    cdef int64_t items = 1, nbytes, i
    for i in range(job.n_lanes):
        if job.lanes[i].items > items:
            items = job.lanes[i].items
    job.n_parts = (items + MAX_SUMS - 1) // MAX_SUMS
    items = items if items < MAX_SUMS else MAX_SUMS
    nbytes = items * job.lanes[0].item_bytes
    job.tile = within(BURST_BYTES // nbytes, MIN_TILE, MAX_TILE)
    job.group = within(TILE_BYTES // (job.tile * nbytes), 1, MAX_SUMS // items)
    job.group = within(job.group, 1, job.num_heads)
    if (n_threads > 1 or job.group > 1) and runs_overlap(job, pairs):
        run_chunks(ordered_chunk, job, job.n_lanes * job.n_parts, n_threads)
        return
    while True:
        job.n_groups = (job.num_heads + job.group - 1) // job.group
        i = job.n_lanes * job.batch * job.n_groups * job.n_parts
        if job.group == 1 or i >= 2 * n_threads or n_threads == 1:
            break
        job.group = (job.group + 1) // 2
    run_chunks(unit_chunk, job, i, n_threads)


def set_hifloat8(
    const float[::1] values, const uint32_t[::1] limits, const unsigned char[::1] codes
):
    """Bring the tables of kvcore.hifloat8 here: 256 values, 127 limits, 128 codes.

    limits: the bits of the float32 midpoints between neighbouring magnitudes, ascending; codes:
    those magnitudes' codes.  Raises ValueError on other sizes.
    """
    if values.shape[0] != 256 or limits.shape[0] != 127 or codes.shape[0] != 128:
        raise ValueError(
            "expected 256 values, 127 limits and 128 codes, "
            f"got {values.shape[0]}, {limits.shape[0]} and {codes.shape[0]}"
        )
    kv_set_hifloat8(&values[0], &limits[0], &codes[0])
