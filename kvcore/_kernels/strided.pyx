# SPDX-License-Identifier: Apache-2.0
"""Rows with any number of strided axes: the general scatter behind rows.pyx.

rows.pyx knows three loops in a token and two over tokens, which is enough for every cache.  A
tensor whose axes were permuted and sliced at will has more.
"""

from libc.stdint cimport int64_t

from kvcore._kernels.lanes cimport kv_copy, kv_inside, kv_lane


cdef void copy_loops(
    const kv_lane* lane, char* tok, char* page, const strided_loop* loops, int n_loops
) noexcept nogil:
    cdef int64_t i
    if n_loops == 0:
        kv_inside(lane.tok_lo, lane.tok_hi, tok, lane.bytes, "token")
        kv_inside(lane.page_lo, lane.page_hi, page, lane.bytes, "cache")
        kv_copy(page, tok, lane.bytes)
        return
    for i in range(loops.n):
        copy_loops(
            lane, tok + i * loops.tok_step, page + i * loops.page_step, loops + 1, n_loops - 1
        )


cdef const int64_t* scatter_tokens(
    const kv_lane* lane, const int64_t* slots, char* tok, const strided_loop* tokens, int n_tokens,
    const strided_loop* loops, int n_loops
) noexcept nogil:
    # Returns the place behind the slots that it used.
    cdef int64_t i
    if n_tokens == 0:
        if slots[0] >= 0:
            copy_loops(lane, tok, lane.page + slots[0] * lane.row_stride, loops, n_loops)
        return slots + 1
    for i in range(tokens.n):
        slots = scatter_tokens(
            lane, slots, tok + i * tokens.tok_step, tokens + 1, n_tokens - 1, loops, n_loops
        )
    return slots


cdef void scatter_strided(
    const kv_lane* lane, const int64_t* slots, const strided_loop* tokens, int n_tokens,
    const strided_loop* loops, int n_loops
) noexcept nogil:
    # Token by token in row-major order of the loops over tokens, so that of repeated slots the
    # last one wins.  Slot s begins at lane.page + s * lane.row_stride; a negative one is skipped.
    scatter_tokens(lane, slots, lane.tok, tokens, n_tokens, loops, n_loops)
