# SPDX-License-Identifier: Apache-2.0
"""FRACTAL_NZ writes: a token is many 32-byte cells, one a column, far from each other.

Written token by token, each cell costs a line read and a line written.  So tokens are taken many
at a time and written column by column: those of a run of slots lie side by side there and fill
whole lines; of the others at least the lines' latency is hidden, because they are asked for two
columns ahead.  Tokens that come by slot (``order``) find their neighbours in the same window.
"""

from libc.stdint cimport int32_t, int64_t

from kvcore._kernels.isa cimport kv_cells, kv_isa, kv_will_read
from kvcore._kernels.lanes cimport kv_inside, kv_lane, kv_page, kv_tok

cdef enum:
    WINDOW = 32      # tokens written together when their slots are no run
    LONGEST_RUN = 128  # a block, mostly: each end of a run is part of a line
    SHORTEST_RUN = 8  # below it a run has too few whole lines to be worth leaving the window
    CELL = 32


ctypedef struct window_t:
    int64_t n
    int64_t n_later
    char* pages[WINDOW]
    const char* toks[WINDOW]
    const char* later[WINDOW]  # of the window after this one


cdef inline void check_token(const kv_lane* lane, const char* tok, const char* page) noexcept nogil:
    # For the debug build: the first and last cell on either side.
    cdef int last = lane.levels - 1
    cdef int64_t head = lane.n[0] - 1 if last else 0
    cdef int64_t column = lane.n[last] - 1
    kv_inside(lane.tok_lo, lane.tok_hi, tok, CELL, "token")
    kv_inside(lane.page_lo, lane.page_hi, page, CELL, "cache")
    tok += column * lane.tok_step[last]
    page += column * lane.page_step[last]
    if last:
        tok += head * lane.tok_step[0]
        page += head * lane.page_step[0]
    kv_inside(lane.tok_lo, lane.tok_hi, tok, CELL, "token")
    kv_inside(lane.page_lo, lane.page_hi, page, CELL, "cache")


cdef void flush(const kv_lane* lane, window_t* window, const kv_isa* isa) noexcept nogil:
    cdef int last = lane.levels - 1
    cdef int64_t head, page_at, at
    cdef int64_t heads = lane.n[0] if last else 1
    for head in range(heads):
        page_at = head * lane.page_step[0] if last else 0
        at = head * lane.tok_step[0] if last else 0
        if isa == NULL:
            kv_cells(
                window.pages, page_at, lane.page_step[last], window.toks, at, window.n, lane.n[last]
            )
        else:
            isa.cells(
                window.pages, page_at, lane.page_step[last], window.toks, window.later, at,
                window.n, window.n_later, lane.n[last],
            )
    window.n = window.n_later = 0


cdef void write_run(
    const kv_lane* lane, char* page, const char** toks, int64_t n, const kv_isa* isa
) noexcept nogil:
    cdef int last = lane.levels - 1
    cdef int64_t head
    cdef int64_t heads = lane.n[0] if last else 1
    for head in range(heads):
        isa.run(
            page + (head * lane.page_step[0] if last else 0),
            lane.page_step[last],
            toks,
            head * lane.tok_step[0] if last else 0,
            n,
            lane.n[last],
        )


cdef void copy_tiles(
    const kv_lane* lane, const int64_t* slots, const int32_t* order, int64_t begin, int64_t end,
    const kv_isa* isa
) noexcept nogil:
    """Tokens begin..end of the order (NULL: as they come), the later of one slot written later."""
    cdef window_t window
    cdef const char* toks[LONGEST_RUN]
    cdef const char* tok
    cdef int64_t p = begin, slot, i, n, limit, line
    window.n = window.n_later = 0
    while p < end:
        i = order[p] if order != NULL else p
        slot = slots[i]
        if slot < 0:
            p += 1
            continue
        limit = lane.block_size - slot % lane.block_size
        if limit > LONGEST_RUN:
            limit = LONGEST_RUN
        if limit > end - p:
            limit = end - p
        n = 0
        while n < limit:
            i = order[p + n] if order != NULL else p + n
            if slots[i] != slot + n:
                break
            toks[n] = kv_tok(lane, i)
            check_token(lane, toks[n], kv_page(lane, slot + n))
            n += 1
        p += n
        if isa != NULL and n >= SHORTEST_RUN and lane.row_stride == CELL:
            # What waits in the window may hold an earlier token of the same slot.
            flush(lane, &window, isa)
            write_run(lane, kv_page(lane, slot), toks, n, isa)
            continue
        for i in range(n):
            window.toks[window.n] = toks[i]
            window.pages[window.n] = kv_page(lane, slot + i)
            window.n += 1
            tok = NULL
            if order != NULL and p + WINDOW < end:
                tok = kv_tok(lane, order[p + WINDOW - n + i])
                if isa.by_token:
                    window.later[window.n_later] = tok
                    window.n_later += 1
                    tok = NULL
            if window.n == WINDOW:
                flush(lane, &window, isa)
            if tok != NULL:
                for line in range(0, lane.token_bytes, 64):
                    kv_will_read(tok + line)
    flush(lane, &window, isa)
