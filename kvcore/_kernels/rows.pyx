# SPDX-License-Identifier: Apache-2.0
"""Token rows between a linear array and a paged cache: Norm, NHSD, PA_NZ, contiguous caches.

One loop serves all layouts, because a lane says where a token's pieces lie on either side.
Tokens go in order, so of repeated slots the last token wins.  With several threads the tokens
are dealt out in chunks when no slot repeats; otherwise each chunk takes the tokens of its own
share of the slots, in order, and the result is the same.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc

from kvcore._kernels.isa cimport (
    active,
    kv_isa,
    kv_order_by_slot,
    kv_will_read,
    kv_will_write,
    streaming_threshold,
)
from kvcore._kernels.lanes cimport kv_copy, kv_inside, kv_lane, kv_page, kv_tok
from kvcore._kernels.parallel cimport run_chunks
from kvcore._kernels.scan cimport strictly_increasing
from kvcore._kernels.tiles cimport copy_tiles

# Shorter pieces have no whole lines worth streaming.
cdef enum:
    STREAM_PIECE = 128

# Shorter ones are left to the C library.
cdef enum:
    COPY_PIECE = 512

# Rows that are written together at the most, where rows lie one behind the other.
cdef enum:
    JOINED = 16

# What several threads take at a time: a thread that loses its core holds no more than this.
cdef enum:
    PIECE_BYTES = 262144
    LEAST_TOKENS = 32

cdef enum:
    INT32_LIMIT = 2147483647


cdef inline void move(
    const kv_lane* lane, char* tok, char* page, int64_t n, bint gather, const kv_isa* isa
) noexcept nogil:
    # isa: NULL for ordinary stores.
    kv_inside(lane.tok_lo, lane.tok_hi, tok, n, "token")
    kv_inside(lane.page_lo, lane.page_hi, page, n, "cache")
    if isa != NULL and n >= STREAM_PIECE:
        if gather:
            isa.stream(tok, page, n)
        else:
            isa.stream(page, tok, n)
    elif n >= COPY_PIECE:
        if gather:
            active().copy(tok, page, n)
        else:
            active().copy(page, tok, n)
    elif gather:
        kv_copy(tok, page, n)
    else:
        kv_copy(page, tok, n)


cdef inline void ask(char* page, int64_t n) noexcept nogil:
    # The first and last line of a piece hold bytes of others too: those lines must be read before
    # they are written, and streaming does not hide that.
    kv_will_write(page)
    kv_will_write(page + n - 1)


cdef inline void copy_pieces(
    const kv_lane* lane, char* tok, char* page, char* later, bint gather, const kv_isa* isa
) noexcept nogil:
    # later: the page of a token to come, or NULL. Its pieces are asked for one by one, since those
    # of one token often fall into one set of the first-level cache and would push each other out.
    cdef int64_t i, j, k, n = lane.bytes
    cdef char* t1
    cdef char* p1
    cdef char* t2
    cdef char* p2
    if lane.levels == 1:
        for i in range(lane.n[0]):
            if later != NULL:
                ask(later + i * lane.page_step[0], n)
            move(lane, tok + i * lane.tok_step[0], page + i * lane.page_step[0], n, gather, isa)
    elif lane.levels == 2:
        for i in range(lane.n[0]):
            t1 = tok + i * lane.tok_step[0]
            p1 = page + i * lane.page_step[0]
            for j in range(lane.n[1]):
                p2 = p1 + j * lane.page_step[1]
                if later != NULL:
                    ask(later + i * lane.page_step[0] + j * lane.page_step[1], n)
                move(lane, t1 + j * lane.tok_step[1], p2, n, gather, isa)
    else:
        for i in range(lane.n[0]):
            t1 = tok + i * lane.tok_step[0]
            p1 = page + i * lane.page_step[0]
            for j in range(lane.n[1]):
                t2 = t1 + j * lane.tok_step[1]
                p2 = p1 + j * lane.page_step[1]
                for k in range(lane.n[2]):
                    move(
                        lane, t2 + k * lane.tok_step[2], p2 + k * lane.page_step[2], n, gather, isa
                    )


cdef inline bint asks(const kv_lane* lane, bint gather, const kv_isa* isa) noexcept nogil:
    # Whole lines only, or pieces too short to stream: nothing to ask for.
    return (
        isa != NULL
        and isa.asks > 0
        and not gather
        and lane.bytes >= STREAM_PIECE
        and (<size_t>lane.page | lane.bytes | lane.row_stride) & 63 != 0
    )


cdef inline bint packed(const kv_lane* lane) noexcept nogil:
    return (
        lane.tok_inner == 0
        and lane.tok_stride == lane.bytes
        and lane.row_stride == lane.bytes
    )


cdef void copy_whole(
    const kv_lane* lanes, int n_lanes, const int64_t* slots, int64_t begin, int64_t end,
    bint gather, const kv_isa* isa
) noexcept nogil:
    # A token is one piece. Consecutive slots of packed rows are one copy. The lanes' tokens are
    # moved in turn: several rows on their way hide more of the memory's latency than one.
    cdef int64_t i = begin, j, slot, limit
    cdef int k
    cdef bint asking = False, joining = True, flat = True
    for k in range(n_lanes):
        asking = asking or asks(&lanes[k], gather, isa)
        joining = joining and packed(&lanes[k])
        flat = flat and lanes[k].flat
    while i < end:
        slot = slots[i]
        if slot < 0:
            i += 1
            continue
        j = i + 1
        if joining:
            limit = end
            if not flat and lanes.block_size - slot % lanes.block_size < limit - i:
                limit = i + lanes.block_size - slot % lanes.block_size
            while j < limit and slots[j] == slot + (j - i):
                j += 1
        if asking and j + isa.asks - 1 < end and slots[j + isa.asks - 1] >= 0:
            for k in range(n_lanes):
                ask(kv_page(&lanes[k], slots[j + isa.asks - 1]), lanes[k].bytes)
        for k in range(n_lanes):
            move(
                &lanes[k], kv_tok(&lanes[k], i), kv_page(&lanes[k], slot),
                (j - i) * lanes[k].bytes, gather, isa
            )
        i = j


cdef inline bint turns(const rows_job* job) noexcept nogil:
    # Whether every lane's token is one piece, in blocks of one size.
    cdef int k
    for k in range(job.n_lanes):
        if (
            job.lanes[k].levels != 0
            or job.lanes[k].token_bytes == 0
            or job.lanes[k].block_size != job.lanes.block_size
        ):
            return False
    return True


ctypedef struct joined_t:
    int64_t n
    char* page
    const char* toks[JOINED]


cdef inline bint joins(const kv_lane* lane, const kv_isa* isa) noexcept nogil:
    # NHSD: the pieces of neighbouring slots lie one behind the other, and share a line unless they
    # begin and end on one.
    return (
        not isa.by_token
        and lane.levels == 1
        and not lane.tiled
        and lane.bytes >= STREAM_PIECE
        and lane.row_stride == lane.bytes
        and (<size_t>lane.page | lane.bytes) & 63 != 0
    )


cdef inline int64_t next_run(
    const kv_lane* lane, const int64_t* slots, const int32_t* order, int64_t p, int64_t end,
    joined_t* run
) noexcept nogil:
    # Fills run with tokens of consecutive slots of one block; where it ends in the order.
    cdef int64_t i, slot, last = 0
    run.n = 0
    while p < end:
        i = order[p] if order != NULL else p
        slot = slots[i]
        if slot < 0 or (order != NULL and p + 1 < end and slots[order[p + 1]] == slot):
            p += 1  # skipped, or written over by a later token
            continue
        if run.n == 0:
            run.page = kv_page(lane, slot)
        elif slot != last + 1 or slot % lane.block_size == 0 or run.n == JOINED:
            break
        run.toks[run.n] = kv_tok(lane, i)
        run.n += 1
        last = slot
        p += 1
    return p


cdef void copy_joined(
    const kv_lane* lane, const int64_t* slots, const int32_t* order, int64_t begin, int64_t end,
    const kv_isa* isa
) noexcept nogil:
    cdef joined_t run
    cdef joined_t later
    cdef int64_t h, t, at, line, n = lane.bytes
    begin = next_run(lane, slots, order, begin, end, &run)
    while run.n > 0:
        begin = next_run(lane, slots, order, begin, end, &later)
        for h in range(lane.n[0]):
            at = h * lane.page_step[0]
            if later.n > 0:
                kv_will_write(later.page + at)
                kv_will_write(later.page + at + later.n * n - 1)
                if order != NULL:
                    for t in range(later.n):
                        for line in range(0, n, 64):
                            kv_will_read(later.toks[t] + h * lane.tok_step[0] + line)
            for t in range(run.n):
                kv_inside(lane.tok_lo, lane.tok_hi, run.toks[t] + h * lane.tok_step[0], n, "token")
            kv_inside(lane.page_lo, lane.page_hi, run.page + at, run.n * n, "cache")
            isa.join(run.page + at, run.toks, h * lane.tok_step[0], run.n, n)
        run = later


cdef void copy_tokens(
    const kv_lane* lane, const int64_t* slots, int64_t begin, int64_t end, bint gather,
    const kv_isa* isa
) noexcept nogil:
    cdef int64_t i
    cdef bint asking
    cdef char* later
    if lane.token_bytes == 0:
        return
    if lane.levels == 0:
        copy_whole(lane, 1, slots, begin, end, gather, isa)
    elif lane.tiled and not gather:
        copy_tiles(lane, slots, NULL, begin, end, isa)
    elif isa != NULL and not gather and joins(lane, isa):
        copy_joined(lane, slots, NULL, begin, end, isa)
    else:
        asking = asks(lane, gather, isa)
        for i in range(begin, end):
            if slots[i] < 0:
                continue
            later = NULL
            if asking and i + 1 < end and slots[i + 1] >= 0:
                later = kv_page(lane, slots[i + 1])
            copy_pieces(lane, kv_tok(lane, i), kv_page(lane, slots[i]), later, gather, isa)


cdef void copy_ordered(const rows_job* job, int64_t begin, int64_t end) noexcept nogil:
    # Tokens by slot; a chunk starts and ends between different slots.
    cdef int lane
    cdef int64_t i
    cdef const int32_t* order = job.order
    cdef const int64_t* slots = job.slots
    while 0 < begin < job.n_ordered and slots[order[begin]] == slots[order[begin - 1]]:
        begin += 1
    while 0 < end < job.n_ordered and slots[order[end]] == slots[order[end - 1]]:
        end += 1
    for lane in range(job.n_lanes):
        if job.lanes[lane].tiled:
            copy_tiles(&job.lanes[lane], slots, order, begin, end, job.isa)
        elif joins(&job.lanes[lane], job.isa):
            copy_joined(&job.lanes[lane], slots, order, begin, end, job.isa)
        else:
            for i in range(begin, end):
                copy_tokens(&job.lanes[lane], slots, order[i], order[i] + 1, False, job.isa)


cdef void copy_range(const rows_job* job, int64_t begin, int64_t end) noexcept nogil:
    cdef int lane
    if job.order != NULL:
        copy_ordered(job, begin, end)
    elif turns(job):
        copy_whole(job.lanes, job.n_lanes, job.slots, begin, end, job.gather, job.isa)
    else:
        for lane in range(job.n_lanes):
            copy_tokens(&job.lanes[lane], job.slots, begin, end, job.gather, job.isa)
    if job.isa != NULL:
        job.isa.fence()


cdef void unordered_chunk(void* context, int64_t chunk) noexcept nogil:
    cdef rows_job* job = <rows_job*>context
    cdef int64_t begin = chunk * job.chunk_tokens
    cdef int64_t end = begin + job.chunk_tokens
    copy_range(job, begin, end if end < job.n_ordered else job.n_ordered)


cdef void repeats_chunk(void* context, int64_t chunk) noexcept nogil:
    cdef rows_job* job = <rows_job*>context
    cdef int64_t i
    cdef int lane
    for lane in range(job.n_lanes):
        for i in range(job.n_tokens):
            # Eight neighbouring slots share a part: rows of less than a line stay together.
            if job.slots[i] >= 0 and (job.slots[i] >> 3) % job.n_parts == chunk:
                copy_tokens(&job.lanes[lane], job.slots, i, i + 1, job.gather, job.isa)
    if job.isa != NULL:
        job.isa.fence()


cdef int32_t* order_for(rows_job* job) noexcept nogil:
    # Only large writes gain where neighbouring rows share lines: FRACTAL_NZ, NHSD. NULL also when
    # there is no memory for it: the order is a matter of speed.
    cdef int32_t* order
    cdef int lane
    cdef bint shared = False
    if job.gather or job.isa == NULL or job.n_tokens > INT32_LIMIT:
        return NULL
    for lane in range(job.n_lanes):
        if job.lanes[lane].tiled or joins(&job.lanes[lane], job.isa):
            shared = True
    if not shared:
        return NULL
    if strictly_increasing(job.slots, job.n_tokens):
        return NULL
    order = <int32_t*>malloc(<size_t>job.n_tokens * 8)
    if order != NULL:
        job.n_ordered = kv_order_by_slot(
            job.slots, job.n_tokens, job.num_slots, order, order + job.n_tokens
        )
    return order


cdef void run_rows(rows_job* job, int n_threads, bint repeats) noexcept nogil:
    """repeats: whether a slot may occur twice; matters with several threads only."""
    cdef int lane
    cdef int64_t chunks, most, total = 0
    cdef int32_t* order
    for lane in range(job.n_lanes):
        total += job.lanes[lane].token_bytes * job.n_tokens
    # NULL where what is written fits the core's own cache.
    job.isa = active() if total >= streaming_threshold() else NULL
    job.n_ordered = job.n_tokens
    order = order_for(job)
    job.order = order
    if n_threads <= 1:
        copy_range(job, 0, job.n_ordered)
    elif repeats and order == NULL:
        job.n_parts = 2 * n_threads
        run_chunks(repeats_chunk, job, job.n_parts, n_threads)
    else:
        chunks = 8 * n_threads
        job.chunk_tokens = (job.n_ordered + chunks - 1) // chunks
        if job.chunk_tokens < 1:
            job.chunk_tokens = 1
        most = LEAST_TOKENS
        if total // job.n_tokens * LEAST_TOKENS < PIECE_BYTES:
            most = PIECE_BYTES // (total // job.n_tokens + 1)
        if job.chunk_tokens > most:
            job.chunk_tokens = most
        run_chunks(
            unordered_chunk,
            job,
            (job.n_ordered + job.chunk_tokens - 1) // job.chunk_tokens,
            n_threads,
        )
    free(order)


def scatter(
    const unsigned char[:, ::1] tokens,
    unsigned char[:, :, ::1] cache,
    const int64_t[::1] slots,
    int n_threads=1,
):
    """Copy tokens[i] over cache[slot // block_size, slot % block_size]; negative slots skip.

    tokens: [token, byte]; cache: [block, row, byte], written in place; slots: [token], each
    below blocks * rows.  Raises ValueError on shapes that disagree and IndexError on a slot
    outside, before anything is written.  The operators' own path to the same loops goes
    through plans; this door is for tests and for byte arrays already at hand.
    """
    _run_bytes(tokens, cache, slots, n_threads, False)


def gather(
    unsigned char[:, ::1] tokens,
    const unsigned char[:, :, ::1] cache,
    const int64_t[::1] slots,
    int n_threads=1,
):
    """Copy cache[slot // block_size, slot % block_size] over tokens[i]; the inverse of scatter."""
    _run_bytes(tokens, cache, slots, n_threads, True)


cdef _run_bytes(
    const unsigned char[:, ::1] tokens,
    const unsigned char[:, :, ::1] cache,
    const int64_t[::1] slots,
    int n_threads,
    bint back,
):
    cdef kv_lane lane
    cdef rows_job job
    cdef int64_t i, n = tokens.shape[0], bound = cache.shape[0] * cache.shape[1]
    if slots.shape[0] != n or cache.shape[2] != tokens.shape[1]:
        raise ValueError(
            f"expected slots [{n}] and cache rows of {tokens.shape[1]} bytes, "
            f"got [{slots.shape[0]}] and {cache.shape[2]}"
        )
    if not 1 <= n_threads <= 1024:
        raise ValueError(f"n_threads: expected 1 to 1024, got {n_threads}")
    for i in range(n):
        if slots[i] >= bound:
            raise IndexError(f"slots[{i}]: expected < {bound}, got {slots[i]}")
    if n == 0 or bound == 0 or tokens.shape[1] == 0:
        return
    lane.tok = <char*>&tokens[0, 0]
    lane.tok_inner = 0
    lane.tok_outer_stride = 0
    lane.tok_stride = tokens.strides[0]
    lane.page = <char*>&cache[0, 0, 0]
    lane.block_size = cache.shape[1]
    lane.block_stride = cache.strides[0]
    lane.row_stride = cache.strides[1]
    lane.flat = lane.block_stride == lane.block_size * lane.row_stride
    lane.shift = -1
    lane.levels = 0
    lane.tiled = 0
    lane.bytes = tokens.shape[1]
    lane.token_bytes = lane.bytes
    lane.tok_lo = lane.tok
    lane.tok_hi = lane.tok + (n - 1) * lane.tok_stride + lane.bytes
    lane.page_lo = lane.page
    lane.page_hi = (
        lane.page
        + (cache.shape[0] - 1) * lane.block_stride
        + (cache.shape[1] - 1) * lane.row_stride
        + lane.bytes
    )
    job.lanes = &lane
    job.n_lanes = 1
    job.slots = &slots[0]
    job.n_tokens = n
    job.num_slots = bound
    job.gather = back
    with nogil:
        run_rows(&job, n_threads, True)
