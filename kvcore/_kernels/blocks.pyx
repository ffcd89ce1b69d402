# SPDX-License-Identifier: Apache-2.0
"""Moves what select.pyx planned: the copying half of GatherSelectionKvCache.

In each row the swap comes first, for it saves blocks from being overwritten.  After it no op
reads what another writes: movers leave places at or behind the row's count and take places
before it, and each place has memory of its own (checked before).

Source rows lie anywhere in a cache that may be far larger than any processor cache, so the rows
ahead are asked for; where a call writes more than a core's own cache holds, it writes past it.
"""

from libc.stdint cimport int64_t
from libc.string cimport memcpy

from kvcore._kernels.isa cimport active, kv_isa
from kvcore._kernels.parallel cimport run_chunks
from kvcore._kernels.select cimport (
    EXCHANGE,
    FROM_LAST,
    READ,
    TO_LAST,
    divisor,
    place_slot,
    quotient,
    remainder,
    select_job,
    select_op,
    select_row,
    write_status,
)

cdef extern from "lanes.h" nogil:
    void kv_copy(char* dst, const char* src, int64_t n)
    void kv_inside(const char* lo, const char* hi, const char* p, int64_t n, const char* what)

cdef extern from *:
    """
    /* kv_fetch asks for a line into the second-level cache: asked into the first, lines push out
       what is being copied.  kv_claim asks for one to be written.  (PREFETCHW is in every 64-bit
       x86, as a no-op at the least; the compiler takes it for newer ones only.) */
    #if defined(__GNUC__)
    #define kv_fetch(p) __builtin_prefetch((p), 0, 2)
    #if defined(__x86_64__)
    #define kv_claim(p) __asm__ volatile("prefetchw %0" ::"m"(*(const char *)(p)))
    #else
    #define kv_claim(p) __builtin_prefetch((p), 1, 3)
    #endif
    #else
    #define kv_fetch(p) ((void)(p))
    #define kv_claim(p) ((void)(p))
    #endif
    """
    void kv_fetch(const char* p) noexcept nogil
    void kv_claim(const char* p) noexcept nogil

cdef enum:
    LINE = 64
    STREAM_PIECE = 512     # shorter pieces are mostly lines that others share
    # How far ahead of the copy lines are asked for, in bytes and at most in blocks.
    READ_AHEAD_BYTES = 16384
    WRITE_AHEAD_BYTES = 4096
    AHEAD_OPS = 32
    # Of a larger block the first bytes are enough: the processor follows a run by itself.
    MOST_ASKED = 4096
    EXCHANGE_BYTES = 256


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


cdef void swap(const block_lane* lane, const select_row* row, int64_t block) noexcept nogil:
    # Held blocks are whole.
    cdef char* place = at(&lane.here, row.swap_slot)
    cdef char* last = at(&lane.here, row.last_slot)
    if row.swap == EXCHANGE:
        exchange(lane, place, last, block)
    elif row.swap == TO_LAST:
        copy_block(lane, last, place, &lane.here, lane.packed_move, block, NULL)
    elif row.swap == FROM_LAST:
        copy_block(lane, place, last, &lane.here, lane.packed_move, block, NULL)


cdef inline int64_t ahead(int64_t nbytes, int64_t most_bytes, int64_t most) noexcept nogil:
    cdef int64_t n = most_bytes // nbytes
    return 1 if n < 1 else most if n > most else n


cdef inline void fetch(const char* p, int64_t n) noexcept nogil:
    cdef const char* end = p + n
    p -= <size_t>p & (LINE - 1)
    while p < end:
        kv_fetch(p)
        p += LINE


cdef inline void claim(const char* p, int64_t n, bint streaming) noexcept nogil:
    cdef const char* end = p + n
    if streaming and n >= STREAM_PIECE:
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
    cdef const select_op* ops = plan.ops + r * plan.topk
    cdef const int64_t* used = plan.used + r * plan.topk
    cdef const block_lane* lane
    cdef int64_t i, slot, tokens
    cdef int k
    for i in range(row.n_ops):
        slot = place_slot(plan, used, ops[i].place)
        tokens = row.tail if i == row.partial else plan.block
        for k in range(job.n_lanes):
            lane = &job.lanes[k]
            if ops[i].kind == READ:
                copy_block(lane, at(&lane.here, slot), at(&lane.full, ops[i].src), &lane.full,
                           lane.packed_read, tokens, isa)
            else:
                copy_block(lane, at(&lane.here, slot), at(&lane.here, ops[i].src), &lane.here,
                           lane.packed_move, tokens, isa)


cdef void copy_plain_ops(const blocks_job* job, int64_t r, const kv_isa* isa) noexcept nogil:
    # The same for plain lanes, with the lines of the blocks ahead asked for.  The loop is lean on
    # purpose: what waits for memory here is the processor's window of instructions.
    cdef const select_row* row = &job.plan.rows[r]
    cdef const select_op* ops = job.plan.ops + r * job.plan.topk
    cdef const int64_t* used = job.plan.used + r * job.plan.topk
    cdef int64_t page = job.plan.page, block = job.plan.block, n_ops = row.n_ops
    cdef divisor per_page = job.plan.per_page
    cdef int n_lanes = job.n_lanes
    cdef bint streaming = isa != NULL
    cdef char* here[2]
    cdef const char* full[2]
    cdef int64_t here_step[2]
    cdef int64_t full_step[2]
    cdef int64_t nbytes[2]
    cdef int64_t asked[2]
    cdef int64_t i, n, place, slot, reading, writing, total = 0
    cdef const char* source
    cdef const select_op* op
    cdef int k
    for k in range(n_lanes):
        here[k] = job.lanes[k].here.base
        full[k] = job.lanes[k].full.base
        here_step[k] = job.lanes[k].here.row_stride
        full_step[k] = job.lanes[k].full.row_stride
        nbytes[k] = job.lanes[k].bytes * block
        asked[k] = nbytes[k] if nbytes[k] < MOST_ASKED else MOST_ASKED
        total += asked[k]
    reading = ahead(total, READ_AHEAD_BYTES, AHEAD_OPS)
    writing = ahead(total, WRITE_AHEAD_BYTES, AHEAD_OPS)
    for i in range(-reading, n_ops):
        # The first rounds only ask.
        op = ops + i
        if i + reading < n_ops and op[reading].kind == READ:
            for k in range(n_lanes):
                fetch(full[k] + op[reading].src * full_step[k], asked[k])
        if i + writing < 0:
            continue
        if i + writing < n_ops:
            place = op[writing].place
            slot = used[quotient(place, &per_page)] * page + remainder(place, &per_page) * block
            for k in range(n_lanes):
                claim(here[k] + slot * here_step[k], asked[k], streaming)
        if i < 0:
            continue
        slot = used[quotient(op.place, &per_page)] * page + remainder(op.place, &per_page) * block
        for k in range(n_lanes):
            n = nbytes[k]
            if i == row.partial:
                n = n // block * row.tail
            if op.kind == READ:
                source = full[k] + op.src * full_step[k]
            else:
                source = here[k] + op.src * here_step[k]
            kv_inside(job.lanes[k].here.lo, job.lanes[k].here.hi, here[k] + slot * here_step[k], n,
                      "selection")
            if op.kind == READ:
                kv_inside(job.lanes[k].full.lo, job.lanes[k].full.hi, source, n, "full")
            else:
                kv_inside(job.lanes[k].here.lo, job.lanes[k].here.hi, source, n, "selection")
            if streaming and n >= STREAM_PIECE:
                isa.row(here[k] + slot * here_step[k], source, n)
            else:
                kv_copy(here[k] + slot * here_step[k], source, n)


cdef void row_chunk(void* context, int64_t r) noexcept nogil:
    cdef const blocks_job* job = <const blocks_job*>context
    cdef const kv_isa* isa = active() if job.streaming else NULL
    cdef int lane
    if job.plan.rows[r].swap:
        for lane in range(job.n_lanes):
            swap(&job.lanes[lane], &job.plan.rows[r], job.plan.block)
    if job.plain:
        copy_plain_ops(job, r, isa)
    else:
        copy_ops(job, r, isa)
    write_status(job.plan, r)
    if isa != NULL:
        isa.fence()


cdef void run_blocks(blocks_job* job, int n_threads) noexcept nogil:
    job.plain = job.n_lanes > 0 and is_plain(job)
    run_chunks(row_chunk, job, job.plan.n_rows, n_threads)
