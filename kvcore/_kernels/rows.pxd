# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t

from kvcore._kernels.isa cimport kv_isa

cdef extern from "lanes.h" nogil:
    ctypedef struct kv_lane:
        char* tok
        int64_t tok_inner
        int64_t tok_outer_stride
        int64_t tok_stride
        char* page
        int64_t block_size
        int64_t block_stride
        int64_t row_stride
        int32_t flat
        int32_t shift
        int32_t levels
        int32_t tiled
        int64_t n[3]
        int64_t tok_step[3]
        int64_t page_step[3]
        int64_t bytes
        int64_t token_bytes
        const char* tok_lo
        const char* tok_hi
        const char* page_lo
        const char* page_hi

    char* kv_tok(const kv_lane* lane, int64_t i)
    char* kv_page(const kv_lane* lane, int64_t slot)
    void kv_copy(char* dst, const char* src, int64_t n)
    void kv_inside(const char* lo, const char* hi, const char* p, int64_t n, const char* what)

ctypedef struct rows_job:
    const kv_lane* lanes
    int n_lanes
    const int64_t* slots
    int64_t n_tokens
    int64_t num_slots
    bint gather            # copy from the paged side to the linear side
    const kv_isa* isa      # NULL: ordinary stores
    const int32_t* order   # tokens by slot, or NULL: as they come
    int64_t n_ordered      # tokens in the order
    int64_t chunk_tokens   # unordered: tokens a chunk
    int64_t n_parts        # repeated slots: chunk p takes the slots that hash to p

cdef void copy_tokens(
    const kv_lane* lane, const int64_t* slots, int64_t begin, int64_t end, bint gather,
    const kv_isa* isa
) noexcept nogil
cdef void run_rows(rows_job* job, int n_threads, bint repeats) noexcept nogil
