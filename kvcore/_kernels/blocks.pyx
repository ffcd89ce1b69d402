# SPDX-License-Identifier: Apache-2.0
"""Moves what select.pyx planned: the copying half of GatherSelectionKvCache.

In each row the swap comes before the ops, for it saves blocks from being overwritten.  After it
no op reads what another writes: movers leave places at or behind the row's count and take places
before it, and each place has memory of its own (checked before).

Source rows lie anywhere in a cache that may be far larger than any processor cache, so the rows
ahead are asked for; where a call writes more than a core's own cache holds, it writes past it.
"""

from libc.stdint cimport int64_t
from libc.string cimport memcpy

from kvcore._kernels.isa cimport active, kv_isa
from kvcore._kernels.lanes cimport kv_copy, kv_inside
from kvcore._kernels.parallel cimport run_chunks
from kvcore._kernels.select cimport (
    EXCHANGE,
    FROM_LAST,
    READ,
    TO_LAST,
    first_entry,
    first_op,
    get_op,
    place_slot,
    select_job,
    select_op,
    select_row,
    tail_of,
    write_status,
)

cdef extern from *:
    """
    /* kv_fetch asks for a line into the second-level cache: asked into the first, lines push out
       what is being copied.  kv_claim asks for one to be written.  (PREFETCHW is in every 64-bit
       x86, as a no-op at the least; the compiler takes it for newer ones only.) */
    #if defined(__GNUC__)
    #define kv_fetch(p) __builtin_prefetch((p), 0, 2)
    #define kv_read(p) __builtin_prefetch((p), 0, 3)
    #if defined(__x86_64__)
    #define kv_claim(p) __asm__ volatile("prefetchw %0" ::"m"(*(const char *)(p)))
    #else
    #define kv_claim(p) __builtin_prefetch((p), 1, 3)
    #endif
    #else
    #define kv_fetch(p) ((void)(p))
    #define kv_read(p) ((void)(p))
    #define kv_claim(p) ((void)(p))
    #endif
    /* Asks for the lines of n bytes. */
    static inline void kv_fetch_lines(const char *p, int64_t n)
    {
        const char *end = p + n;
        for (p -= (uintptr_t)p & 63; end - p > 192; p += 256) {
            kv_fetch(p);
            kv_fetch(p + 64);
            kv_fetch(p + 128);
            kv_fetch(p + 192);
        }
        for (; p < end; p += 64)
            kv_fetch(p);
    }
    /* The same into the first-level cache, soon before they are read. */
    static inline void kv_read_lines(const char *p, int64_t n)
    {
        const char *end = p + n;
        for (p -= (uintptr_t)p & 63; p < end; p += 64)
            kv_read(p);
    }
    """
    void kv_fetch_lines(const char* p, int64_t n) noexcept nogil
    void kv_read_lines(const char* p, int64_t n) noexcept nogil
    void kv_claim(const char* p) noexcept nogil

cdef enum:
    LINE = 64
    STREAM_PIECE = 512     # shorter pieces are mostly lines that others share
    PAST_PIECE = 16        # where the ends of pieces go past the cache too
    # How far ahead of the copy lines are asked for, in bytes and at most in blocks.
    READ_AHEAD_BYTES = 24576
    WRITE_AHEAD_BYTES = 4096
    AHEAD_OPS = 32
    PAST_AHEAD_OPS = 12    # asked for into the first-level cache, so fewer
    BATCH = 32             # ops looked up at a time
    RING = 64              # a power of two, and no less than AHEAD_OPS + BATCH
    # Of a larger block the first bytes are enough: the processor follows a run by itself.
    MOST_ASKED = 4096
    EXCHANGE_BYTES = 256
    CHUNKS_A_THREAD = 8    # rows may differ in what they have to move


cdef inline char* at(const paged_side* side, int64_t slot) noexcept nogil:
    if side.flat:
        return side.base + slot * side.row_stride
    if side.shift >= 0:
        return side.base + (slot >> side.shift) * side.block_stride \
            + (slot & (side.page - 1)) * side.row_stride
    return side.base + (slot // side.page) * side.block_stride \
        + (slot % side.page) * side.row_stride


cdef inline void copy(
    char* dst, const paged_side* to, const char* src, const paged_side* source, int64_t n,
    const kv_isa* isa
) noexcept nogil:
    # isa: NULL for ordinary stores.
    kv_inside(to.lo, to.hi, dst, n, "selection")
    kv_inside(source.lo, source.hi, src, n, "source")
    if isa != NULL and n >= STREAM_PIECE:
        isa.row(dst, src, n)
    else:
        kv_copy(dst, src, n)


cdef inline void copy_block(
    const block_lane* lane, char* dst, const char* src, const paged_side* source, bint packed,
    int64_t tokens, const kv_isa* isa
) noexcept nogil:
    # Tokens of one block from source (either side) to the selection.
    cdef const paged_side* here = &lane.here
    cdef int64_t _t, i
    if packed:
        copy(dst, here, src, source, tokens * lane.bytes, isa)
        return
    for _t in range(tokens):
        for i in range(lane.pieces):
            copy(dst + i * here.step, here, src + i * source.step, source, lane.bytes, isa)
        dst += here.row_stride
        src += source.row_stride


cdef inline void exchange_bytes(char* a, char* b, int64_t n) noexcept nogil:
    cdef char kept[EXCHANGE_BYTES]
    cdef int64_t size
    while n > 0:
        size = n if n < EXCHANGE_BYTES else EXCHANGE_BYTES
        memcpy(kept, a, <size_t>size)
        memcpy(a, b, <size_t>size)
        memcpy(b, kept, <size_t>size)
        a += size
        b += size
        n -= size


cdef void exchange(const block_lane* lane, char* a, char* b, int64_t tokens) noexcept nogil:
    cdef int64_t _t, i
    for _t in range(tokens):
        for i in range(lane.pieces):
            kv_inside(lane.here.lo, lane.here.hi, a + i * lane.here.step, lane.bytes, "selection")
            kv_inside(lane.here.lo, lane.here.hi, b + i * lane.here.step, lane.bytes, "selection")
            exchange_bytes(a + i * lane.here.step, b + i * lane.here.step, lane.bytes)
        a += lane.here.row_stride
        b += lane.here.row_stride


cdef void swap(const block_lane* lane, const select_job* plan, int64_t r) noexcept nogil:
    # Held blocks are whole.
    cdef const select_row* row = &plan.rows[r]
    cdef char* place = at(&lane.here, place_slot(plan, r, row.swap_place))
    cdef char* last = at(&lane.here, place_slot(plan, r, row.n - 1))
    cdef int64_t block = plan.block
    if row.swap == EXCHANGE:
        exchange(lane, place, last, block)
    elif row.swap == TO_LAST:
        copy_block(lane, last, place, &lane.here, lane.packed_move, block, NULL)
    elif row.swap == FROM_LAST:
        copy_block(lane, place, last, &lane.here, lane.packed_move, block, NULL)


cdef inline int64_t ahead(int64_t nbytes, int64_t most_bytes, int64_t most) noexcept nogil:
    cdef int64_t n = most_bytes // nbytes
    return 1 if n < 1 else most if n > most else n


cdef inline void claim(const char* p, int64_t n, const kv_isa* isa) noexcept nogil:
    cdef const char* end = p + n
    if isa != NULL and isa.asks == 0:
        return
    if isa != NULL and n >= STREAM_PIECE:
        # The lines at both ends are shared with other rows and are not streamed.
        kv_claim(p)
        kv_claim(end - 1)
        return
    p -= <size_t>p & (LINE - 1)
    while p < end:
        kv_claim(p)
        p += LINE


cdef bint is_plain(const blocks_job* job) noexcept nogil:
    # Whether a block is one run of bytes on either side of every lane, at a multiple of one step.
    cdef int k
    cdef const block_lane* lane
    for k in range(job.n_lanes):
        lane = &job.lanes[k]
        if not (lane.here.flat and lane.full.flat and lane.pieces == 1):
            return False
        if job.plan.block != 1 and not lane.packed_read:
            return False
    return True


cdef void copy_ops(const blocks_job* job, int64_t r, const kv_isa* isa) noexcept nogil:
    cdef const select_job* plan = job.plan
    cdef const select_row* row = &plan.rows[r]
    cdef const block_lane* lane
    cdef int64_t i, slot, tokens, from_op = first_op(plan, r), from_entry = first_entry(plan, r)
    cdef int64_t tail = tail_of(plan, row)
    cdef select_op op
    cdef int k
    for i in range(row.n_ops):
        get_op(plan, r, from_op + i, from_entry + i, &op)
        slot = place_slot(plan, r, op.place)
        tokens = tail if i == row.partial else plan.block
        for k in range(job.n_lanes):
            lane = &job.lanes[k]
            if op.kind == READ:
                copy_block(lane, at(&lane.here, slot), at(&lane.full, op.src), &lane.full,
                           lane.packed_read, tokens, isa)
            else:
                copy_block(lane, at(&lane.here, slot), at(&lane.here, op.src), &lane.here,
                           lane.packed_move, tokens, isa)


# Where the ops of some rows are looked up next.
ctypedef struct cursor:
    int64_t row
    int64_t op
    int64_t left           # in that row
    int64_t known          # looked up so far


cdef void look_up(const select_job* plan, cursor* at, select_op* ring) noexcept nogil:
    # The next ops, with their slots.
    cdef const select_row* row
    cdef select_op* op
    cdef int64_t i, n, from_op, from_entry
    while at.left == 0:
        at.row += 1
        at.op = 0
        at.left = plan.rows[at.row].n_ops
    row = &plan.rows[at.row]
    n = at.left if at.left < BATCH else BATCH
    from_op = first_op(plan, at.row) + at.op
    from_entry = first_entry(plan, at.row) + at.op
    for i in range(n):
        op = &ring[(at.known + i) & (RING - 1)]
        get_op(plan, at.row, from_op + i, from_entry + i, op)
        op.place = place_slot(plan, at.row, op.place)
        op.tokens = plan.block
    i = row.partial - at.op
    if 0 <= i < n:
        ring[(at.known + i) & (RING - 1)].tokens = tail_of(plan, row)
    at.op += n
    at.left -= n
    at.known += n


cdef void copy_plain_ops(
    const blocks_job* job, int64_t begin, int64_t end, const kv_isa* isa
) noexcept nogil:
    # The same for all ops of some rows and plain lanes, with the lines of the blocks ahead asked
    # for: over the ends of rows too, where memory would stand idle.  An op is looked up once, when
    # its source is asked for, and waits in a ring: what waits for memory here is the processor's
    # window of instructions, so the loop is lean.
    cdef const select_job* plan = job.plan
    cdef int64_t block = plan.block
    cdef int n_lanes = job.n_lanes
    cdef bint past = isa != NULL and isa.asks == 0
    cdef int64_t least = PAST_PIECE if past else STREAM_PIECE
    cdef char* here[2]
    cdef const char* full[2]
    cdef int64_t here_step[2]
    cdef int64_t full_step[2]
    cdef int64_t token_bytes[2]
    cdef int64_t asked[2]
    cdef select_op ring[RING]
    cdef select_op* op
    cdef cursor at
    cdef int64_t i, n, reading, writing, total = 0, n_ops = 0
    cdef const char* source
    cdef char* target
    cdef int k
    for i in range(begin, end):
        n_ops += plan.rows[i].n_ops
    for k in range(n_lanes):
        here[k] = job.lanes[k].here.base
        full[k] = job.lanes[k].full.base
        here_step[k] = job.lanes[k].here.row_stride
        full_step[k] = job.lanes[k].full.row_stride
        token_bytes[k] = job.lanes[k].bytes
        asked[k] = token_bytes[k] * block
        asked[k] = asked[k] if asked[k] < MOST_ASKED else MOST_ASKED
        total += asked[k]
    at.row = begin - 1
    at.left = at.known = 0
    reading = ahead(total, READ_AHEAD_BYTES, PAST_AHEAD_OPS if past else AHEAD_OPS)
    writing = ahead(total, WRITE_AHEAD_BYTES, AHEAD_OPS)
    for i in range(-reading, n_ops):
        # The first rounds only ask.
        if i + reading < n_ops:
            if i + reading == at.known:
                look_up(plan, &at, ring)
            op = &ring[(i + reading) & (RING - 1)]
            if op.kind == READ:
                for k in range(n_lanes):
                    if past:
                        kv_read_lines(full[k] + op.src * full_step[k], asked[k])
                    else:
                        kv_fetch_lines(full[k] + op.src * full_step[k], asked[k])
        if 0 <= i + writing < n_ops:
            op = &ring[(i + writing) & (RING - 1)]
            for k in range(n_lanes):
                claim(here[k] + op.place * here_step[k], asked[k], isa)
        if i < 0:
            continue
        op = &ring[i & (RING - 1)]
        for k in range(n_lanes):
            n = op.tokens * token_bytes[k]
            target = here[k] + op.place * here_step[k]
            kv_inside(job.lanes[k].here.lo, job.lanes[k].here.hi, target, n, "selection")
            if op.kind == READ:
                source = full[k] + op.src * full_step[k]
                kv_inside(job.lanes[k].full.lo, job.lanes[k].full.hi, source, n, "full")
            else:
                source = here[k] + op.src * here_step[k]
                kv_inside(job.lanes[k].here.lo, job.lanes[k].here.hi, source, n, "selection")
            if isa != NULL and n >= least:
                isa.row(target, source, n)
            else:
                kv_copy(target, source, n)


cdef void rows_chunk(void* context, int64_t chunk) noexcept nogil:
    cdef const blocks_job* job = <const blocks_job*>context
    cdef const kv_isa* isa = active() if job.streaming else NULL
    cdef int64_t r, begin = chunk * job.chunk_rows, end = begin + job.chunk_rows
    cdef int k
    if end > job.plan.n_rows:
        end = job.plan.n_rows
    for r in range(begin, end):
        if job.plan.rows[r].swap:
            for k in range(job.n_lanes):
                swap(&job.lanes[k], job.plan, r)
    if job.plain:
        copy_plain_ops(job, begin, end, isa)
    elif job.n_lanes:
        for r in range(begin, end):
            copy_ops(job, r, isa)
    for r in range(begin, end):
        write_status(job.plan, r)
    if isa != NULL:
        isa.fence()


cdef void run_blocks(blocks_job* job, int n_threads) noexcept nogil:
    cdef int64_t n_rows = job.plan.n_rows
    job.plain = job.n_lanes > 0 and is_plain(job)
    job.chunk_rows = n_rows if n_threads <= 1 else 1 + n_rows // (CHUNKS_A_THREAD * n_threads)
    run_chunks(rows_chunk, job, (n_rows + job.chunk_rows - 1) // job.chunk_rows, n_threads)
