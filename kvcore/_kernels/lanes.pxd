# SPDX-License-Identifier: Apache-2.0
#
# What lanes.h gives every kernel that moves rows: a lane, and the way to a token and a slot of it.
from libc.stdint cimport int32_t, int64_t

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
